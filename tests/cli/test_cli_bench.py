"""`orchard bench engine`: options, errors, output and exit codes, with workers that answer at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from orchard.bench import peers, spawn
from orchard.bench.peers import Found
from orchard.cli.main import main
from tests.tiny import tiny_gguf

FAKE = Path(__file__).resolve().parent.parent / "bench" / "fake_worker.py"


@pytest.fixture
def model(tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(spawn, "RUN", FAKE)
    for name in list(peers.START):
        monkeypatch.setitem(peers.START, name, "print(1)")
    here = {name: Found(python=sys.executable, version="1") for name in peers.PACKAGES}
    monkeypatch.setattr(peers, "find", lambda asked: here)
    return str(tiny_gguf(tmp_path / "tiny.gguf", **{"llama.context_length": 8192}))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench"], "which benchmark"),
        (["bench", "engin"], "engin"),
        (["bench", "engine", "--rounds", "0"], "rounds"),
        (["bench", "engine", "--only", "decode,speed"], "speed"),
        (["bench", "engine", "--peers-python", "/no/such/python"], "/no/such/python"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str, smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and "hint: " in err


def test_a_model_that_is_not_there(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--model", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_json_is_the_report(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "engine", "--model", model, "--quick", "--only", "batch,decode", "--json"])
    out, err = capsys.readouterr()
    report = json.loads(out)
    claims = {claim["id"]: claim for claim in report["claims"]}
    assert claims["batch-8-llama"]["passed"] and not claims["linear"]["passed"]
    assert claims["decode-2048-llama"]["value"] == pytest.approx(4.0)
    failed = [
        claim for claim in claims.values() if "value" in claim and claim["value"] is not None and not claim["passed"]
    ]
    assert code == (1 if failed else 0)
    assert "round 1 of 1" in err


def test_the_table_shows_engines_side_by_side_and_what_was_not_tested(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "engine", "--model", model, "--quick", "--only", "batch"]) == 0
    out = capsys.readouterr().out
    assert "decode of 8 at once" in out and "4.00 ×" in out and "1 of 1 claims hold" in out
    assert "could not test: decode-32-llama" in out
