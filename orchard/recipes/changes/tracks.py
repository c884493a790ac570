"""Other shapes for models that are trained from nothing: parallel tracks, and windows between global layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchard.core.errors import UsageError
from orchard.recipes.changes import change
from orchard.recipes.run import Run
from orchard.transforms.local_global import LocalGlobal
from orchard.transforms.tracks import ParallelTracks


@change
def tracks(run: Run.Config, count: int = 4, depth: int = 4, combine: str = "mean") -> Run.Config:
    """Give heads and hidden channels to tracks that meet only after every few layers (arXiv 2507.13575)."""
    return _shaped(run, ParallelTracks(tracks=count, depth=depth, combine=combine))


@change
def local_global(
    run: Run.Config, window: int = 512, every: int = 4, positions: bool = False, mixer: str = "attention"
) -> Run.Config:
    """Let all layers but the last of every few see a window only, and those few without positions (arXiv 2507.13575);
    mixer=rattention: and what lies behind the window as a sum (arXiv 2506.15545)."""
    return _shaped(run, LocalGlobal(window=window, every=every, positions=positions, mixer=mixer))


def _shaped(run: Run.Config, transform: Callable[[Any], Any]) -> Run.Config:
    tree = run.train.model
    if tree is None:
        raise UsageError("this run begins with a model that is there already", hint="use it with `pretrain`")
    return run.clone(train=run.train.clone(model=transform(tree)))
