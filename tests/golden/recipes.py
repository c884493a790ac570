"""The config of every recipe as text, to be looked at whenever it changes. `python -m tests.golden.recipes` writes it anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchard.recipes import get, names

FOLDER = Path(__file__).parent / "recipes"
ARGUMENTS: dict[str, dict[str, Any]] = {"pretrain": {"data": "texts.txt"}}
"""What recipes are asked with; others get a file of rows."""


def dump(name: str) -> str:
    """What a recipe returns, before anything is looked up on the disk."""
    given = ARGUMENTS.get(name, {"data": "rows.jsonl"})
    return get(name)(**given).describe() + "\n"


def main() -> None:
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for name in names():
        (FOLDER / f"{name}.txt").write_text(dump(name))


if __name__ == "__main__":
    main()
