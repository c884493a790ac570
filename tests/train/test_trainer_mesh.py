"""The same run on one process and on two: the same losses, checkpoints that go from one to the other, and no silent end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.parallel_start import start

pytestmark = pytest.mark.loopback


def run(folder: Path, *, size: int, steps: int = 20, **said: Any) -> dict[str, Any]:
    told = json.dumps({"folder": str(folder), "steps": steps, **said})
    ended = start("mesh_program", told, size=size)
    assert [code for code, _, _ in ended] == [0] * size, [errors[-2000:] for _, _, errors in ended]
    found: dict[str, Any] = json.loads(ended[0][1].splitlines()[-1])
    return found


_ALONE: list[dict[str, Any]] = []


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run once; a fixture of the whole module would run before a test may talk to itself."""
    if not _ALONE:
        _ALONE.append(run(tmp_path_factory.mktemp("alone"), size=1))
    return _ALONE[0]


@pytest.mark.parametrize(
    "said",
    [
        {"mesh": {}, "micro": 1, "every": 1},
        pytest.param({"mesh": {"pipeline": 2}, "micro": 2}, marks=pytest.mark.long),
    ],
    ids=["sharded, micro-batches, recomputed", "pipeline"],
)
def test_two_processes_learn_what_one_learns(tmp_path: Path, alone: dict[str, Any], said: dict[str, Any]) -> None:
    found = run(tmp_path, size=2, **said)
    assert found["series"]["loss"] == pytest.approx(alone["series"]["loss"], abs=1e-4)
    assert found["series"]["norm"] == pytest.approx(alone["series"]["norm"], rel=1e-3)
    ours, theirs = found["series"]["held out, same"], alone["series"]["held out, same"]
    assert [step for step, _ in ours] == [10, 20]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], abs=1e-4)
    assert found["tokens"] == alone["tokens"]
    assert any("2 processes" in note for note in found["notes"])


@pytest.mark.long
def test_a_run_survives_a_signal_and_a_death_and_goes_on_alone(tmp_path: Path, alone: dict[str, Any]) -> None:
    told = {"folder": str(tmp_path), "steps": 20}
    ended = start("mesh_program", json.dumps(told | {"stop_at": 6}), size=2)
    assert [code for code, _, _ in ended] == [130, 130], "both end, by the signal that one of them got"
    ended = start("mesh_program", json.dumps(told | {"kill_at": 14}), size=2)
    assert ended[0][0] == -9 and ended[1][0] == 3
    assert "worker-lost" in ended[1][2] and ("rank 0" in ended[1][2] or "process that the run" in ended[1][2])
    found = run(tmp_path, size=1)
    assert found["series"]["loss"] == pytest.approx(alone["series"]["loss"], abs=1e-4)
    assert len(found["series"]["loss"]) == 20
