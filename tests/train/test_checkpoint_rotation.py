"""Which checkpoints stay, which is the latest, and what is never offered."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import BadFile, UsageError
from orchard.train import checkpoint_disk as disk
from orchard.train.checkpoint import Checkpoints
from orchard.train.checkpoint_manifest import NAME
from tests.train.checkpoint_cases import tiny


def test_the_newest_stay_and_milestones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "deep" / "run", keep=2, keep_every=30)
    assert checkpoints.latest() is None and checkpoints.steps() == []
    for step in range(10, 110, 10):
        checkpoints.save(step, tiny(step))
    checkpoints.wait()
    assert checkpoints.steps() == [30, 60, 90, 100]
    assert checkpoints.latest() == 100
    state = tiny(0)
    assert checkpoints.load(state, 60) == 60 and state.extra == {"value": 60}


@settings(max_examples=25)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 5)))
def test_any_order_of_steps(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep: int, keep_every: int | None
) -> None:
    folder = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(folder, keep=keep, keep_every=keep_every)
    for number, step in enumerate(steps):
        checkpoints.save(step, tiny(number), wait=True)
    assert checkpoints.latest() == steps[-1]
    state = tiny(-1)
    checkpoints.load(state)
    assert state.extra["value"] == len(steps) - 1  # of a step that was written twice, the second
    recent = list(dict.fromkeys(reversed(steps)))[:keep]
    kept = set(checkpoints.steps())
    assert kept >= set(recent)
    assert all(step in recent or (keep_every and step % keep_every == 0) for step in kept)
    assert len(list(folder.iterdir())) == len(kept)


def test_a_run_that_was_set_back_goes_on_from_what_it_wrote_last(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (10, 20, 30, 15):
        checkpoints.save(step, tiny(step), wait=True)
    assert checkpoints.latest() == 15 and checkpoints.steps() == [15, 20, 30]


def test_nothing_goes_before_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tiny(1), wait=True)
    seen, remove = [], disk.remove
    monkeypatch.setattr(disk, "remove", lambda path: (seen.append(Checkpoints(tmp_path).latest()), remove(path)))
    checkpoints.save(2, tiny(2), wait=True)
    assert seen and set(seen) == {2}


def test_what_is_not_whole_is_not_offered_and_not_counted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, tiny(step), wait=True)
    place = checkpoints.place(2)
    text = (place / NAME).read_text()
    for broken in (None, "", text[:-30], text.replace('"step": 2', '"step": 3'), "[]", "{}", "null", "{" * 100_000):
        if broken is None:
            (place / NAME).unlink()
        else:
            (place / NAME).write_text(broken)
        assert Checkpoints(tmp_path).latest() == 1 and Checkpoints(tmp_path).steps() == [1]
        with pytest.raises(BadFile):
            Checkpoints(tmp_path).load(tiny(0), 2)
    assert checkpoints.load(tiny(0)) == 1
    checkpoints.save(3, tiny(3), wait=True)  # the broken one is none of the two that stay
    assert checkpoints.steps() == [1, 3] and place.exists()


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    kept = ["report.json", "step-1", ".step-notes", "step-00000001-000001.txt"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".step-00000007-000003.part").mkdir()  # what a run that was killed left
    (tmp_path / ".step-00000006-000002.gone").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        checkpoints.save(step, tiny(step), wait=True)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "step-00000002-000002"}


def test_a_copied_checkpoint_loads_elsewhere(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "one").save(5, tiny(5), wait=True)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert Checkpoints(tmp_path / "two").load(state := tiny(0)) == 5
    assert state.extra == {"value": 5}


def test_impossible_numbers(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(UsageError):
        Checkpoints(tmp_path, keep_every=0)
    with pytest.raises(UsageError):
        Checkpoints(tmp_path).save(-1, tiny(1))
    with pytest.raises(UsageError, match="step 4") as caught:
        Checkpoints(tmp_path).load(tiny(1), 4)
    assert "none" in caught.value.hint
