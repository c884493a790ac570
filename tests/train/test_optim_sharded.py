"""Two processes that share every parameter (DTensor) come to the same weights as one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.loopback
def test_sharded_parameters_take_the_same_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.train.sharded_program"]
    running = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in running:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in running:
            process.kill()
