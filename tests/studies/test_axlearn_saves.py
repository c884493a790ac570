"""The checkpoint side of the axlearn study: crashes are real enough to be found, resumes are compared, saves are timed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchard.studies import _crashes, _learning, _resumed, _saving
from orchard.studies._crashes import Dying, Point
from orchard.train import checkpoint_disk as disk
from orchard.train import checkpoint_storage as storage
from orchard.train.checkpoint import Checkpoints
from orchard.train.checkpoint_manifest import Manifest
from orchard.train.trainer import Trainer

SMALL = _saving.Size(dim=16, layers=1, vocab=32, rows=2, length=8)


# Crashes ------------------------------------------------------------------------------------------------------------------


def test_no_crash_yields_a_corrupt_step(tmp_path: Path) -> None:
    found = _crashes.crashes(tmp_path, stride=200)
    assert (found.corrupt, found.lost, found.examples) == (0, 0, [])
    assert (
        found.points["power"] == 4 * found.points["refused"] > 60 and found.points["killed"] > found.points["refused"]
    )
    assert found.old > 50 and found.new > 10 and found.old + found.new == sum(found.points.values())


def test_every_byte_and_every_touch_is_a_point() -> None:
    touches = [("make", 0), ("put", 5), ("remove", 2)]
    killed = [(point.at, point.done) for point in _crashes.points(touches, 1) if point.how == "killed"]
    assert killed == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (3, 0), (3, 1)]
    coarse = [(point.at, point.done) for point in _crashes.points(touches, 100) if point.how == "killed"]
    assert coarse == [(1, 0), (2, 0), (2, 4), (3, 0), (3, 1)]


def test_a_dead_program_touches_nothing_and_a_write_is_cut(tmp_path: Path) -> None:
    real = disk.put
    with Dying(Point("killed", 2, 3), tmp_path).installed() as dying:
        descriptor = disk.create(tmp_path / "file")
        for _ in range(2):
            with pytest.raises(_crashes.Died):
                disk.put(descriptor, b"12345")
        with pytest.raises(_crashes.Died):
            disk.make(tmp_path / "folder")
    assert (tmp_path / "file").read_bytes() == b"123" and not (tmp_path / "folder").exists()
    assert dying.touches == [("create", 0), ("put", 5)] and disk.put is real


@pytest.mark.parametrize(("left", "size"), [("nothing", 0), ("half", 2), ("zeros", 4), ("half zeros", 4)])
def test_without_power_unflushed_files_lose_bytes(tmp_path: Path, left: str, size: int) -> None:
    with Dying(Point("power", 6, 0, left), tmp_path).installed():
        kept, lost = disk.create(tmp_path / "kept"), disk.create(tmp_path / "lost")
        for descriptor in (kept, lost):
            disk.put(descriptor, b"1234")
        disk.flush(kept)
        with pytest.raises(_crashes.Died):
            disk.flush(lost)
    assert (tmp_path / "kept").read_bytes() == b"1234"
    assert (tmp_path / "lost").stat().st_size == size and b"34" not in (tmp_path / "lost").read_bytes()


def test_a_save_that_flushes_nothing_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flushing what is left cannot be loaded; without checksums as well, zeros are loaded."""
    monkeypatch.setattr(storage, "write_tensors", without_flush(storage.write_tensors))
    found = _crashes.crashes(tmp_path / "a", stride=10**6)
    assert found.lost > 0 and found.corrupt == 0
    monkeypatch.setattr(Manifest, "verify", lambda *_, **__: None)
    assert _crashes.crashes(tmp_path / "b", stride=10**6).corrupt > 0


def without_flush(write: Any) -> Any:
    def run(*given: Any) -> Any:
        flush, disk.flush = disk.flush, lambda descriptor: None
        try:
            return write(*given)
        finally:
            disk.flush = flush

    return run


# Resumes ------------------------------------------------------------------------------------------------------------------


def test_resumed_runs_have_the_same_losses(tmp_path: Path) -> None:
    found = _resumed.resumed(tmp_path, seed=0, stride=70)
    assert found.different == 0 and found.runs >= 4 and found.losses == found.runs * _resumed.STEPS
    assert 0 < found.again < found.runs


def test_a_resume_that_forgets_something_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_learning.Counting, "_take", lambda self, state: None)  # the data begin anew
    assert _resumed.resumed(tmp_path, seed=0, stride=150).different > 0


def test_curves_are_compared_bit_for_bit() -> None:
    assert _resumed.differing([1.0, None, 0.5], [1.0, None, 0.5]) == 0
    assert _resumed.differing([1.0, 0.1 + 0.2], [1.0, 0.3]) == 1
    assert _resumed.differing([1.0], [1.0, 2.0, None]) == 2
    assert _resumed.differing([0.0], [-0.0]) == 1


def test_the_rows_can_be_learnt_and_taken_up_again(tmp_path: Path) -> None:
    model = _learning.decoder(dim=16, layers=1, vocab=32, context=16)
    losses = _learning.trainer(tmp_path, model, _learning.Counting.Config(), steps=60).run().series["loss"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    one = _learning.Counting.Config(seed=4).build()
    next(one)
    two = _learning.Counting.Config(seed=4).build()
    two.restore(one.state())
    assert (next(one).ids == next(two).ids).all() and two.given == 2


# What saving costs --------------------------------------------------------------------------------------------------------


def test_blocks_take_turns_and_each_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[tuple[int, bool]] = []
    real = Checkpoints.save

    def noted(self: Checkpoints, step: int, state: Any, *, wait: bool = False) -> None:
        if self.folder.name == "timed":
            saves.append((step, wait))
        real(self, step, state, wait=wait)

    monkeypatch.setattr(Checkpoints, "save", noted)
    found, size = _saving.measured(tmp_path, 0, {2: 3, 1: 2}, SMALL)
    assert [len(times) for times in found[2].seconds.values()] == [3, 3, 3]
    assert [len(times) for times in found[1].seconds.values()] == [2, 2, 2]
    # The order of each round begins one further; the first save is the one that warms up.
    first = _saving.WARM
    assert saves[:5] == [(1, True), (first + 2, False), (first + 4, True), (first + 6, False), (first + 8, True)]
    assert len(saves) == 1 + 2 * 3 + 2 * 2 and size > 1000


def test_what_saving_adds_is_taken_round_by_round() -> None:
    block = _saving.Blocks(10, {"none": [1.0, 2.0, 4.0], "async": [1.1, 2.2, 4.4], "sync": [2.0, 4.0, 6.0]})
    assert block.added("async").value == pytest.approx(0.1) and block.added("sync").value == pytest.approx(1.0)


def test_what_is_still_written_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk costs a save beside training, too, if the steps are over before it is done."""
    put = disk.put

    def slow(*given: Any) -> None:
        time.sleep(0.01)
        put(*given)

    monkeypatch.setattr(disk, "put", slow)
    found, _ = _saving.measured(tmp_path, 0, {1: 2}, SMALL)
    assert min(found[1].seconds["async"]) > 0.2 and max(found[1].calls["async"]) < 0.2


def test_the_clock_leaves_the_run_alone(tmp_path: Path) -> None:
    def made(name: str) -> Trainer:
        model = _learning.decoder(16, 1, 32, 8)
        return _learning.trainer(tmp_path / name, model, _learning.Counting.Config(length=8), steps=9)

    timed, plain = made("timed"), made("plain")
    told: Mapping[int, int] = {1: 2}
    assert timed.run(told=[_saving.Clock(timed, tmp_path / "saves", told)]).series["loss"] == plain.run().series["loss"]
