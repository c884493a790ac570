"""Data and settings that make every recipe a matter of a second: a byte model of one small layer, a tiny GGUF base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchard.recipes import Run, get

SMALL = {"steps": 4, "rows": 2, "length": 64}
LAYER = "train.model.stack.layers"


def texts(folder: Path, count: int = 60) -> str:
    path = folder / "numbers.txt"
    path.write_text("\n\n".join(f"The number {n} comes before {n + 1}." for n in range(count)))
    return str(path)


def talks(folder: Path, count: int = 40) -> str:
    return _lines(folder / "talks.jsonl", [{"prompt": f"{n}", "completion": f"{n + 1}."} for n in range(count)])


def preferences(folder: Path, count: int = 20) -> str:
    rows = [{"prompt": f"{n}", "chosen": f"{n + 1}.", "rejected": "no idea"} for n in range(count)]
    return _lines(folder / "preferences.jsonl", rows)


def thin(cfg: Run.Config) -> Run.Config:
    """The same run with a fresh model of one narrow layer."""
    tree: Any = cfg.train.model
    tree.stack.layers = tree.stack.layers[:1]
    tree.stack.layers[0].mlp.hidden_dim = 32
    return cfg


def fresh(folder: Path, **arguments: Any) -> Run.Config:
    given = {"data": texts(folder), "size": "1m", "split": "blank", "lr": 1e-2, **SMALL} | arguments
    return thin(get("pretrain")(**given))


def _lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
