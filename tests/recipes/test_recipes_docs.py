"""The examples of docs/recipes.md run, and its commands name recipes, techniques and options that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from orchard.cli.main import main
from orchard.recipes import base, names

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = names()
    variables: dict[str, Any] = {"__name__": "docs"}
    try:
        for source in fences("python"):
            exec(compile(source, "docs/recipes.md", "exec"), variables)  # noqa: S102
        assert (tmp_path / "run" / "model").is_dir() and names() == sorted([*known, "careful"])
    finally:
        base._known.pop("careful", None)


def test_the_commands_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    commands = [shlex.split(line, comments=True) for block in fences("sh") for line in block.splitlines()]
    assert len(commands) == 6
    for command in commands:
        assert main([*command[1:], "--show"]) == 0, command
    assert not (tmp_path / "runs").exists()


def test_all_recipes_are_in_the_table() -> None:
    assert sorted(re.findall(r"^\| `([a-z-]+)` \| .* \| `(?:model|adapter)`", PAGE, re.M)) == names()
