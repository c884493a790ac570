"""The next token: cross-entropy over packed documents, and with masked targets fine-tuning on answers.

Supervised fine-tuning is this objective, not another one: the source sets `targets` to -100 on everything but the answers
(system and user turns, and the marks that the template writes itself), and those places count for nothing.

The z-loss (PaLM, arXiv 2204.02311) keeps the sum of exponentials near one; label smoothing (arXiv 1512.00567) mixes the target
with an even distribution over the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.batch import Batch, Loss
from orchard.core.config import BaseConfig, Configurable, config
from orchard.objectives.base import Objective, places, positive, share, wide
from orchard.objectives.chunks import Sums, chunked_sums
from orchard.ops.cross_entropy import cross_entropy_with_slope


class NextToken(Configurable, Objective):
    """Cross-entropy of the target at each place. Parts: loss (plain cross-entropy, weighted), tokens, correct, z."""

    per = {"tokens": "", "correct": "tokens"}

    @config
    class Config(BaseConfig):
        z: float = 0.0
        """How much of (log of the sum of exponentials)² is added; 1e-4 is usual."""
        smoothing: float = 0.0
        chunk: int | None = 1024
        """How many tokens are scored at once (on a GPU eight times as many); None: all of them."""
        recompute: bool | None = None
        """Score chunks again in the backward pass, rather than take gradients in the forward pass; see chunks.py. None: where
        parameters are sharded, or in float16."""
        skip: bool = True
        """Leave out places without a target before scoring, where there may be any. A GPU has to be waited for then."""

        def wire(self) -> None:
            share("smoothing", self.smoothing)
            if self.chunk is not None:
                positive("chunk", self.chunk)

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def __call__(self, model: Any, batch: Batch) -> Loss:
        found = places(model, batch, skip=self.config.skip)
        sums = chunked_sums(
            model,
            found.hidden,
            [found.targets, found.counted, found.weights],
            self._measure,
            chunk=self.config.chunk,
            recompute=self.config.recompute,
            slope=None if self.config.smoothing else self._slope,
        )
        return Loss(value=sums.pop("value"), weight=sums.pop("weight"), parts=sums)

    def _slope(self, scores: Tensor, targets: Tensor, counted: Tensor, weights: Tensor) -> tuple[Sums, Tensor]:
        """The same as `_measure`, with the gradient of "value" for the scores, which are overwritten by it."""
        told = cross_entropy_with_slope(scores, targets, weights, self.config.z)
        weights = weights.to(told.nll.dtype)
        plain, square = (weights * told.nll).sum(), (weights * told.spread.square()).sum()
        sums = {
            "value": plain + self.config.z * square,
            "weight": weights.sum(),
            "loss": plain,
            "tokens": counted.sum(),
            "correct": ((told.best == targets) & counted).sum(),
            "z": square,
        }
        return sums, told.slope

    def _measure(self, scores: Tensor, targets: Tensor, counted: Tensor, weights: Tensor) -> Sums:
        scores = wide(scores)
        weights = weights.to(scores.dtype)
        plain, spread = cross_entropy(scores, targets)
        wanted = plain
        if self.config.smoothing:
            wanted = torch.lerp(plain, spread - scores.mean(-1), self.config.smoothing)
        square = spread.square()
        if self.config.z:
            wanted = wanted + self.config.z * square
        with torch.no_grad():
            correct = (scores.argmax(-1) == targets) & counted
        return {
            "value": (weights * wanted).sum(),
            "weight": weights.sum(),
            "loss": (weights * plain.detach()).sum(),
            "tokens": counted.sum(),
            "correct": correct.sum(),
            "z": (weights * square.detach()).sum(),
        }


def cross_entropy(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Minus the log-probability of each target [n], and the log of the sum of exponentials [n]."""
    plain = functional.cross_entropy(scores, targets, reduction="none")
    picked = scores.gather(-1, targets[:, None])[:, 0]
    return plain, plain + picked
