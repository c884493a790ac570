"""Saves that die at every touch of the disk and inside every write, and what can be restored afterwards.

The program that dies is simulated: from the chosen point on nothing of it reaches the disk any more, not even what it would do
on the way out. Three ways to die:

- killed: a write may have got any number of its bytes out, and a removal any number of files;
- power: of each file that was not flushed nothing is left, or half, or its size with zeros in all or half of it;
- refused: the disk says that it is full, and the program lives on and may tidy up.

Afterwards every step that is offered is loaded and compared bit for bit with what was saved as that step.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.errors import OrchardError
from orchard.core.progress import track
from orchard.train import checkpoint_disk as disk
from orchard.train.checkpoint import Checkpoints, TrainState
from orchard.train.checkpoint_snapshot import flatten
from orchard.train.ema import EMA

TOUCHES = ("make", "create", "put", "flush", "rename", "remove")
LOSSES = ("nothing", "half", "zeros", "half zeros")
"""What is left of a file that was not flushed."""


class Died(BaseException):
    """The program is gone; nothing in it may catch this."""


@dataclass(frozen=True)
class Point:
    """Where and how a save dies: at the touch `at` (from 1), with `done` bytes written or files removed."""

    how: str
    at: int
    done: int = 0
    left: str = ""


@dataclass
class Found:
    """What was restored after all the points."""

    points: Counter[str] = field(default_factory=Counter)
    corrupt: int = 0
    """Steps that were offered, loaded and wrong."""
    lost: int = 0
    """Points after which nothing, or not everything that was offered, could be loaded."""
    old: int = 0
    new: int = 0
    examples: list[str] = field(default_factory=list)


class Dying:
    """The disk of a program that dies at a point; without one it only notes what is done to it."""

    def __init__(self, point: Point | None, folder: Path) -> None:
        self.point, self.folder = point, folder
        self.touches: list[tuple[str, int]] = []
        """Name of each touch, and how many bytes it writes or files it removes."""
        self.dead = False
        self._unflushed: set[int] = set()  # files by inode: folders are renamed
        self._real = {name: getattr(disk, name) for name in TOUCHES}

    @contextmanager
    def installed(self) -> Iterator[Dying]:
        for name in TOUCHES:
            setattr(disk, name, lambda *given, name=name: self._touch(name, *given))
        try:
            yield self
        finally:
            for name, function in self._real.items():
                setattr(disk, name, function)

    def _touch(self, name: str, *given: Any) -> Any:
        if self.dead:
            raise Died
        self.touches.append((name, _size(name, *given)))
        if self.point is not None and len(self.touches) == self.point.at:
            self._end(name, *given)
        result = self._real[name](*given)
        if name == "create":
            self._unflushed.add(os.fstat(result).st_ino)
        elif name == "flush":
            self._unflushed.discard(os.fstat(given[0]).st_ino)
        return result

    def _end(self, name: str, *given: Any) -> None:
        assert self.point is not None
        if name == "put":
            self._real["put"](given[0], memoryview(given[1])[: self.point.done])
        elif name == "remove":
            for path in sorted(given[0].glob("*"))[: self.point.done]:
                path.unlink()
        if self.point.how == "refused":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.point.how == "power":
            for path in self.folder.rglob("*"):
                if path.stat().st_ino in self._unflushed:
                    size = path.stat().st_size
                    os.truncate(path, size // 2 if self.point.left.startswith("half") else 0)
                    if self.point.left.endswith("zeros"):
                        os.truncate(path, size)
        self.dead = True
        raise Died


def _size(name: str, *given: Any) -> int:
    if name == "put":
        return len(given[1])
    return len(list(given[0].glob("*"))) if name == "remove" else 0


def points(touches: list[tuple[str, int]], stride: int) -> Iterator[Point]:
    """Every touch in every way; writes that are killed, after every `stride`-th byte and just before the last."""
    for at, (name, size) in enumerate(touches, 1):
        for done in sorted({*range(0, size, stride if name == "put" else 1), max(size - 1, 0)}):
            yield Point("killed", at, done)
        for left in LOSSES:
            yield Point("power", at, size // 2, left)
        yield Point("refused", at, size // 2)


def crashes(base: Path, stride: int) -> Found:
    """Step 1 is there; the save of step 2, which also removes step 1, dies at every point. What is there then?"""
    saved = {step: contents(state(step)) for step in (1, 2)}
    before = base / "before"
    Checkpoints(before, keep=1).save(1, state(1), wait=True)
    touches = _dies(before, base / "all", None).touches
    found, places = Found(), list(points(touches, stride))
    for number, point in enumerate(track(places, "crashing")):
        folder = base / str(number)
        _dies(before, folder, point)
        found.points[point.how] += 1
        _restored(folder, saved, found, point)
        shutil.rmtree(folder)
    return found


def _dies(before: Path, folder: Path, point: Point | None) -> Dying:
    shutil.copytree(before, folder)
    with Dying(point, folder).installed() as dying:
        checkpoints = Checkpoints(folder, keep=1)
        with warnings.catch_warnings(), suppress(Died, OrchardError):
            warnings.simplefilter("ignore")  # what could not be deleted
            checkpoints.save(2, state(2), wait=True)
    return dying


def _restored(folder: Path, saved: dict[int, Any], found: Found, point: Point) -> None:
    checkpoints = Checkpoints(folder)
    offered = checkpoints.steps()
    try:
        for step in [*offered, None]:  # None: the latest, which a run would go on from
            got = state(9)
            stored = checkpoints.load(got, step)
            if not same(contents(got), saved[stored]) or step not in (None, stored):
                found.corrupt += 1
                found.examples.append(f"corrupt after {point}")
        found.old, found.new = found.old + (stored == 1), found.new + (stored == 2)
    except OrchardError as error:
        found.lost += 1
        found.examples.append(f"{error} after {point}")


# A state that is small enough to die in at every byte ---------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), float(value)))
        self.register_buffer("count", torch.tensor(value))


def state(value: int) -> TrainState:
    model = Tiny(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((8, 8), -float(value))
    return TrainState(model, optimizer, EMA.Config().build(model=model), {"value": value})


def contents(given: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, document = flatten(given, 0)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, document


def same(one: tuple[dict[str, Tensor], dict[str, Any]], other: tuple[dict[str, Tensor], dict[str, Any]]) -> bool:
    bits = [{name: tensor.reshape(-1).view(torch.uint8) for name, tensor in each[0].items()} for each in (one, other)]
    alike = bits[0].keys() == bits[1].keys() and all(torch.equal(x, bits[1][name]) for name, x in bits[0].items())
    return alike and one[1] == other[1]
