"""Saving happens beside training: the copy is of one moment, one is under way at a time, and its errors are not lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.core.errors import DiskFull
from orchard.train import checkpoint_disk as disk
from orchard.train.checkpoint import Checkpoints, TrainState
from orchard.train.checkpoint_snapshot import Buffers, Snapshot
from tests.train.checkpoint_cases import assert_same, contents, tiny

ROOT = Path(__file__).resolve().parents[2]


class Gate:
    """Holds every write until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open, self.reached, put = threading.Event(), threading.Event(), disk.put

        def wait(*arguments: Any) -> None:
            self.reached.set()
            assert self.open.wait(30)
            put(*arguments)

        patch.setattr(disk, "put", wait)


def change(state: TrainState, value: float) -> None:
    with torch.no_grad():
        for tensor in contents_of(state):
            tensor.fill_(value)
    state.extra["value"] = value
    state.optimizer.param_groups[0]["lr"] = value


def contents_of(state: TrainState) -> list[torch.Tensor]:
    states = [value for kept in state.optimizer.state.values() for value in kept.values()]
    return [*state.model.parameters(), *state.model.buffers(), *states]


def test_the_copy_is_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, checkpoints, state = Gate(monkeypatch), Checkpoints(tmp_path), tiny(1)
    kept = contents(state)
    checkpoints.save(1, state)
    assert gate.reached.wait(30)
    change(state, 5)  # training goes on before a byte is written
    assert checkpoints.latest() is None
    gate.open.set()
    checkpoints.wait()
    checkpoints.load(state)
    assert_same(kept, contents(state))


def test_one_is_under_way_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, checkpoints, state = Gate(monkeypatch), Checkpoints(tmp_path), tiny(1)
    checkpoints.save(1, state)
    second = threading.Thread(target=checkpoints.save, args=(2, state))
    assert gate.reached.wait(30)
    second.start()
    second.join(0.2)
    assert second.is_alive()  # it waits for the first
    assert sum(thread.name == "checkpoint" for thread in threading.enumerate()) == 1
    gate.open.set()
    second.join(30)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


def test_memory_is_used_again() -> None:
    buffers, state = Buffers(), tiny(1)
    first = {index: data.data_ptr() for index, data in Snapshot(state, buffers).data.items()}
    change(state, 3)
    again = Snapshot(state, buffers)
    assert {index: data.data_ptr() for index, data in again.data.items()} == first
    assert all(data.float().eq(3).all() for data in again.data.values())
    state.optimizer.state.clear()
    assert len(Snapshot(state, buffers).data) == len(first) - 1 == len(buffers._kept)


def test_errors_surface_at_the_next_call_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "put", full)
        checkpoints.save(1, tiny(1))
        with pytest.raises(DiskFull):
            checkpoints.save(2, tiny(2))
    checkpoints.save(3, tiny(3))
    checkpoints.wait()
    assert checkpoints.steps() == [3]


def test_a_program_that_ends_finishes_writing(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from orchard.train import checkpoint_disk as disk\nfrom orchard.train.checkpoint import Checkpoints\n"
        "from tests.train.checkpoint_cases import tiny\nput = disk.put\n"
        "disk.put = lambda *a: (time.sleep(0.05), put(*a))\n"
        "Checkpoints(Path(sys.argv[1])).save(1, tiny(1))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    assert Checkpoints(tmp_path).latest() == 1
