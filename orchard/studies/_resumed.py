"""Runs that die at every touch of their saves and begin again: how many of their losses are not those of a run that lived?"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchard.core.progress import track
from orchard.studies import _learning
from orchard.studies._crashes import Died, Dying, Point
from orchard.train.trainer import Saving, Trainer

STEPS, EVERY = 10, 3


@dataclass
class Resumed:
    runs: int = 0
    losses: int = 0
    """Compared, of all runs together."""
    different: int = 0
    again: int = 0
    """Runs that had no checkpoint yet, and began anew."""


def made(folder: Path, seed: int) -> Trainer:
    model = _learning.decoder(dim=16, layers=1, vocab=32, context=16)
    source = _learning.Counting.Config(seed=seed)
    return _learning.trainer(folder, model, source, steps=STEPS, seed=seed, save=Saving.Config(every=EVERY, keep=1))


def resumed(base: Path, seed: int, stride: int) -> Resumed:
    """Die at every `stride`-th touch, by turns before it and in the middle of it; then run to the end."""
    whole = made(base / "whole", seed)
    with Dying(None, base / "whole").installed() as watched:
        wanted = whole.run().series["loss"]
    found = Resumed()
    for at in track(range(1, len(watched.touches) + 1, stride), "resuming"):
        folder = base / str(at)
        size = watched.touches[at - 1][1]
        with Dying(Point("killed", at, size // 2 if at % 2 else 0), folder).installed(), suppress(Died):
            made(folder, seed).run()
        rest = made(folder, seed)
        found.again += rest.checkpoints.latest() is None
        losses = rest.run().series["loss"]
        found.runs += 1
        found.losses += len(wanted)
        found.different += differing(losses, wanted)
    return found


def differing(one: list[float | None], other: list[float | None]) -> int:
    """Places where two curves are not the same number, bit for bit; what only one of them has counts too."""
    pairs = zip(one, other, strict=False)
    return sum(_bits(a) != _bits(b) for a, b in pairs) + abs(len(one) - len(other))


def _bits(value: float | None) -> str:
    return "none" if value is None or math.isnan(value) else float(value).hex()
