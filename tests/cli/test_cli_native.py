"""The command line around packed files and the native engine: `pull`, `rm`, `show --plan`, `doctor`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchard.cli.main import main
from orchard.core.errors import OrchardError
from orchard.ops.kernels import native as native_kernels
from orchard.ops.kernels.native import library as native_library
from orchard.ops.kernels.native import why_not
from orchard.session.prepare import packed_bytes, packed_path, prepare
from orchard.weights.library import Entry, Library
from tests.tiny import TEMPLATE, tiny_gguf

native = pytest.mark.skipif(native_library() is None, reason=f"no native kernels: {why_not()}")
MISSING = native_kernels.NOT_BUILT


@pytest.fixture
def entry(empty_home: Path) -> Entry:
    """A model under the default model's name, so that `pull` finds it here and whole."""
    library = Library(empty_home)
    with library.lock("smollm2"), library.add("smollm2", source="test", licence="mit") as folder:
        tiny_gguf(folder / "model.gguf")
    found = library.find("smollm2")
    assert found is not None
    return found


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    return out, err


def native_facts(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(run(capsys, "doctor", "--json")[0])["native"]


@native
def test_pull_packs_and_rm_unpacks(entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    path = packed_path(entry.model_path)
    assert path.name.startswith("smollm2-")
    _, err = run(capsys, "pull", "smollm2")
    assert path.is_file() and "packed it for the native engine" in err
    _, err = run(capsys, "pull", "smollm2")
    assert "packed" not in err
    out, _ = run(capsys, "doctor", "--json")
    assert json.loads(out)["library"]["packed_bytes"] == path.stat().st_size == packed_bytes()
    assert "held by models packed" in run(capsys, "doctor")[0]
    size = path.stat().st_size
    out, _ = run(capsys, "rm", "smollm2", "--yes", "--json")
    assert json.loads(out)["packed_bytes"] == size
    assert not path.exists()


@native
def test_rm_of_a_damaged_model_takes_its_packed_file_too(entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(entry.model_path)
    (entry.path / "orchard.json").unlink()
    _, err = run(capsys, "rm", "smollm2", "--yes")
    assert "packed from it" in err and packed_bytes() == 0


def test_a_pull_does_not_fail_where_packing_does(
    entry: Entry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (OrchardError("odd"), OSError("odd"), RuntimeError("odd"), MemoryError("odd")):

        def refuse(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("orchard.session.prepare.ready", refuse)
        out, err = run(capsys, "pull", "smollm2", "--json")
        assert json.loads(out)["name"] == "smollm2" and "not packed for the native engine (odd)" in err
        assert run(capsys, "pull", "smollm2", "--quiet") == ("", "")


@native
def test_a_spoilt_packed_file_is_told_in_one_line(entry: Entry) -> None:
    path = prepare(entry.model_path)
    assert path is not None
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    program = [sys.executable, "-c", "from orchard.cli.main import run; run()", "respond", "Hi", "--max-tokens", "3"]
    first, second = (subprocess.run(program, capture_output=True, text=True, timeout=120) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout and second.stderr == ""
    assert first.stderr.count("\n") == 1 and "packing it again" in first.stderr
    assert path.read_bytes() == whole


@native
def test_show_plan(entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "show", "smollm2", "--plan")
    assert out.startswith("smollm2\n") and "attend" in out and "native steps, 0 in torch" in out
    facts = json.loads(run(capsys, "show", "smollm2", "--plan", "--json")[0])
    assert facts["native"] and facts["whole"] and facts["torch"] == [] and facts["reason"] == ""
    assert facts["packed"] == str(packed_path(entry.model_path))
    assert [step["step"] for step in facts["steps"]].count("attend") == 1


def test_show_plan_says_why_there_is_none(
    entry: Entry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchard.ops.kernels.native.why_not", lambda: MISSING)
    out, _ = run(capsys, "show", "smollm2", "--plan")
    assert "runs on torch" in out and MISSING in out
    facts = json.loads(run(capsys, "show", "smollm2", "--plan", "--json")[0])
    assert facts["native"] is False and MISSING in facts["reason"] and facts["steps"] == []


def test_show_gives_json_for_its_parts(entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    template = json.loads(run(capsys, "show", "smollm2", "--template", "--json")[0])["template"]
    assert template["text"] == TEMPLATE and len(template["sha256"]) == 64
    tree = json.loads(run(capsys, "show", "smollm2", "--config", "--json")[0])
    assert tree["name"] == "smollm2" and tree["config"]["dim"] == 32
    _, err = run(capsys, "show", "smollm2", "--config", "--template", code=2)
    assert "ask for one" in err


@native
def test_doctor_names_the_kernels(entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    facts = native_facts(capsys)
    kernels = facts["kernels"]
    assert facts["missing"] == "" == facts["fix"] and facts["level"] in range(4)
    assert kernels["rows"] and kernels["attention"] and bool(kernels["matrix"]) == (facts["level"] == 3)
    line = next(line for line in run(capsys, "doctor")[0].splitlines() if line.startswith("kernels "))
    assert line.startswith(f"kernels    {kernels['rows']}, ") and f"attention {kernels['attention']}" in line


def test_doctor_says_what_is_lost_without_kernels(
    entry: Entry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchard.ops.kernels.native.why_not", lambda: MISSING)
    monkeypatch.setattr("orchard.ops.kernels.native.library", lambda: None)
    monkeypatch.delenv("ORCHARD_NATIVE", raising=False)
    out, _ = run(capsys, "doctor")  # slower, but nothing that keeps Orchard from working
    assert MISSING in out and "run on torch" in out and "C++ compiler" in out
    fix = native_facts(capsys)["fix"].partition(", then ")[2]
    checkout = str(Path(__file__).resolve().parents[2])
    wanted = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", "-e", checkout]
    assert shlex.split(fix) == wanted
    monkeypatch.setattr("orchard.ops.kernels.native.why_not", lambda: native_kernels.OLDER)
    assert shlex.split(native_facts(capsys)["fix"]) == wanted  # a compiler was there
    with monkeypatch.context() as patch:
        patch.setattr("sys.platform", "win32")
        assert native_facts(capsys)["fix"] == ""


def test_doctor_says_which_variable_hides_the_kernels(
    entry: Entry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ORCHARD_NATIVE", raising=False)
    for name, value in (("ORCHARD_NATIVE_LIBRARY", "nowhere.so"), ("ORCHARD_NATIVE", "0")):
        monkeypatch.setenv(name, value)
        assert native_facts(capsys)["fix"] == f"unset {name}" and name in native_facts(capsys)["missing"]


def test_doctor_tells_of_the_variable() -> None:
    program = [sys.executable, "-c", "from orchard.cli.main import run; run()", "doctor", "--json"]
    env = {**os.environ, "ORCHARD_NATIVE": "0"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env=env)
    assert json.loads(done.stdout)["native"]["missing"] == "turned off by ORCHARD_NATIVE=0"
