"""Models in parts that come with a checkout: cut, joined into the library when they are named, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from orchard.core.errors import BadFile, DiskFull, ModelNotFound, UsageError
from orchard.weights import parts
from orchard.weights.library import Library
from orchard.weights.parts import LIST, PART_BYTES, join, parcel_named, parcels, read_parcel, split
from orchard.weights.pull import pull
from tools import weights

DATA = os.urandom(2500)
DRAFT = os.urandom(700)
PART = {"name": "y", "bytes": 0, "sha256": "0" * 64}


@pytest.fixture
def shelf(empty_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A weights folder with one model in three parts, and its draft."""
    (tmp_path / "big.orchard").write_bytes(DATA)
    (tmp_path / "small.orchard").write_bytes(DRAFT)
    folder = tmp_path / "weights"
    draft = tmp_path / "small.orchard"
    split(tmp_path / "big.orchard", folder, "mix", draft=draft, licence="mit", source="a test", part_bytes=1000)
    monkeypatch.setenv("ORCHARD_WEIGHTS", str(folder))
    return folder


def nothing_left(home: Path) -> bool:
    return not [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_parts_are_small_and_say_what_they_are(shelf: Path) -> None:
    names = ["draft.orchard.00", "mix.orchard.00", "mix.orchard.01", "mix.orchard.02", LIST]
    assert sorted(path.name for path in (shelf / "mix").iterdir()) == names
    parcel = read_parcel(shelf / "mix")
    assert (parcel.name, parcel.licence, parcel.source, parcel.draft) == ("mix", "mit", "a test", "draft.orchard")
    assert [file.role for file in parcel.files] == ["model", "draft"] and parcel.bytes == 3200
    assert parcel.files[0].whole.sha256 == hashlib.sha256(DATA).hexdigest()
    assert [part.bytes for part in parcel.files[0].parts] == [1000, 1000, 500]
    assert not weights.main(["check", "--folder", str(shelf)]) and PART_BYTES <= 16 * 10**6


def test_a_name_joins_them_into_the_library(shelf: Path, empty_home: Path) -> None:
    library = Library()
    assert [parcel.name for parcel in parcels()] == ["mix"] and library.find("mix") is None
    path = library.resolve("mix")
    assert path == library.models / "mix" / "mix.orchard" and path.read_bytes() == DATA
    assert (
        library.draft_of(path) == path.with_name("draft.orchard")
        and path.with_name("draft.orchard").read_bytes() == DRAFT
    )
    entry = library.find("mix")
    assert entry is not None and (entry.source, entry.licence, entry.draft) == ("weights:mix", "mit", "draft.orchard")
    assert not entry.verify() and entry.to_dict()["draft"] == "draft.orchard"
    before = path.stat().st_mtime_ns
    (shelf / "mix" / "mix.orchard.01").unlink()  # not needed any more
    assert library.resolve("mix") == path and path.stat().st_mtime_ns == before


def test_two_models_can_have_one_draft(shelf: Path, empty_home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.orchard"
    other.write_bytes(DATA[::-1])
    about: dict[str, Any] = {"licence": "mit", "source": "a test"}
    split(other, shelf, "two", draft_of="mix", **about)
    split(other, shelf, "three", draft_of="two", **about)  # which has it from mix
    assert sorted(path.name for path in (shelf / "two").iterdir()) == [LIST, "two.orchard.00"]
    assert [read_parcel(shelf / name).files[1].lent for name in ("mix", "two", "three")] == ["", "mix", "mix"]
    for name in ("two", "three"):
        path = Library().resolve(name)
        draft = Library().draft_of(path)
        assert path.read_bytes() == DATA[::-1] and draft == path.with_name("draft.orchard")
        assert draft.read_bytes() == DRAFT
    assert not weights.main(["check", "--folder", str(shelf)])
    split(other, shelf, "alone", **about)
    with pytest.raises(UsageError, match="no draft"):
        split(other, shelf, "four", draft_of="alone", **about)
    with pytest.raises(UsageError, match="another model's"):
        split(other, shelf, "four", draft=other, draft_of="mix", **about)
    (shelf / "mix" / "draft.orchard.00").unlink()
    Library().remove("two")
    with pytest.raises(BadFile, match="missing"):
        Library().resolve("two")
    told = json.loads((shelf / "two" / LIST).read_text())
    told["files"][1]["sha256"] = "0" * 64
    (shelf / "two" / LIST).write_text(json.dumps(told))
    assert any("does not hold its draft" in fault for fault in weights.faults(shelf))


def test_pull_joins_too_and_needs_no_network(shelf: Path) -> None:
    said: list[str] = []
    entry = pull("mix", offline=True, say=said.append)
    assert entry.name == "mix" and "joined mix" in said[-1]
    pull("mix", offline=True, say=said.append)
    assert "already here" in said[-1]
    (entry.path / "mix.orchard").write_bytes(DATA[:-1] + b"?")
    pull("mix", say=said.append)
    assert (entry.path / "mix.orchard").read_bytes() == DATA and "joined" in said[-1]


def test_another_state_of_the_checkout_replaces_the_entry(shelf: Path, tmp_path: Path) -> None:
    library = Library()
    path = library.resolve("mix")
    for file in (shelf / "mix").iterdir():
        file.unlink()
    (shelf / "mix").rmdir()
    (tmp_path / "big.orchard").write_bytes(DATA[::-1])
    split(tmp_path / "big.orchard", shelf, "mix", licence="mit", source="another", part_bytes=1000)
    assert library.resolve("mix") == path and path.read_bytes() == DATA[::-1]
    assert library.draft_of(path) is None and not path.with_name("draft.orchard").exists()


def test_a_damaged_entry_is_joined_again(shelf: Path) -> None:
    path = Library().resolve("mix")
    path.write_bytes(b"")
    assert Library().resolve("mix").read_bytes() == DATA


def test_what_was_pulled_comes_before_what_is_in_parts(shelf: Path) -> None:
    library = Library()
    with library.lock("mix"), library.add("mix", source="test") as folder:
        (folder / "model.gguf").write_bytes(b"GGUF")
    assert library.resolve("mix").read_bytes() == b"GGUF"


@pytest.mark.parametrize("fault", ["missing", "shorter", "longer", "changed", "swapped", "list"])
def test_damaged_parts_leave_nothing(fault: str, shelf: Path, empty_home: Path) -> None:
    folder = shelf / "mix"
    part = folder / "mix.orchard.01"
    data = part.read_bytes()
    match fault:
        case "missing":
            part.unlink()
        case "shorter":
            part.write_bytes(data[:-1])
        case "longer":
            part.write_bytes(data + b"x" * 5000)
        case "changed":
            part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "swapped":
            told = json.loads((folder / LIST).read_text())
            told["files"][0]["parts"][:2] = reversed(told["files"][0]["parts"][:2])
            (folder / LIST).write_text(json.dumps(told))
        case "list":
            (folder / LIST).write_text("{")
    with pytest.raises(BadFile) as caught:
        Library().resolve("mix")
    assert caught.value.hint and nothing_left(empty_home) and Library().list() == []
    if fault in ("missing", "shorter", "longer", "changed"):
        assert "mix.orchard.01" in str(caught.value) and "git checkout" in caught.value.hint
        assert weights.main(["check", "--folder", str(shelf)]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"name": "other"},
        {"files": []},
        {"files": "x"},
        {"files": [{"name": "../x", "bytes": 1, "sha256": "0" * 64, "role": "model", "parts": []}]},
        {"files": [{"name": "x", "bytes": -1, "sha256": "0" * 64, "role": "model", "parts": []}]},
        {"files": [{"name": "x", "bytes": 1, "sha256": "0", "role": "model", "parts": []}]},
        {"files": [{"name": "x", "bytes": 1, "sha256": "0" * 64, "role": "other", "parts": []}]},
        {"files": [{"name": "x", "bytes": 1, "sha256": "0" * 64, "role": "model", "parts": [{}]}]},
        {"files": [{"name": "x", "bytes": 0, "sha256": "0" * 64, "role": "model", "parts": [PART], "in": "other"}]},
        {"files": [{"name": "x", "bytes": 0, "sha256": "0" * 64, "role": "draft", "parts": [PART], "in": "../x"}]},
    ],
)
def test_lists_that_make_no_sense_are_refused(change: dict[str, Any], shelf: Path, empty_home: Path) -> None:
    path = shelf / "mix" / LIST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadFile) as caught:
        Library().resolve("mix")
    assert caught.value.hint and parcels()[0].damaged and nothing_left(empty_home)


