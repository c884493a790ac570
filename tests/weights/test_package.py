"""Packages: what was written is read back, and whatever was changed since is refused, by one byte or by one file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard.core.errors import BadFile, DiskFull, ModelNotFound, UnsupportedFormat, UsageError
from orchard.recipes.package import About, Made, write_package
from orchard.weights.adapters import Base, Side, read_adapter, write_adapter
from orchard.weights.package import CARD, DRAFT, MANIFEST, is_package, manifest_bytes, read_package

PATHS = ("stack.layers.0.mixer.q", "stack.layers.0.mlp.up")
ABOUT = About("Ledger lines", "A. Person", "Turns messages into lines | of a ledger.", "apache-2.0")
MADE = Made("lora", {"steps": 3, "loss": {"before": 2.5, "after": 0.125}}, [("steps", "3")])


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder, as training leaves one."""
    path = tmp_path_factory.mktemp("adapter") / "adapter"
    base = Base("tiny", "1:" + "ab" * 32, {f"{name}.weight": (4, 6) for name in PATHS})
    values = np.arange(24, dtype=np.float32).reshape(4, 6) / 10
    write_adapter(path, {name: Side(values[:2], values[:, :2].copy(), 2.0) for name in PATHS}, base, base_name="tiny")
    return path


@pytest.fixture(scope="module")
def package(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    (folder / "guess.gguf").write_bytes(b"GGUF of a small model")
    write_package(folder / "mine", adapter, ABOUT, MADE, draft=folder / "guess.gguf")
    return folder / "mine"


def test_what_was_written_is_read(adapter: Path, package: Path) -> None:
    found = read_package(package)
    assert is_package(package) and not is_package(adapter)
    assert (found.name, found.author, found.licence) == ("Ledger lines", "A. Person", "apache-2.0")
    assert (found.base, found.signature) == ("tiny", "1:" + "ab" * 32)
    assert (found.method, found.rank, found.training["steps"]) == ("lora", 2, 3)
    assert found.draft == package / DRAFT and found.draft.read_bytes() == b"GGUF of a small model"
    assert sorted(found.files) == [CARD, "adapter_config.json", "adapter_model.safetensors", DRAFT]
    assert read_adapter(package).digest == read_adapter(adapter).digest, "PEFT's own files are as they were"
    card = (package / CARD).read_text()
    assert card.startswith("---\nlibrary_name") and "lines | of" in card and "| steps | 3 |" in card
    assert "Ledger lines" in card and "abababababab" in card
    assert not [path for path in package.parent.iterdir() if path.name.startswith(".")]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_other_byte_is_refused(package: Path, tmp_path: Path, data: st.DataObject) -> None:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(package, copy)
    victim = data.draw(st.sampled_from(sorted(path for path in copy.iterdir())))
    raw = bytearray(victim.read_bytes())
    change = data.draw(st.sampled_from(["flip", "cut", "grow", "gone"]))
    if change == "gone":
        victim.unlink()
    else:
        place = data.draw(st.integers(0, len(raw) - 1))
        if change == "flip":
            raw[place] ^= data.draw(st.integers(1, 255))
        elif change == "cut":
            raw = raw[:place]
        else:
            raw[place:place] = b" "
        victim.write_bytes(raw)
    with pytest.raises(BadFile) as said:
        read_package(copy)
    assert said.value.hint


def rewritten(package: Path, to: Path, **changes: Any) -> Path:
    """A copy whose manifest says something else, with a sum that fits it."""
    shutil.copytree(package, to)
    facts = json.loads((to / MANIFEST).read_text())
    facts.update(changes)
    (to / MANIFEST).write_bytes(manifest_bytes(facts))
    return to


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"files": {}}, "does not name"),
        ({"files": {"../mine/README.md": {"bytes": 1, "sha256": "0" * 64}}}, "leads out"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}}, "not a usable"),
        ({"files": {"README.md": {"bytes": -1, "sha256": "0" * 64}}}, "nothing sensible"),
        ({"files": {"README.md": {"bytes": 1, "sha256": "zz"}}}, "nothing sensible"),
        ({"files": {"README.md": 7}}, "nothing sensible"),
        ({"files": []}, "another form"),
        ({"rank": True}, "another form"),
        ({"rank": 0}, "another form"),
        ({"name": None}, "another form"),
        ({"base": {"name": "tiny", "signature": "1:" + "cd" * 32}}, "signed by another"),
        ({"format": 0}, "not as it was written"),
        ({"format": True}, "another form|as it was written"),
    ],
)
def test_a_manifest_that_lies_is_refused(package: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadFile, match=says):
        read_package(rewritten(package, tmp_path / "lies", **changes))


