"""`orchard adapt`: what it prints, what it refuses and with which exit code, and that the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchard.cli.main import main
from orchard.weights.package import read_package
from tests.recipes.test_adapt import samples
from tests.recipes.test_adapt_rows import CHATML
from tests.tiny import tiny_gguf

CHECKOUT = Path(__file__).resolve().parents[2]
FEW = ("--rank", "4", "--device", "cpu", "--set", "train.dtype=float32")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("cli") / "tiny.gguf", **{"tokenizer.chat_template": CHATML})


def run(*words: Any) -> int:
    return main(["adapt", *map(str, words)])


def test_it_says_what_it_made_and_what_to_do_next(base: Path, tmp_path: Path, capsys: Any) -> None:
    about = ("--name", "Lines", "--author", "A. Person", "--licence", "mit", "--description", "Says numbers.")
    assert run(base, samples(tmp_path), "--out", tmp_path / "mine", "--steps", 2, *about, *FEW) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'mine'}: lora, rank 4") and "held-out loss" in out and "word for word" in out
    assert "36 rows to learn from, 4 held out" in err and f"--adapter {tmp_path / 'mine'}" in err and "--merge" in err
    package = read_package(tmp_path / "mine")
    assert (package.name, package.licence, package.description) == ("Lines", "mit", "Says numbers.")
    assert main(["show", str(tmp_path / "mine")]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("Lines\n") and "package, lora of rank 4 beside 7 linear maps" in out and "Says numbers." in out
    )
    assert main(["show", str(tmp_path / "mine"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "package" and facts["training"]["steps"] == 2
    assert main(["show", str(tmp_path / "mine"), "--plan"]) == 2
    (tmp_path / "mine" / "README.md").write_text("changed")
    capsys.readouterr()
    assert main(["show", str(tmp_path / "mine")]) == 1
    assert "README.md has 7 bytes" in capsys.readouterr().err


def test_json_and_quiet(base: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(base, samples(tmp_path), "--out", tmp_path / "a", "--steps", 1, *FEW, "--json") == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert err == "" and facts["package"]["rank"] == 4 and facts["loss"]["after"] > 0
    assert run(base, samples(tmp_path), "--out", tmp_path / "b", "--steps", 1, *FEW, "--quiet") == 0
    assert all(line.startswith(("next:", "   ")) for line in capsys.readouterr().err.splitlines())


def test_check_names_every_bad_line(base: Path, tmp_path: Path, capsys: Any) -> None:
    data = samples(tmp_path)
    assert run(base, data, "--check") == 0
    out = capsys.readouterr().out
    assert "40 good, 0 bad" in out and "36 rows, 4 held out" in out and "steps in" in out
    data.write_text(data.read_text() + '{"prompt": \n{"text": 7}\n')
    assert run("--check", data, base) == 1, "whichever comes first"
    out = capsys.readouterr().out
    assert f"{data}:41:" in out and f"{data}:42:" in out and "not-json" in out and "wrong-type" in out
    assert run(base, data, "--check", "--json") == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == 40 and facts["reasons"] == {"not-json": 1, "wrong-type": 1} and facts["longest_at"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "where to?"),
        (["--out", "{}/x", "--method", "full"], "full"),
        (["--out", "{}/x", "--rank", "0"], "rank"),
        (["--out", "{}/x", "--epochs", "0"], "learn something"),
        (["--out", "{}/x", "--name", "a+b"], "cannot be called"),
        (["--out", "{}/x", "--held-out", "2"], "cannot be held out"),
        (["--out", "{}/x", "--held-out", "{}/none.jsonl"], "no files"),
        (["--out", "{}/x", "--set", "train.optim.rate=1"], "rate"),
        (["--out", "{}/x", "--set", "train.steps=many"], "whole number"),
        (["--out", "{}/full"], "there already"),
        (["--out", "{}/full", "--force"], "no package"),
        (["--out", "{}/no/x"], "no folder"),
    ],
)
def test_wrong_usage_is_exit_2(words: list[str], says: str, base: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "t" / "full").mkdir(parents=True)
    (tmp_path / "t" / "full" / "file").write_text("x")
    data = samples(tmp_path)
    assert run(base, data, *[word.format(tmp_path / "t") for word in words]) == 2
    err = capsys.readouterr().err
    assert says in err and "hint: " in err and "Traceback" not in err
    assert not (tmp_path / "t" / "x").exists()


def test_a_model_or_data_that_is_not_there(base: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path / "no.gguf", samples(tmp_path), "--out", tmp_path / "x") == 2
    assert "no.gguf" in capsys.readouterr().err
    assert run(base, tmp_path / "none.jsonl", "--out", tmp_path / "x") == 2
    assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.long
def test_ctrl_c_then_the_same_command(base: Path, tmp_path: Path, capsys: Any) -> None:
    """In a process of its own, stopped once it has learnt a little."""
    program = (
        "import sys, time, orchard.train.watch as w\n"
        "true = w.Watch.note\n"
        "def slow(self, number, *given, **more):\n"
        "    found = true(self, number, *given, **more)\n"
        "    if number == 2: print('here', flush=True)\n"
        "    if number >= 2: time.sleep(2)\n"
        "    return found\n"
        "w.Watch.note = slow\n"
        "from orchard.cli.main import run\n"
        "run()\n"
    )
    words = [str(base), str(samples(tmp_path)), "--out", str(tmp_path / "mine"), "--steps", "5", *FEW]
    with subprocess.Popen(
        [sys.executable, "-c", program, "adapt", *words],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "the same command goes on" in process.stderr.read()
    assert not (tmp_path / "mine").exists() and list((tmp_path / "mine.run").glob("step-*")), "with a checkpoint"
    assert run(*words) == 0
    assert read_package(tmp_path / "mine").training["steps"] == 5
