"""The example of docs/checkpoints.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(found) == 1
    exec(compile(found[0], "docs/checkpoints.md", "exec"), {})  # noqa: S102
    assert (tmp_path / "run" / "step-00000100-000001" / "manifest.json").is_file()
