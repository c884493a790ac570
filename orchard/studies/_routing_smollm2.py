"""The fine-tuning route on a model of the library: SmolLM2, routed for some million tokens that it writes itself.

It learns to say what it said before (`orchard compress`, as anybody would), while layers borrow by chance; then half of the
layers keep keys and values, then a quarter. Beside it the same cuts without routing. Nothing is fitted: only routing differs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from orchard.core.errors import ModelNotFound
from orchard.recipes.compress import compress
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.library import Library

MODEL = "smollm2"


def there(model: str = MODEL) -> bool:
    """Whether the library has it."""
    try:
        Library().resolve(model)
    except ModelNotFound:
        return False
    return True


def cut_and_routed(tokens: int, seed: int, model: str = MODEL, **settings: Any) -> dict[str, float]:
    """Loss over the original's on its own text, by what was done: `as_is_50`, `as_is_25`, `routed_100`, `routed_50`, …"""
    cuts = plan(model)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, float] = {}
        for name, steps in (("as_is", cuts), ("routed", ["route-kv:p_borrow=0.6,lr=5e-4", *cuts])):
            made = compress(model, steps, Path(folder) / f"{name}.orchard", tokens=tokens, seed=seed, **settings)
            rates = ("100", "50", "25")[-len(steps) :]
            done = made.to_dict()["steps"]
            found |= {
                f"{name}_{rate}": step["measured"]["all"]["ratio"] for rate, step in zip(rates, done, strict=True)
            }
    return found


def plan(model: str) -> list[str]:
    """Every second layer is kept, then of those every second one."""
    with open_checkpoint(Library().resolve(model)) as checkpoint:
        layers = len(checkpoint.config().stack.layers)
    return ["retain:every=2,fit=false", f"retain:layers={list(range(0, layers, 4))},fit=false"]
