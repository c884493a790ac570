"""Every example of docs/data.md runs, in its order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from orchard.data.rows import checked
from tests.data.data_tools import tokenizer_for

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"tokenizer": tokenizer_for()}
    for source in fences("python"):
        exec(compile(source, "docs/data.md", "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert "(4, 128)" in printed
    assert (
        "2 rows were left out: no-answer (1), not-json (1); the first: mixed.jsonl:2: the line is not JSON" in printed
    )


def test_the_forms_are_forms() -> None:
    lines = [line for block in fences("json") for line in block.splitlines()]
    assert len(lines) == 5
    for line in lines:
        assert checked(json.loads(line), "docs")
