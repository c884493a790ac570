"""The process around a verb: streams that are closed or full, signals, and how torch is brought in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchard.cli import common, process
from orchard.cli.main import main

PROGRAM = [sys.executable, "-c", "from orchard.cli.main import run; run()"]


def closed(redirection: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program from a shell that closes or redirects its streams."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_an_empty_one(redirection: str, empty_home: Path) -> None:
    done = closed(redirection, "list")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert closed(redirection, "respond").returncode == 2  # nothing to read is an empty prompt
    assert closed(redirection, "show", "nothing", "--json").returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["list", "--json"], ["study", "--list"]])
def test_a_full_disk_under_stdout_is_two_lines(arguments: list[str], empty_home: Path) -> None:
    done = closed(">/dev/full", *arguments)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == "error: the output cannot be written: No space left on device" and hint.startswith("hint: ")


def test_characters_that_stdout_does_not_know_are_escaped(empty_home: Path) -> None:
    done = closed("", "show", "./é", "--json", PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and done.stdout.isascii()
    assert json.loads(done.stdout)["error"]["message"] == "no file or folder at ./é"
    done = closed("", "show", "./\udcff", "--json")  # a byte that is no text, as the shell hands it over
    assert json.loads(done.stdout)["error"]["code"] == "model-not-found"


@pytest.mark.parametrize("arguments", [["respond", "\udcff"], ["respond", "hi", "--system", "\udcff"]])
def test_arguments_that_are_not_utf8(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "is not UTF-8 at character 0" in err and len(err.splitlines()) == 2


@pytest.mark.parametrize("option", [["--top-p", "0"], ["--stop", ""], ["--max-tokens", "999999999"]])
@pytest.mark.parametrize("verb", ["respond", "chat"])
def test_wrong_numbers_are_refused_before_a_model_is_loaded(
    verb: str, option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "load_model", lambda name, draft=None, experts_budget=None: pytest.fail("loaded"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main([verb, *(["hi"] if verb == "respond" else []), *option]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_missing_value_names_the_verbs_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["respond", "hi", "--stop"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "hint: see `orchard respond --help`"


def test_signals_wait_for_the_end_of_the_block() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), process.signals_later():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with process.signals_later():
            signal.raise_signal(signal.SIGINT)  # ignored before, ignored now
    finally:
        signal.signal(signal.SIGINT, before)


FAKE_TORCH = """
import gc, os, signal, sys
signal.raise_signal(getattr(signal, sys.argv[1])) if len(sys.argv) > 1 else None
print(os.environ.get("GOMP_SPINCOUNT"), gc.isenabled())
"""
IMPORT = "from orchard.cli import process as p; import gc; p.prepare(); p.import_torch(); print(gc.isenabled())"


@pytest.mark.parametrize(
    ("settings", "spin"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_torch_comes_with_a_short_wait_unless_somebody_chose(
    settings: dict[str, str], spin: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    base = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = base | settings | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{spin} False", "True"]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", -signal.SIGINT), ("SIGTERM", 128 + signal.SIGTERM)])
def test_an_interruption_inside_the_import_of_torch_comes_after_it(name: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", IMPORT, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code and done.stdout.count("\n") == 1  # the import ran to its end, and nothing after it
