"""Rollouts on two processes are those of one; a run by rewards that was killed ends with the weights of one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.parallel_start import ROOT, start

pytestmark = pytest.mark.loopback
SOURCE = {"group": 4, "epochs": 2, "minibatches": 2, "temperature": 0.9}


def run(folder: Path, *, size: int, runner: str, **said: Any) -> dict[str, Any]:
    source = SOURCE | {"runner": runner}
    told = json.dumps({"folder": str(folder), "name": "run", "source": source, "steps": 12, **said})
    ended = start("rolling", told, size=size)
    assert [code for code, _, _ in ended] == [0] * size, [errors[-2000:] for _, _, errors in ended]
    found: dict[str, Any] = json.loads(ended[0][1].splitlines()[-1])
    return found


_ONE: dict[str, dict[str, Any]] = {}


def on_one(folder: Path, runner: str) -> dict[str, Any]:
    """Run once for all tests."""
    if runner not in _ONE:
        (folder / "one").mkdir()
        _ONE[runner] = run(folder / "one", size=1, runner=runner)
    return _ONE[runner]


@pytest.mark.long
@pytest.mark.parametrize(("runner", "shard"), [("alone", True), ("auto", False)])
def test_two_processes_write_and_learn_what_one_does(tmp_path: Path, runner: str, shard: bool) -> None:
    alone, both = on_one(tmp_path, runner), run(tmp_path, size=2, runner=runner, shard=shard)
    assert both["texts"] == alone["texts"] and len(both["texts"]) == 8
    for curve in ("loss", "ratio", "behaviour_kl"):
        assert both["series"][curve] == pytest.approx(alone["series"][curve], abs=1e-4)
    for curve in ("reward", "staleness", "rows", "tokens"):
        assert both["series"][curve] == alone["series"][curve]
    assert sum(alone["series"]["advantage"]) > 1
    assert [note for note in both["notes"] if "process" not in note] == alone["notes"]


@pytest.mark.long
def test_a_run_goes_on_with_other_processes_in_the_middle_of_a_round(tmp_path: Path) -> None:
    alone, source = on_one(tmp_path, "alone"), SOURCE | {"runner": "alone"}
    begun = {"folder": str(tmp_path), "name": "run", "source": source, "steps": 12, "stop_at": 6}
    ended = start("rolling", json.dumps(begun), size=2)
    (kept,) = (tmp_path / "run").glob("step-*")
    assert all(code for code, _, _ in ended) and int(kept.name.split("-")[1]) % 4, "between two batches of a round"
    found = run(tmp_path, size=1, runner="alone")
    assert found["series"]["loss"] == pytest.approx(alone["series"]["loss"], abs=1e-4)
    assert found["texts"] == alone["texts"] and found["series"]["staleness"] == [0, 1, 2, 3] * 3


@pytest.mark.long
def test_killed_and_resumed_it_has_the_same_weights(tmp_path: Path) -> None:
    source = {"group": 4, "minibatches": 2, "lag": 1}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def begin(name: str) -> subprocess.Popen[str]:
        told = {"folder": str(tmp_path), "name": name, "source": source, "steps": 30, "every": 1}
        command = [sys.executable, "-m", "tests.train.rolling", json.dumps(told)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    first, folder = begin("killed"), tmp_path / "killed"
    while first.poll() is None and len(list(folder.glob("step-*-000003"))) == 0:
        time.sleep(0.01)
    first.kill()
    assert first.wait() != 0 and not list(folder.glob("step-00000030-*")), "it was killed before its end"
    said = [begin(name).communicate(timeout=100)[0] for name in ("killed", "whole")]
    found, wanted = (json.loads(each.splitlines()[-1]) for each in said)
    assert found["weights"] == wanted["weights"] != {}
    assert found["series"]["reward"] == wanted["series"]["reward"]
