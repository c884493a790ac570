"""Where exports go: whole or not at all, never over what is there without being told, and no trace of what broke off."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from orchard.core.errors import DiskFull, ModelNotFound, UsageError
from orchard.session import export as export_module
from orchard.session import save
from orchard.session.export import export
from orchard.session.export_place import Placed
from tests.session.export_models import adapter_for
from tests.tiny import tiny_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("format", "name"), [("gguf", "x.gguf"), ("hf", "x")])
def test_what_is_there_stays_unless_it_may_be_replaced(format: str, name: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / name
    export(source, target, format=format, type="f16")
    before = target.stat().st_ino
    with pytest.raises(UsageError, match="there already") as caught:
        export(source, target, format=format, type="f32")
    assert "--force" in caught.value.hint and target.stat().st_ino == before
    export(source, target, format=format, type="f32", force=True)
    assert target.stat().st_ino != before and names(tmp_path) == [name]


def test_what_is_there_stays_when_the_new_one_does_not_pass(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    target = tmp_path / "x.gguf"
    export(source, target, format="gguf", type="f16")
    content = target.read_bytes()
    for broken in (KeyboardInterrupt(), UsageError("no"), OSError(errno.ENOSPC, "full")):

        def gate(*_: Any, broken: BaseException = broken) -> None:
            raise broken

        monkeypatch.setattr(export_module, "_gate", gate)
        with pytest.raises((KeyboardInterrupt, UsageError, DiskFull)):
            export(source, target, format="gguf", type="f32", force=True)
        assert target.read_bytes() == content and names(tmp_path) == ["x.gguf"]


def test_a_folder_of_other_things_is_never_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear")
    for format in ("hf", "gguf"):
        target = tmp_path / ("mine" if format == "hf" else "mine.gguf")
        if format == "gguf":
            (tmp_path / "mine").rename(target)
        with pytest.raises(UsageError, match="not replaced"):
            export(source, target, format=format, force=True)
    assert (tmp_path / "mine.gguf" / "diary.txt").read_text() == "dear"


def test_an_empty_folder_is_no_obstacle(source: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    export(source, tmp_path / "m", format="hf")
    assert (tmp_path / "m" / "config.json").is_file() and names(tmp_path) == ["m"]


def test_the_source_is_never_the_target(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    export(source, folder, format="hf")
    adapter = adapter_for(source, tmp_path / "one")
    for model, target, more in (
        (source, source, {"format": "gguf"}),
        (folder, folder, {"format": "hf"}),
        (folder, folder / "inside", {"format": "hf"}),
        (source, adapter, {"format": "peft", "adapters": [adapter]}),
    ):
        with pytest.raises(UsageError, match="read from"):
            export(model, target, force=True, **more)
    assert (folder / "model.safetensors").is_file() and source.is_file()


@pytest.mark.parametrize(
    ("name", "format", "words"),
    [("x", "gguf", "x for --format gguf"), ("x.gguf", "hf", "x.gguf for"), ("no/such/x", "hf", "there is no folder")],
)
def test_targets_that_cannot_be(name: str, format: str, words: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        export(source, tmp_path / name, format=format)
    assert not names(tmp_path)


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        export(tmp_path / "nothing.gguf", tmp_path / "x", format="hf")


def test_no_room_is_said_before_anything_is_written(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    monkeypatch.setattr(save, "save_gguf", lambda *given, **more: pytest.fail("it was written"))
    with pytest.raises(DiskFull, match="1,000 bytes left"):
        export(source, tmp_path / "x.gguf", format="gguf")
    assert not names(tmp_path)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EACCES, UsageError), (errno.EROFS, UsageError)]
)
def test_what_the_system_refuses_while_writing(
    number: int, kind: type[Exception], source: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr("orchard.weights.gguf.writer._tensor_bytes", refuse)
    with pytest.raises(kind) as caught:
        export(source, tmp_path / "x.gguf", format="gguf")
    assert "x.gguf" in str(caught.value) and not names(tmp_path)


def test_a_folder_that_may_not_be_written_to(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(UsageError, match="Permission denied") as caught:
        export(source, tmp_path / "x.gguf", format="gguf")
    assert "permissions" in caught.value.hint


@pytest.mark.parametrize("format", ["gguf", "hf"])
def test_an_interruption_leaves_nothing(format: str, source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    module = "gguf.writer" if format == "gguf" else "safetensors"
    monkeypatch.setattr(f"orchard.weights.{module}._tensor_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / ("x.gguf" if format == "gguf" else "x"), format=format)
    assert not names(tmp_path)


def test_what_was_there_comes_back_when_the_new_one_cannot_come(tmp_path: Path) -> None:
    target, folder = tmp_path / "x.gguf", tmp_path / ".part"
    target.write_text("old")
    folder.mkdir()
    with pytest.raises(FileNotFoundError):  # nothing was written there
        Placed(folder, target, force=True).keep()
    assert target.read_text() == "old"


def test_who_was_quicker_keeps_the_place(tmp_path: Path) -> None:
    target, folder = tmp_path / "x.gguf", tmp_path / ".part"
    folder.mkdir()
    place = Placed(folder, target, force=False)
    place.path.write_text("new")
    target.write_text("theirs")
    with pytest.raises(UsageError, match="there already"):
        place.keep()
    assert target.read_text() == "theirs"
