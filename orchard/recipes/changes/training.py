"""How weights are updated and kept, for any recipe."""

from __future__ import annotations

from orchard.recipes.changes import change
from orchard.recipes.run import Run
from orchard.train.ema import EMA
from orchard.train.optim import Adafactor, AdamW8bit, Muon


@change
def ema(run: Run.Config, decay: float = 0.999) -> Run.Config:
    """Keep an average of the weights, and leave that as the result."""
    return run.clone(train=run.train.clone(ema=EMA.Config(decay=decay)))


@change
def muon(run: Run.Config, matrix_lr: float | None = None) -> Run.Config:
    """Update hidden matrices with Muon, everything else with AdamW (arXiv 2502.16982)."""
    return run.clone(train=run.train.clone(optim=run.train.optim.derive(Muon, matrix_lr=matrix_lr)))


@change
def adam8bit(run: Run.Config) -> Run.Config:
    """Keep AdamW's state in 8 bits (arXiv 2110.02861)."""
    return run.clone(train=run.train.clone(optim=run.train.optim.derive(AdamW8bit)))


@change
def adafactor(run: Run.Config) -> Run.Config:
    """Keep the optimiser's state by rows and columns (arXiv 1804.04235)."""
    return run.clone(train=run.train.clone(optim=run.train.optim.derive(Adafactor)))
