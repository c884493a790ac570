"""The checkpoint side of the axlearn study: what survives a crash, what is the same after it, and what saving costs."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchard.core.report import Scalar, Value
from orchard.studies import _crashes, _resumed, _saving

INTERVAL = 10
"""The claim about the cost of saving is for one save in so many steps."""


@dataclass(frozen=True)
class Effort:
    bytes: int
    """A write dies after every so many bytes."""
    touches: int
    """A run dies at every so many touches of the disk."""
    rounds: Mapping[int, int]
    """How often each interval between saves is timed in each of the three ways."""
    size: _saving.Size = field(default_factory=_saving.Size)


EFFORTS = {
    "small": Effort(bytes=1, touches=7, rounds={INTERVAL: 7, 3: 7, 1: 9}),
    "full": Effort(bytes=1, touches=1, rounds={INTERVAL: 15, 30: 5, 3: 15, 1: 15}),
}


def values(scale: str, seed: int) -> tuple[dict[str, Value | Scalar], list[str]]:
    """What was measured, and examples of what went wrong."""
    effort = EFFORTS[scale]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        crashed = _crashes.crashes(base / "crashes", effort.bytes)
        resumed = _resumed.resumed(base / "resumed", seed, effort.touches)
        blocks, size = _saving.measured(base / "saving", seed, effort.rounds, effort.size)
    found: dict[str, Value | Scalar] = {
        **_crash_values(crashed),
        "resumed_runs": Value(
            resumed.runs, note=f"of {_resumed.STEPS} steps; {resumed.again} of them died before their first checkpoint"
        ),
        "losses_compared": resumed.losses,
        "differing_losses": Value(resumed.different, note="bit for bit, against the run that did not die"),
        "checkpoint_size": Value(size / 1e6, "MB", note=_sized(effort.size)),
    }
    for interval, block in blocks.items():
        name = "" if interval == INTERVAL else f"_{interval}"
        step = statistics.median(block.seconds["none"]) * 1e3
        found |= {
            f"async_added{name}": block.added("async"),
            f"sync_added{name}": block.added("sync"),
            f"step_time{name}": Value(step, "ms", note="without saving, in the same rounds"),
        }
    main = blocks[INTERVAL]
    found["async_call"] = Value(statistics.median(main.calls["async"]) * 1e3, "ms", note="until the save comes back")
    found["sync_call"] = Value(statistics.median(main.calls["sync"]) * 1e3, "ms", note="until all is on the disk")
    return found, crashed.examples


def _crash_values(crashed: _crashes.Found) -> dict[str, Value | Scalar]:
    kinds = ", ".join(f"{how} {number}" for how, number in crashed.points.items())
    return {
        "crash_points": Value(sum(crashed.points.values()), note=kinds),
        "corrupt_restores": Value(
            crashed.corrupt, note=f"the step before was restored {crashed.old} times, the new one {crashed.new} times"
        ),
        "restores_failed": Value(crashed.lost, note="points after which what is offered cannot be loaded"),
    }


def _sized(size: _saving.Size) -> str:
    tokens = size.rows * size.length
    return f"weights, AdamW and averages; {size.layers} layers of {size.dim}, {tokens} tokens a step"
