"""Saves that die at every touch of the disk, one after the other; after each, what is there can be loaded and is right.

"kill" is SIGKILL, with half of a write done. "lose" also cuts every file that was not flushed: what a machine without power
would have left. "raise" is an error of the disk, after which the same program goes on.
Children are forked, so that torch is imported once.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from orchard.core.errors import DiskFull
from orchard.train import checkpoint_disk as disk
from orchard.train.checkpoint import Checkpoints, TrainState
from tests.train.checkpoint_cases import assert_same, contents, tiny

TOUCHES = ("make", "create", "put", "flush", "rename", "remove")
MADE = {step: contents(tiny(step)) for step in (1, 2, 3)}


class Broken:
    """The functions of checkpoint_disk, until the given touch."""

    def __init__(self, how: str, at: int, folder: Path) -> None:
        self.how, self.left, self.folder = how, at, folder
        self.unflushed: set[int] = set()  # files by inode: folders are renamed
        self.real = {name: getattr(disk, name) for name in TOUCHES}
        for name in TOUCHES:
            setattr(disk, name, lambda *arguments, name=name: self.touch(name, *arguments))

    def mend(self) -> None:
        for name, function in self.real.items():
            setattr(disk, name, function)

    def touch(self, name: str, *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            if name == "put":
                descriptor, data = arguments
                self.real["put"](descriptor, memoryview(data)[: len(data) // 2])
            self.end()
        result = self.real[name](*arguments)
        if name == "create":
            self.unflushed.add(os.fstat(result).st_ino)
        elif name == "flush":
            self.unflushed.discard(os.fstat(arguments[0]).st_ino)
        return result

    def end(self) -> None:
        if self.how == "raise":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.how == "lose":
            for path in self.folder.rglob("*"):
                if path.stat().st_ino in self.unflushed:
                    os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def loaded(folder: Path) -> int:
    state = tiny(9)
    step = Checkpoints(folder).load(state)
    assert_same(contents(state), MADE[step])
    return step


def main(how: str, base: Path) -> None:
    torch.set_num_threads(1)
    done, at, new, old = False, 0, 0, 0
    while not done:
        at += 1
        assert at < 200
        folder = base / str(at)
        Checkpoints(folder, keep=1).save(1, tiny(1), wait=True)
        done = dies_raising(folder, at) if how == "raise" else dies(folder, how, at)
        steps = Checkpoints(folder).steps()
        step = loaded(folder)
        assert steps == [step] or (steps == [1, 2] and step == 2), (at, steps)
        new, old = new + (step == 2), old + (step == 1)
        # Whatever is left, the next save works and cleans up.
        Checkpoints(folder, keep=1).save(3, tiny(3), wait=True)
        assert loaded(folder) == 3
        assert [path.name for path in folder.iterdir()] == [Checkpoints(folder).place(3).name], list(folder.iterdir())
        shutil.rmtree(folder)
    print(how, at - 1, "places:", old, "left the old one,", new, "the new one")  # the last round was not broken


def dies(folder: Path, how: str, at: int) -> bool:
    child = os.fork()
    if child == 0:
        try:
            Broken(how, at, folder)
            Checkpoints(folder, keep=1).save(2, tiny(2), wait=True)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), (at, status)
    return status == 0


def dies_raising(folder: Path, at: int) -> bool:
    broken = Broken("raise", at, folder)
    state: TrainState = tiny(2)
    checkpoints = Checkpoints(folder, keep=1)
    try:
        checkpoints.save(2, state, wait=True)
    except DiskFull:
        broken.mend()
        assert checkpoints.latest() in (1, 2)
        assert not [path for path in folder.iterdir() if path.name.endswith(".part")]
        return False
    finally:
        broken.mend()
    return broken.left > 0


if __name__ == "__main__":
    for how in ("kill", "lose", "raise"):
        main(how, Path(sys.argv[1]))