def test_a_full_disk_leaves_nothing(shelf: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull):
            Library().resolve("mix")
    assert nothing_left(empty_home)
    import shutil

    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(empty_home)
        patch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=100))
        with pytest.raises(DiskFull, match="are free"):
            Library().resolve("mix")
    assert nothing_left(empty_home) and Library().resolve("mix").read_bytes() == DATA


def test_an_interrupted_join_leaves_nothing(shelf: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Library().resolve("mix")
    assert nothing_left(empty_home)


def _resolve(name: str, found: Any) -> None:
    found.put(str(Library().resolve(name)))


def test_processes_that_join_at_once_find_one_whole_model(shelf: Path) -> None:
    context = multiprocessing.get_context("fork")
    found: Any = context.Queue()
    workers = [context.Process(target=_resolve, args=("mix", found)) for _ in range(4)]
    for worker in workers:
        worker.start()
    paths = {found.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(paths) == 1 and Path(paths.pop()).read_bytes() == DATA
    assert join(Library(), read_parcel(shelf / "mix")).name == "mix"


def test_names_that_are_not_there_say_what_is_near(shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        Library().resolve("mixx")
    assert "mix" in caught.value.hint
    with pytest.raises(ModelNotFound, match="in parts"):
        Library().resolve(shelf / "mix")
    assert parcel_named("none-such") is None
    with pytest.raises(UsageError, match="there already"):
        split(tmp_path / "big.orchard", shelf, "mix")
    with pytest.raises(UsageError, match="parts of"):
        split(tmp_path / "big.orchard", shelf, "other", part_bytes=PART_BYTES + 1)
    with pytest.raises(UsageError):
        split(tmp_path / "big.orchard", shelf, "a/b")
    with pytest.raises(ModelNotFound):
        split(tmp_path / "no.orchard", shelf, "other")
    assert sorted(path.name for path in shelf.iterdir()) == ["mix"]


def test_the_program_cuts_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.orchard").write_bytes(DATA)
    folder = str(tmp_path / "weights")
    said = [
        "split",
        str(tmp_path / "m.orchard"),
        "--name",
        "m",
        "--licence",
        "mit",
        "--source",
        "s",
        "--folder",
        folder,
    ]
    assert weights.main(said) == 0 and "is whole" in capsys.readouterr().out
    assert weights.main(said) == 2 and "there already" in capsys.readouterr().err
    (tmp_path / "weights" / "m" / "extra.bin").write_bytes(b"x")
    assert weights.main(["check", "--folder", folder]) == 1 and "named by no list" in capsys.readouterr().err


def test_the_checkout_holds_what_it_says() -> None:
    """Whatever lies in this checkout's own weights folder."""
    assert list(weights.faults(weights.FOLDER)) == []


def test_without_the_variable_only_a_checkout_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ORCHARD_WEIGHTS", raising=False)
    assert parts.weights_folder() in (None, weights.FOLDER)
    place = tmp_path / "site-packages" / "orchard" / "weights" / "parts.py"
    (tmp_path / "site-packages" / "weights").mkdir(parents=True)
    monkeypatch.setattr(parts, "__file__", str(place))
    assert parts.weights_folder() is None
