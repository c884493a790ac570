"""What a run leaves for people: three files, whole or not at all, and never at the cost of the run."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import DiskFull
from orchard.core.report import Report
from orchard.train.shown import Kept, keep, lines_of

FILES = {"report.json", "report.html", "curves.png"}


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {"values": {"loss": 1.0}, "series": {"step": [1, 2], "loss": [2.0, 1.0]}, "notes": ["one"]}
    return Report.record("train", "run", **{**fields, **changes})


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_three_files_that_hold_the_run(tmp_path: Path) -> None:
    one = report()
    keep(one, tmp_path / "deep" / "run")
    folder = tmp_path / "deep" / "run"
    assert names(folder) == FILES
    assert Report.load(folder / "report.json") == one
    assert "<svg" in (folder / "report.html").read_text() and (folder / "curves.png").read_bytes()[1:4] == b"PNG"


def test_a_report_without_curves_has_no_picture(tmp_path: Path) -> None:
    keep(report(series={}), tmp_path)
    assert names(tmp_path) == FILES - {"curves.png"}


def test_without_pillow_the_rest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    keep(report(), tmp_path)
    assert names(tmp_path) == FILES - {"curves.png"}


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    keep(report(), tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    flush, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull):
        keep(report(notes=["two"], series={"loss": [1.0, 9.0]}), tmp_path)
    assert names(tmp_path) == FILES
    changed = [
        name for name in ("report.json", "report.html", "curves.png") if (tmp_path / name).read_bytes() != before[name]
    ]
    assert changed == ["report.json", "report.html", "curves.png"][: fails - 1]


text = st.text(st.characters(exclude_categories=()), max_size=10)


@settings(max_examples=50)
@given(st.dictionaries(text, st.lists(st.none() | st.floats() | text, max_size=5), max_size=4), text)
def test_the_json_with_a_line_for_each_curve_is_the_same_report(series: dict[str, list[Any]], note: str) -> None:
    one = report(series=series, notes=[note], config={"kind": "x"})
    written = lines_of(one)
    assert Report.from_dict(json.loads(written.encode())) == one
    assert len(written.splitlines()) >= len(series) and "NaN" not in written.replace(note, "")


def test_a_long_run_has_a_short_file() -> None:
    one = report(series={"loss": [0.123456789] * 10_000})
    assert len(lines_of(one)) < 0.7 * len(one.to_json())


# Kept ---------------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_run_is_looked_at_as_seldom_as_it_can_afford(tmp_path: Path) -> None:
    clock, made = Clock(), []
    kept = Kept(tmp_path / "run", share=0.1, clock=clock)

    def make() -> Report:
        made.append(clock.now)
        clock.now += 3.0  # what keeping takes
        return report()

    assert not kept(make) and made == [], "nothing is made that is not kept"
    clock.now += 5.0
    assert kept(make) and names(tmp_path / "run") == FILES
    clock.now += 29.0
    assert not kept(make)
    clock.now += 2.0
    assert kept(make)
    assert kept(make, last=True), "the end is always kept"
    assert len(made) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_refuses_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    kept = Kept(tmp_path)

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        assert not kept(report, last=True) and kept.problem
    assert kept(report, last=True) and kept.problem is None
