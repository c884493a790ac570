"""Every example of docs/vision.md runs, in its order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "vision.md").read_text()


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for source in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
        exec(compile(source, "docs/vision.md", "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert "torch.Size([8, 64])" in printed and "of its parameters touched" in printed and "\n3 [" in printed
    assert (tmp_path / "run").is_dir()
