"""What saving costs a run: the same steps without it, with it beside training, and with training waiting for it, by turns.

A block is a save and the steps until the next one would be due; what is still being written at its end is waited for and counts.
So neither way of saving can hide work in another's time, and what the machine does besides meets all three alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchard.core.report import Value
from orchard.studies import _learning
from orchard.train.checkpoint import Checkpoints
from orchard.train.trainer import Trainer

WAYS = ("none", "async", "sync")
WARM = 3
"""Steps before the first block."""


@dataclass
class Size:
    """The model that is trained, and how much at a step."""

    dim: int = 256
    layers: int = 4
    vocab: int = 4096
    rows: int = 4
    length: int = 128


@dataclass
class Blocks:
    """Seconds a step of each block, by way; `calls`: seconds until the save came back."""

    interval: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    calls: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def added(self, way: str) -> Value:
        """The share that a way of saving adds to a step: the median over the rounds, each with its own steps without."""
        shares = [some / none - 1 for some, none in zip(self.seconds[way], self.seconds["none"], strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        return Value(middle, low=low, high=high, note=f"one save in every {self.interval} steps; median, quartiles")


class Clock:
    """Told of each step of a run: begins and ends the blocks of its plan, and saves at their beginning."""

    def __init__(self, trainer: Trainer, folder: Path, plan: Mapping[int, int]) -> None:
        """`plan`: rounds by interval."""
        self.trainer = trainer
        self.checkpoints = Checkpoints(folder, keep=1)
        self.found = {interval: Blocks(interval) for interval in plan}
        turns = [(interval, n) for interval, rounds in plan.items() for n in range(rounds)]
        # Whoever comes first in a round comes second in the next.
        self._plan = [(interval, WAYS[(n + place) % 3]) for interval, n in turns for place in range(3)]
        self._left = WARM
        self._block: tuple[int, str] | None = None
        self._begun = 0.0

    def __call__(self, number: int, _: Mapping[str, float]) -> None:
        if self._left == WARM and self._block is None:  # memory for the copy, files and all
            self.checkpoints.save(number, self.trainer.state(), wait=True)
        self._left -= 1
        if self._left:
            return
        self.checkpoints.wait()
        if self._block is not None:
            interval, way = self._block
            self.found[interval].seconds[way].append((time.perf_counter() - self._begun) / interval)
        if not self._plan:
            return
        self._block = interval, way = self._plan.pop(0)
        self._left, self._begun = interval, time.perf_counter()
        if way != "none":
            self.checkpoints.save(number, self.trainer.state(), wait=way == "sync")
            self.found[interval].calls[way].append(time.perf_counter() - self._begun)


def measured(base: Path, seed: int, plan: Mapping[int, int], size: Size | None = None) -> tuple[dict[int, Blocks], int]:
    """Blocks by interval, and the bytes of one checkpoint."""
    size = size or Size()
    model = _learning.decoder(size.dim, size.layers, size.vocab, size.length)
    source = _learning.Counting.Config(vocab=size.vocab, rows=size.rows, length=size.length, seed=seed)
    steps = WARM + sum(3 * interval * rounds for interval, rounds in plan.items())
    trainer = _learning.trainer(base / "run", model, source, steps=steps, seed=seed)
    clock = Clock(trainer, base / "timed", plan)
    trainer.run(told=[clock])
    place = clock.checkpoints.place()
    return clock.found, sum(path.stat().st_size for path in place.iterdir())
