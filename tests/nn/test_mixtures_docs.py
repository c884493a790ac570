"""The examples of docs/mixtures.md run in order, and print what the page lets expect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "mixtures.md").read_text()


def test_the_examples_of_mixtures(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(examples) == 3
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "docs/mixtures.md", "exec"), names)  # noqa: S102
    assert capsys.readouterr().out == "['moe.balance', 'moe.z']\nTrue\n"
