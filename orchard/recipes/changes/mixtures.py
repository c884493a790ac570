"""Mixtures of experts, for any recipe that begins from a model."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.core.errors import UsageError
from orchard.objectives.collected import with_collected
from orchard.recipes.changes import change
from orchard.recipes.run import Run
from orchard.recipes.upcycled import Upcycled


@change
def upcycle(
    run: Run.Config,
    experts: int = 8,
    k: int = 2,
    layers: str | Sequence[int] = "all",
    parts: int = 1,
    shared: float = 0.0,
    noise: float = 0.0,
    balance: float = 0.01,
    z: float = 0.001,
) -> Run.Config:
    """Make a dense base a mixture of experts that begins as what it was, and train that (arXiv 2212.05055)."""
    if run.base is None:
        raise UsageError("this run begins with fresh weights, and there is nothing to upcycle", hint="give base=MODEL")
    if run.adapter is not None:
        raise UsageError(
            "side paths belong to a base as it is, not to a mixture made of it", hint="leave one of them out"
        )
    numbers = layers if isinstance(layers, str) else [int(layer) for layer in layers]
    made = Upcycled.Config(
        experts=experts, k=k, layers=numbers, parts=parts, shared=shared, noise=noise, seed=run.train.seed
    )
    beside = {name: weight for name, weight in (("moe.balance", balance), ("moe.z", z)) if weight}
    objective = with_collected(run.train.objective, beside) if beside else run.train.objective
    return run.clone(after=[*run.after, made.complete()], train=run.train.clone(objective=objective))
