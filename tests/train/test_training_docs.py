"""The example of docs/training.md runs, and leaves what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text()


def test_the_example_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    exec(compile(example, "docs/training.md", "exec"), {})  # noqa: S102
    for name in ("report.json", "report.html", "curves.png"):
        assert (tmp_path / "run" / name).stat().st_size > 1000
