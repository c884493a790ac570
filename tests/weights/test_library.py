"""The library: names, whole entries or none, damage told and not thrown."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import BadFile, DiskFull, ModelNotFound, UsageError
from orchard.weights.library import ALIASES, Entry, Library, home, stored_name


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "home")


def put(library: Library, name: str, files: dict[str, bytes] | None = None) -> Entry:
    with library.lock(name), library.add(name, source="test", version="1", licence="mit") as folder:
        for file, content in (files or {"model.gguf": b"GGUF" + name.encode()}).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
    entry = library.find(name)
    assert entry is not None
    return entry


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_home_follows_the_environment_and_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORCHARD_HOME", str(tmp_path / "here"))
    assert home() == tmp_path / "here"
    monkeypatch.delenv("ORCHARD_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert home() == tmp_path / "cache" / "orchard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home() == Path.home() / ".cache" / "orchard"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert home() == Path.home() / "Library" / "Caches" / "orchard"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert home() == tmp_path / "local" / "orchard"


def test_a_home_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCHARD_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its standard
    assert home() == Path.home() / ".cache" / "orchard"

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(UsageError, match="no home folder") as caught:
        home()
    assert "ORCHARD_HOME" in caught.value.hint


@pytest.mark.parametrize("below", ["", "x"])
def test_a_file_where_the_library_should_be_is_no_empty_library(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    library = Library(tmp_path / "file" / below)
    for use in (library.list, lambda: library.find("a"), lambda: library.resolve("a"), lambda: library.remove("a")):
        with pytest.raises(BadFile, match="is not a folder") as caught:
            use()
        assert "ORCHARD_HOME" in caught.value.hint
    with pytest.raises(BadFile, match="cannot be written"), library.lock("a"):
        pytest.fail("locked")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_library_without_permission_is_told(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    put(library, "a")

    def refused(*_: object, **__: object) -> bool:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", refused)
        for use in (library.list, lambda: library.find("a"), lambda: library.resolve("a")):
            with pytest.raises(BadFile, match="cannot be read: Permission denied"):
                use()
        with pytest.raises(BadFile, match="some/where cannot be read"):
            library.resolve("./some/where")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refused)
        with pytest.raises(BadFile, match="cannot be written: Permission denied"), library.lock("a"):
            pytest.fail("locked")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        with pytest.raises(BadFile, match="cannot be changed"):
            library.remove("a")
    assert library.find("a") is not None


def test_names_become_folder_names() -> None:
    assert stored_name("smollm2") == "smollm2"
    assert stored_name("SmolLM2-135M") == "smollm2"
    assert stored_name("org/name") == "org--name"
    assert stored_name("org/name:file-Q8_0.gguf") == "org--name--file-Q8_0.gguf"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b/c",
        "../a",
        "a/..",
        "/a",
        "a/",
        ".hidden",
        "a b",
        "a\x00b",
        "ä",
        "a\n",
        "a.",
        "C:x",
        "a" * 200,
        "/".join(["a" * 120] * 2),
    ],
)
def test_bad_names_are_refused(name: str, library: Library) -> None:
    with pytest.raises(UsageError):
        stored_name(name)
    with pytest.raises(UsageError):
        library.find(name)
    with pytest.raises((ModelNotFound, UsageError)):
        library.resolve(name or "nothing/at/all")


@given(st.text(max_size=40))
def test_no_name_leaves_the_folder(name: str) -> None:
    try:
        stored = stored_name(name)
    except UsageError:
        return
    models = Path("/models")
    assert (models / stored).parent == models
    assert not stored.startswith(".") and os.sep not in stored and "\x00" not in stored


def test_an_added_model_is_found_listed_and_whole(library: Library) -> None:
    entry = put(library, "org/name", {"config.json": b"{}", "model.safetensors": b"12345678"})
    assert entry.name == "org/name" and entry.path.name == "org--name"
    assert (entry.bytes, entry.licence, entry.version, entry.damaged) == (10, "mit", "1", "")
    assert entry.model_path == entry.path
    assert entry.verify() == ""
    assert [found.name for found in library.list()] == ["org/name"]
    assert library.resolve("org/name") == entry.path == library.resolve("org--name")
    record = json.loads((entry.path / "orchard.json").read_text())
    assert set(record) == {"name", "source", "version", "licence", "bytes", "pulled", "files"}
    assert record["files"]["config.json"]["sha256"].startswith("44136fa355b3678a")  # sha256 of "{}"


def test_a_single_gguf_is_what_a_loader_opens(library: Library) -> None:
    entry = put(library, "smollm2")
    assert library.resolve("smollm2") == entry.path / "model.gguf"
    assert library.resolve(next(iter(ALIASES))) == entry.path / "model.gguf"


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failed_add_leaves_the_store_as_it_was(library: Library, error: BaseException) -> None:
    put(library, "old")
    before = snapshot(library.models)
    for name in ("old", "new"):
        expected = DiskFull if isinstance(error, OSError) else type(error)
        with pytest.raises(expected), library.add(name, source="test") as folder:
            (folder / "model.gguf").write_bytes(b"half")
            raise error
    assert snapshot(library.models) == before
    assert library.leftovers() == 0


def test_replacing_keeps_the_old_one_when_the_rename_fails(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    put(library, "a", {"model.gguf": b"old"})
    rename = Path.rename

    def fail_into_place(self: Path, target: Path) -> Path:
        if ".partial" in self.parts:
            raise PermissionError(13, "no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_into_place)
    with pytest.raises(PermissionError), library.add("a", source="test") as folder:
        (folder / "model.gguf").write_bytes(b"new")
    monkeypatch.undo()
    assert library.resolve("a").read_bytes() == b"old"


def test_adding_again_replaces_and_leaves_no_rest(library: Library) -> None:
    put(library, "a", {"model.gguf": b"old", "extra": b"x"})
    put(library, "a", {"model.gguf": b"new"})
    assert snapshot(library.models / "a").keys() == {"model.gguf", "orchard.json"}
    assert library.resolve("a").read_bytes() == b"new"
    assert library.leftovers() == 0


def test_keep_partial_lets_the_next_attempt_go_on(library: Library) -> None:
    with pytest.raises(RuntimeError), library.add("a", source="test", keep_partial=True) as folder:
        (folder / "half").write_bytes(b"1234")
        raise RuntimeError
    assert library.find("a") is None and library.list() == [] and library.leftovers() == 4
    with library.add("a", source="test", keep_partial=True) as folder:
        assert (folder / "half").read_bytes() == b"1234"
        (folder / "half").rename(folder / "model.gguf")
    assert library.resolve("a").read_bytes() == b"1234"


def test_an_interrupted_pull_can_be_removed_by_name(library: Library) -> None:
    with pytest.raises(RuntimeError), library.add("a", source="test", keep_partial=True) as folder:
        (folder / "half").write_bytes(b"1234")
        raise RuntimeError
    assert library.unfinished() == ("a",)
    assert library.remove("a").bytes == 4
    assert library.leftovers() == 0 and library.unfinished() == ()
    with pytest.raises(ModelNotFound):
        library.remove("a")


def test_an_interrupted_removal_leaves_a_whole_entry_or_none(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    put(library, "a")
    before = snapshot(library.models)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            library.remove("a")
    assert snapshot(library.models) == before
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            library.remove("a")
    assert library.find("a") is None and library.list() == [] and library.leftovers() > 0
    put(library, "b")  # the next writer clears what was left
    assert library.leftovers() == 0


DAMAGE = {
    "no record": lambda folder: (folder / "orchard.json").unlink(),
    "record cut": lambda folder: (folder / "orchard.json").write_text('{"name": '),
    "record is a list": lambda folder: (folder / "orchard.json").write_text("[]"),
    "record is deep": lambda folder: (folder / "orchard.json").write_text("[" * 100_000),
    "record not text": lambda folder: (folder / "orchard.json").write_bytes(b"\xff\xfe"),
    "another name": lambda folder: (folder / "orchard.json").write_text('{"name": "b", "files": {}}'),
    "climbing name": lambda folder: (folder / "orchard.json").write_text(
        '{"name": "a", "files": {"../../x": {"sha256": "", "bytes": 1}}}'
    ),
    "no files": lambda folder: (folder / "orchard.json").write_text('{"name": "a", "files": {}}'),
    "file gone": lambda folder: (folder / "model.gguf").unlink(),
    "file cut": lambda folder: (folder / "model.gguf").write_bytes(b"G"),
    "record is a folder": lambda folder: ((folder / "orchard.json").unlink(), (folder / "orchard.json").mkdir()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_and_can_be_removed(library: Library, kind: str) -> None:
    entry = put(library, "a")
    DAMAGE[kind](entry.path)
    (found,) = library.list()
    assert found.name == "a" and found.damaged and "\n" not in found.damaged
    assert found.verify() == found.damaged
    with pytest.raises(BadFile, match="damaged") as caught:
        library.resolve("a")
    assert "orchard pull a" in caught.value.hint
    library.remove("a")
    assert library.list() == []


def test_a_changed_byte_is_found_by_verify(library: Library) -> None:
    entry = put(library, "a", {"model.gguf": b"12345678"})
    (entry.path / "model.gguf").write_bytes(b"1234567x")
    seen: list[float] = []
    assert "SHA-256" in entry.verify(seen.append)
    assert sum(seen) == 8


def test_paths_are_resolved_and_folders_checked(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelNotFound, match="holds no model"):
        library.resolve(str(folder))
    (folder / "one.gguf").write_bytes(b"")
    assert library.resolve(folder) == folder / "one.gguf"
    assert library.resolve("model") == Path("model/one.gguf")
    (folder / "two.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="2 model files"):
        library.resolve(folder)
    (folder / "config.json").write_text("{}")
    assert library.resolve("./model") == Path("model")
    put(library, "model")
    assert library.resolve("model") == library.models / "model" / "model.gguf"  # a plain name means the library first
    with pytest.raises(ModelNotFound, match="no file or folder"):
        library.resolve("missing.gguf")
    (folder / "model.safetensors").touch()
    for file in ("model.safetensors", "config.json"):
        with pytest.raises(UsageError, match="one file of a model folder") as caught:
            library.resolve(f"./model/{file}")
        assert caught.value.hint == "name the folder: model"
    for name in ("x" * 5000, "./" + "x" * 5000, "~nobody-of-that-name/x"):
        with pytest.raises(BadFile, match="cannot be read") as unreadable:
            library.resolve(name)
        assert len(unreadable.value.message) < 300


def test_not_found_names_the_nearest_and_the_command(library: Library) -> None:
    with pytest.raises(ModelNotFound) as caught:
        library.resolve("smolm2")
    assert "orchard pull smollm2" in caught.value.hint
    with pytest.raises(ModelNotFound) as caught:
        library.resolve("someone/something")
    assert "orchard pull someone/something" in caught.value.hint
    put(library, "smollm2")
    with pytest.raises(ModelNotFound) as caught:
        library.resolve("smolm2")
    assert "did you mean smollm2" in caught.value.hint
    assert caught.value.exit_code == 2


def _hold(models_home: str, ready: object, seconds: float) -> None:
    library = Library(models_home)
    with library.lock("a"):
        ready.set()  # type: ignore[attr-defined]
        time.sleep(seconds)


def test_a_second_process_waits_for_the_lock(library: Library) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = context.Process(target=_hold, args=(str(library.home), ready, 0.5))
    other.start()
    assert ready.wait(30)
    waited: list[bool] = []
    start = time.monotonic()
    with library.lock("b"):
        assert time.monotonic() - start < 0.4  # another name is not held up
    with library.lock("a", waiting=lambda: waited.append(True)):
        assert time.monotonic() - start > 0.2
    other.join()
    assert waited == [True]
