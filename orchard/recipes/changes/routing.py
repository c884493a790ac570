"""Keys and values that layers share, for any recipe: drawn by chance while a model learns, or in a fixed pattern."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.core.errors import UsageError
from orchard.recipes.changes import change
from orchard.recipes.routed import Retained, Routed
from orchard.recipes.run import Run
from orchard.transforms.route_kv import RouteKV


@change
def route_kv(run: Run.Config, p_borrow: float | None = None) -> Run.Config:
    """Let layers read earlier layers' keys and values by chance, so that any few can be kept later (arXiv 2604.22782).

    p_borrow: how likely each does, in each pass; 0.5 for a fresh model, 0.6 for a trained one
    """
    tree = run.train.model
    if tree is not None:
        routed = RouteKV(0.5 if p_borrow is None else p_borrow).tree(tree)
        return run.clone(train=run.train.clone(model=routed))
    made = Routed.Config(p_borrow=0.6 if p_borrow is None else p_borrow)
    return run.clone(rewrites=[*run.rewrites, made.complete()])


@change
def retain(
    run: Run.Config, layers: Sequence[int] | None = None, every: int | None = None, share: float | None = None
) -> Run.Config:
    """Keep the keys and values of some layers only; the others read the last of them before (CLA, arXiv 2405.12981).

    layers: their numbers, from 0
    every: of so many layers the first
    share: of all layers, evenly spread
    """
    numbers = None if layers is None else [int(layer) for layer in layers]
    made = Retained.Config(layers=numbers, every=every, share=share).complete()
    tree = run.train.model
    if tree is not None:
        return run.clone(train=run.train.clone(model=made.transform()(tree)))
    if run.adapter is not None:
        raise UsageError(
            "side paths belong to a base as it is, not to one that keeps fewer keys and values",
            hint="leave one of them out, or adapt what `orchard compress MODEL retain` makes",
        )
    return run.clone(after=[*run.after, made])
