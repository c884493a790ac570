"""A save that dies loses nothing: killed, out of power, or refused by the disk, at every single touch of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_dies_at_every_touch_of_the_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.train.checkpoint_crash_program", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    counted = re.findall(r"(\w+) (\d+) places: (\d+) left the old one, (\d+) the new one\n", done.stdout)
    assert [how for how, *_ in counted] == ["kill", "lose", "raise"]
    for _, places, old, new in counted:
        assert int(places) >= 17 and int(old) >= 12 and int(new) >= 3  # before it is renamed, and after
