"""The frame of the command line: help, exit codes, one-line errors, pipes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from orchard.cli import common
from orchard.cli import list as list_verb
from orchard.cli.main import main

PROGRAM = [sys.executable, "-c", "from orchard.cli.main import run; run()"]
VERBS = ("respond", "chat", "pull", "list", "show", "rm", "study", "doctor")


def test_help_is_quick_and_brings_no_heavy_package() -> None:
    program = (
        "import sys; from orchard.cli.main import main; code = main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'jinja2', 'huggingface_hub', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    best = 9.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)  # whatever else runs here
        assert done.returncode == 0, done.stderr
    for verb in VERBS:
        assert f"  {verb} " in done.stdout
    assert best < 0.5


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], *([verb, "--help"] for verb in VERBS)])
def test_help_fits_eighty_columns(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: orchard") and err == ""
    assert max(map(len, out.splitlines())) <= 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from orchard import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"orchard {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["respond", "--modle", "x", "hi"], "--model"),
        (["nosuchverb"], "nosuchverb"),
        (["respond", "hi", "--max-tokens", "0"], "max-tokens"),
        (["respond", "hi", "--temperature", "-1"], "temperature"),
        (["respond", "hi", "--top-p", "2"], "top-p"),
        (["respond", "hi", "--seed", "abc"], "seed"),
        (["respond", "one", "two"], "two"),
        (["show"], "name"),
        (["pull"], "name"),
        (["rm"], "name"),
    ],
)
def test_wrong_usage_is_two_lines_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    error, hint = err.splitlines()
    assert out == "" and error.startswith("error: ") and says in error.lower() and "--help" in hint
    assert main([*arguments, "--json"]) == 2
    facts = json.loads(capsys.readouterr().out)["error"]
    assert facts["code"] == "usage" and says in facts["message"].lower()


def test_a_missing_model_is_two_lines_and_json(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "smolm2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[0] == "error: no model called 'smolm2' in the library"
    assert err.splitlines()[1] == "hint: get it with `orchard pull smollm2`"
    assert main(["show", "smolm2", "--json"]) == 2
    facts = json.loads(capsys.readouterr().out)["error"]
    assert facts["code"] == "model-not-found" and facts["retryable"] is False


def test_unexpected_errors_are_one_line_and_debug_shows_all(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(value: object) -> None:
        raise RuntimeError("wires\ncrossed")

    monkeypatch.setattr(list_verb, "print_json", broken)
    assert main(["list", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "error: unexpected RuntimeError: wires crossed" and "ORCHARD_DEBUG=1" in err
    assert "Traceback" not in err and json.loads(out)["error"]["code"] == "unexpected"
    monkeypatch.setenv("ORCHARD_DEBUG", "1")
    assert main(["list", "--json"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interruption_is_exit_code_130(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(value: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(list_verb, "print_json", interrupted)
    assert main(["list", "--json"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["nosuchverb", "--json"], ["list", "--json"]])
def test_a_reader_that_leaves_is_no_noise(arguments: list[str], empty_home: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*PROGRAM, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode in (1, 2)
    assert "Broken" not in done.stderr and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_json_after_two_dashes_is_no_flag(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["respond", "--model", "nothing-here", "--", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "nothing-here" in err


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (98_362_432, "98.4 MB"),
        (999_600, "1 MB"),
        (2.5e12, "2.5 TB"),
        (1.2e15, "1200 TB"),
    ],
)
def test_human_bytes(amount: float, text: str) -> None:
    assert common.human_bytes(amount) == text


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert common.printable("a\x1b[31mb\n\tc\x9b") == "a\ufffd[31mb\n\tc\ufffd"


def test_studies_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from orchard.studies import available

    assert main(["study", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == dict(available()) and "axlearn" in listed
    assert main(["study", "--list"]) == 0
    assert capsys.readouterr().out.count("\n") == len(listed)
    assert main(["study", "axlern"]) == 2
    assert "did you mean axlearn" in capsys.readouterr().err
    assert main(["study"]) == 2
