"""`orchard compress`: what it prints, what it refuses and with which exit code, and that the same command goes on."""

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
from tests.tiny import tiny_gguf

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("cli") / "tiny.gguf")


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little text: the defaults are for real models."""
    from orchard.recipes import compress as work

    monkeypatch.setattr(work, "ON_CPU", {"held": 64, "looked": 128, "length": 32, "rows": 2, "batch": 8})
    monkeypatch.setattr(work, "TOKENS", {"cpu": 256, "cuda": 256})


def run(*words: Any) -> int:
    return main(["compress", *map(str, words)])


def test_it_says_what_it_made_and_what_to_do_next(base: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "small.orchard"
    assert run(base, "rtn:bits=4", "embed8", "--to", target, "--budget", "1MB", "--stop", "kl<9") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{target}: ") and "bits per weight" in out and "held-out text" in out and "all" in out
    assert (
        "what the plan will come to:" in err
        and "step 1 of 2: rtn:bits=4" in err
        and "loss ratio" in err
        and f"--model {target}" in err
    )
    card = (tmp_path / "small.md").read_text()
    assert "license: apache-2.0" in card and "The original's: apache-2.0." in card
    assert main(["show", str(target)]) == 0
    assert main(["respond", "--model", str(target), "--max-tokens", "3", "Hi"]) == 0
    capsys.readouterr()
    assert run(base, "rtn:bits=4", "embed8", "--to", target, "--budget", "1MB", "--stop", "kl<9", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["path"] == str(target) and err == "", "of what is done, the same again, without a word"


def test_json_has_everything(base: Path, tmp_path: Path, capsys: Any) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "Hi", "expected": "no such words"}\n')
    assert run(base, "qat:bits=4", "recover:r=2", "--to", tmp_path / "x.orchard", "--json", "--tasks", tasks) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert err == "" and facts["plan"] == ["qat:bits=4", "recover:r=2"] and facts["stopped"] is None
    assert {"bytes", "bits_per_weight", "kv_bytes_per_token", "accounting", "expected", "seconds"} <= facts.keys()
    assert facts["bytes"] == (tmp_path / "x.orchard").stat().st_size
    for step in facts["steps"]:
        assert step["tokens"] > 0 and step["curve"] and step["size"]["bytes"] > 0
        assert {"ratio", "kl", "agreement", "tokens"} <= step["measured"]["all"].keys()
    assert set(facts["measured"]["kinds"]) == {"plain", "chat", "calm"} and facts["measured"]["tasks"] == {"tasks": 0.0}


def test_a_dry_run_does_nothing(base: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(base, "2bit", "--dry-run", "--tokens", "20M") == 2, "one layer has nothing to share"
    assert "nothing to share" in capsys.readouterr().err
    assert run(base, "qat:bits=2", "kv8", "--dry-run", "--tokens", "20M") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["step", "file"] and lines[2].startswith("qat:bits=2") and "20,000,000" in out
    assert "tokens a second at most" in out and "(an estimate" in out and err == ""
    assert run(base, "int4", "--dry-run", "--json", "--budget", "1MB") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"] == ["rtn:bits=4", "embed8"] and facts["budget_bytes"] == 1_000_000
    assert facts["size"]["bytes"] < 1_000_000 and facts["steps"][0]["guessed_loss_ratio"][0] >= 1
    assert not list(tmp_path.iterdir())


def test_the_list(capsys: Any) -> None:
    assert run("--list") == 0
    out = capsys.readouterr().out
    assert "on-device" in out and "share-kv" in out and "bits=4, group=64" in out
    assert run("--list", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plans"]["int4"]["steps"] == ["rtn:bits=4", "embed8"] and "bits" in facts["steps"]["qat"]["settings"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "which model?"),
        (["{base}"], "by which plan?"),
        (["{base}", "int4"], "where to?"),
        (["{base}", "int5", "--to", "{t}/x.orchard"], "int4"),
        (["{base}", "rtn:bit=2", "--to", "{t}/x.orchard"], "did you mean bits"),
        (["{base}", "int4", "--to", "{t}/x.gguf"], "ends in .orchard"),
        (["{base}", "int4", "--to", "{t}/x.orchard", "--budget", "58"], "no budget"),
        (["{base}", "int4", "--to", "{t}/x.orchard", "--budget", "1kB"], "the smallest is"),
        (["{base}", "int4", "--to", "{t}/x.orchard", "--stop", "los<2"], "did you mean loss"),
        (["{base}", "int4", "--to", "{t}/x.orchard", "--tokens", "many"], "20M"),
        (["{base}", "int4", "--to", "{t}/x.orchard", "--text", "{t}/none.txt"], "none.txt"),
        (["{base}", "int4", "--to", "{t}/x.orchard", "--tasks", "{t}/none.jsonl"], "none.jsonl"),
        (["{base}", "int4", "--to", "{t}/x.orchard", "--own", "2"], "own is 2"),
        (["{base}", "int4", "--to", "{t}/x.orchard", "--device", "moon"], "moon"),
        (["{t}/none.gguf", "int4", "--to", "{t}/x.orchard"], "none.gguf"),
    ],
)
def test_wrong_usage_is_exit_2(words: list[str], says: str, base: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "t").mkdir()
    assert run(*[word.format(base=base, t=tmp_path / "t") for word in words]) == 2
    err = capsys.readouterr().err
    assert says in err and "hint: " in err and "Traceback" not in err
    assert not list((tmp_path / "t").iterdir())


def test_a_rule_that_nothing_keeps_is_exit_1(base: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(base, "rtn:bits=2", "--to", tmp_path / "x.orchard", "--stop", "kl<1e-9", "--quiet") == 1
    err = capsys.readouterr().err
    assert "nothing is written: rtn:bits=2: kl<1e-09 does not hold" in err and "x.work" in err
    assert not (tmp_path / "x.orchard").exists()


@pytest.mark.parametrize("sign", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_killed_then_the_same_command(sign: signal.Signals, base: Path, tmp_path: Path, capsys: Any) -> None:
    """In a process of its own, stopped in the middle of its second step's training."""
    program = (
        "import sys, time, orchard.train.watch as w\n"
        "from orchard.recipes import compress as work\n"
        'work.ON_CPU = {"held": 64, "looked": 128, "length": 32, "rows": 2, "batch": 8}\n'
        "true, seen = w.Watch.note, []\n"
        "def slow(self, number, *given, **more):\n"
        "    found = true(self, number, *given, **more)\n"
        "    seen.append(number)\n"
        "    if seen.count(0) == 2 and number == 1: print('here', flush=True)\n"
        "    if seen.count(0) == 2 and number >= 1: time.sleep(2)\n"
        "    return found\n"
        "w.Watch.note = slow\n"
        "from orchard.cli.main import run\n"
        "run()\n"
    )
    words = [str(base), "heal", "qat:bits=4", "--to", str(tmp_path / "x.orchard"), "--tokens", "256", "--device", "cpu"]
    with subprocess.Popen(
        [sys.executable, "-c", program, "compress", *words],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "here\n", process.stderr.read()
        process.send_signal(sign)
        assert process.wait(timeout=60) == (130 if sign == signal.SIGINT else -signal.SIGKILL)
        if sign == signal.SIGINT:
            assert "the same command goes on" in process.stderr.read()
    assert not (tmp_path / "x.orchard").exists() and (tmp_path / "x.work" / "1-heal" / "step.json").is_file()
    assert run(*words) == 0
    err = capsys.readouterr().err
    assert "step 1 of 2" not in err and "step 2 of 2" in err and (tmp_path / "x.orchard").is_file()