def test_later_formats_drafts_nobody_listed_and_links(package: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="format 2"):
        read_package(rewritten(package, tmp_path / "later", format=2))
    files = json.loads((package / MANIFEST).read_text())["files"]
    smuggled = rewritten(package, tmp_path / "draft", files={k: v for k, v in files.items() if k != DRAFT})
    with pytest.raises(BadFile, match="does not name"):
        read_package(smuggled)
    (smuggled / DRAFT).unlink()
    assert read_package(smuggled).draft is None
    (smuggled / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert read_package(smuggled), "files that mean nothing here are left alone"
    (smuggled / CARD).unlink()
    (smuggled / CARD).symlink_to(package / CARD)
    with pytest.raises(BadFile, match="leads out"):
        read_package(smuggled)
    with pytest.raises(ModelNotFound):
        read_package(tmp_path / "nothing")


def test_a_full_disk_or_an_interruption_leaves_nothing(adapter: Path, tmp_path: Path, monkeypatch: Any) -> None:
    import errno

    from orchard.recipes import package as module

    target = tmp_path / "mine"
    for broken, kind in ((OSError(errno.ENOSPC, "full"), DiskFull), (KeyboardInterrupt(), KeyboardInterrupt)):

        def fail(*_: Any, error: BaseException = broken, **__: Any) -> None:
            raise error

        monkeypatch.setattr(module, "card", fail)
        with pytest.raises(kind):
            write_package(target, adapter, ABOUT, MADE)
        assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    write_package(target, adapter, ABOUT, MADE)
    before = (target / MANIFEST).read_bytes()
    monkeypatch.setattr(module, "card", fail)
    with pytest.raises(KeyboardInterrupt):
        write_package(target, adapter, ABOUT, MADE, force=True)
    assert (target / MANIFEST).read_bytes() == before and read_package(target)


def test_what_is_there_is_replaced_only_if_it_is_a_package(adapter: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    write_package(target, adapter, ABOUT, MADE)
    with pytest.raises(UsageError, match="there already"):
        write_package(target, adapter, ABOUT, MADE)
    write_package(target, adapter, About("Other"), MADE, force=True)
    assert read_package(target).name == "Other"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"png")
    with pytest.raises(UsageError, match="no package"):
        write_package(tmp_path / "photos", adapter, ABOUT, MADE, force=True)
    with pytest.raises(UsageError, match="there is no folder"):
        write_package(tmp_path / "no" / "where", adapter, ABOUT, MADE)
    for about in (About("a+b"), About(" x"), About("x" * 121), About("x", author="\x1b[31m")):
        with pytest.raises(UsageError):
            write_package(tmp_path / "bad", adapter, about, MADE)


def test_paths_of_this_machine_do_not_leave_it(adapter: Path, tmp_path: Path) -> None:
    copy = tmp_path / "adapter"
    shutil.copytree(adapter, copy)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(tmp_path / "x.gguf")})
    )
    found = write_package(tmp_path / "mine", copy, ABOUT, MADE)
    assert found.base == "x.gguf"
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in (tmp_path / "mine").iterdir())
