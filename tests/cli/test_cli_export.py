"""`orchard export`: what it prints, what it refuses and with which exit code, and that Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchard.cli.main import main
from orchard.session import save
from tests.session.export_models import adapter_for, opened
from tests.tiny import tiny_gguf

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf")


def run(*words: Any) -> int:
    return main(["export", *map(str, words)])


def test_it_says_what_it_wrote_and_what_it_found(source: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(source, "--to", tmp_path / "x.gguf", "--format", "gguf", "--type", "q8_0") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'x.gguf'}: ") and "gguf q8_0" in out
    assert "the same choice at" in out and "tokens of" in out and "raised" not in out
    assert [line.split()[0] for line in err.splitlines()] == ["reading", "writing", "reading"]
    assert opened(tmp_path / "x.gguf").generate("Hi", max_tokens=3).usage.output == 3


def test_quiet_and_json(source: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(source, "--to", tmp_path / "a", "--format", "hf", "--quiet") == 0
    assert capsys.readouterr().err == ""
    code = run(source, "--to", tmp_path / "b", "--format", "hf", "--type", "bf16", "--tolerance", "0.5", "--json")
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert code == 0 and err == ""
    assert facts["format"] == "hf" and facts["type"] == "bf16" and facts["parity"]["raised"] is True
    assert facts["parity"]["limit"] == 0.5 and facts["bytes"] > 0 and facts["path"] == str(tmp_path / "b")


def test_adapters_merged_and_alone(source: Path, tmp_path: Path, capsys: Any) -> None:
    one, two = (adapter_for(source, tmp_path / name, seed=n, size=0.05) for n, name in enumerate(("one", "two")))
    both = ("--adapter", one, "--adapter", two)
    assert run(source, "--to", tmp_path / "m", "--format", "hf", *both, "--merge", "--json") == 0
    assert json.loads(capsys.readouterr().out)["adapters"] == ["one", "two"]
    assert run(source, "--to", tmp_path / "alone", "--format", "peft", "--adapter", one) == 0
    out = capsys.readouterr().out
    assert "peft f32" in out and "words" not in out
    assert opened(source).adapters.load(tmp_path / "alone") == "alone"


def test_drift_is_an_error_with_its_place(source: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    true = save._gguf_facts
    broken = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    monkeypatch.setattr(save, "_gguf_facts", lambda *given: {**true(*given), **broken})
    assert run(source, "--to", tmp_path / "x.gguf", "--format", "gguf", "--json") == 1
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert error["code"] == "export-drift" and error["divergence"]["check"] == "chat template"
    assert "chat template: from character 1" in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--format", "gguf"], "--to"),
        (["--to", "{}/x"], "--format"),
        (["--to", "{}/x", "--format", "onnx"], "onnx"),
        (["--to", "{}/x.gguf", "--format", "gguf", "--type", "q2_k"], "q2_k"),
        (["--to", "{}/x", "--format", "hf", "--type", "q8_0"], "cannot write hf as 'q8_0'"),
        (["--to", "{}/x", "--format", "hf", "--merge"], "nothing to merge"),
        (["--to", "{}/x", "--format", "peft"], "0 adapters"),
        (["--to", "{}/x", "--format", "hf", "--tolerance", "-1"], "tolerance"),
        (["--to", "{}", "--format", "hf"], "there already"),
    ],
)
def test_wrong_usage_is_exit_2(words: list[str], says: str, source: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "t" / "full").mkdir(parents=True)
    assert run(source, *[word.format(tmp_path / "t") for word in words]) == 2
    err = capsys.readouterr().err
    assert says in err and "hint: " in err and "Traceback" not in err
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["full"]


def test_a_model_that_is_not_there(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path / "no.gguf", "--to", tmp_path / "x", "--format", "hf") == 2
    assert "no.gguf" in capsys.readouterr().err


def test_ctrl_c_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """In a process of its own, stopped while it holds the target's place."""
    program = (
        "import sys, time, orchard.session.export as e\n"
        "def slow(*given): print('here', flush=True); time.sleep(60)\n"
        "e._gate = slow\n"
        "from orchard.cli.main import run\n"
        "run()\n"
    )
    words = ["export", str(source), "--to", str(tmp_path / "x.gguf"), "--format", "gguf", "--quiet"]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, None)):
        with subprocess.Popen(
            [sys.executable, "-c", program, *words],
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
            assert any(path.name.endswith(".part") for path in tmp_path.iterdir())
            begin = time.monotonic()
            process.send_signal(number)
            ended = process.wait(timeout=30)
        assert ended == code if code is not None else ended != 0
        assert time.monotonic() - begin < 20 and not list(tmp_path.iterdir())
