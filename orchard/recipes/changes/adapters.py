"""Side paths instead of all weights, for any recipe that begins from a model."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.core.errors import UsageError
from orchard.recipes.adapter import Adapter
from orchard.recipes.changes import change
from orchard.recipes.run import Run
from orchard.transforms.lora import ALL_LINEAR


@change
def lora(
    run: Run.Config,
    r: int = 32,
    alpha: float = 64.0,
    targets: str | Sequence[str] = ALL_LINEAR,
    dropout: float = 0.0,
    quantize: str | None = None,
    unpack: bool = False,
    method: str = "lora",
) -> Run.Config:
    """Train low-rank side paths and leave the base as it is (arXiv 2106.09685)."""
    if run.base is None:
        raise UsageError("this run begins with fresh weights, and an adapter needs a base", hint="give base=MODEL")
    adapter = Adapter.Config(
        method=method, r=r, alpha=alpha, targets=targets, dropout=dropout, quantize=quantize, unpack=unpack
    )
    return run.clone(adapter=adapter)


@change
def dora(run: Run.Config, r: int = 32, alpha: float = 64.0, dropout: float = 0.0) -> Run.Config:
    """Train side paths, and the lengths of the rows beside them (arXiv 2402.09353)."""
    return lora(run, r, alpha, dropout=dropout, method="dora")


@change
def rslora(run: Run.Config, r: int = 32, alpha: float = 64.0, dropout: float = 0.0) -> Run.Config:
    """Train side paths scaled by the root of their rank, so that large ranks learn too (arXiv 2312.03732)."""
    return lora(run, r, alpha, dropout=dropout, method="rslora")


@change
def qlora(run: Run.Config, r: int = 32, alpha: float = 64.0, quantize: str = "q4_0") -> Run.Config:
    """Train side paths beside a base whose linear maps are packed (arXiv 2305.14314)."""
    return lora(run, r, alpha, quantize=quantize)
