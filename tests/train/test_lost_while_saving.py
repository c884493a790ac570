"""A process that is killed while both write a checkpoint: the other one says whom it lost, and the run can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.lost_saving_program import EVERY, STEPS
from tests.train.parallel_start import start
from tests.train.training import written

pytestmark = pytest.mark.loopback


def run(folder: Path, kill: int) -> list[tuple[int, dict[str, Any] | None, str]]:
    folder.mkdir(exist_ok=True)
    written(folder)
    found = start("lost_saving_program", json.dumps({"folder": str(folder), "kill": kill}), wait=100)
    return [(code, json.loads(out) if out else None, err) for code, out, err in found]


@pytest.mark.long
@pytest.mark.parametrize(("kill", "left"), [(EVERY, None), (STEPS, EVERY)])
def test_a_process_that_dies_in_a_save(tmp_path: Path, kill: int, left: int | None) -> None:
    """In the first save training goes on beside it; the last one is waited for."""
    (code, said, errors), (dead, _, _) = run(tmp_path / "killed", kill)
    assert (code, dead) == (0, -9) and said is not None, errors
    assert (said["error"], said["ranks"]) == ("WorkerLost", [1]), said
    again = run(tmp_path / "killed", 0)
    whole = run(tmp_path / "whole", 0)
    assert again[0][1] is not None and whole[0][1] is not None, again[0][2]
    assert again[0][1]["begun"] == left
    assert again[0][1]["losses"] == whole[0][1]["losses"] and len(whole[0][1]["losses"]) == STEPS
