"""Log-probabilities of given tokens: what preferences and policies are computed from.

One answer per row. The scores of a chunk are made again in the backward pass, because what comes after (a ratio, a logistic
of a whole answer) is not a sum over tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.batch import IGNORED, Batch
from orchard.objectives.base import places, wide
from orchard.objectives.chunks import chunked_map


def token_log_probs(model: Any, batch: Batch, *, chunk: int | None = 1024, temperature: float = 1.0) -> Tensor:
    """[B, T]: the log-probability of each target; 0 where there is none. `temperature` is the one answers were sampled at."""
    found = places(model, batch)

    def log_probs(scores: Tensor, targets: Tensor) -> Tensor:
        return -functional.cross_entropy(wide(scores) / temperature, targets, reduction="none")

    values = chunked_map(model, found.hidden, [found.targets], log_probs, chunk=chunk)
    return found.spread(values, batch.targets.shape)


def row_log_probs(model: Any, batch: Batch, *, chunk: int | None = 1024) -> Tensor:
    """[B]: the log-probability of each row's targets together."""
    return token_log_probs(model, batch, chunk=chunk).sum(-1)


@torch.no_grad()
def frozen_log_probs(model: Any, batch: Batch, *, chunk: int | None = 1024, temperature: float = 1.0) -> Tensor:
    """The same [B, T] under a model that is only read."""
    return token_log_probs(model, batch, chunk=chunk, temperature=temperature)


def lengths(batch: Batch) -> Tensor:
    """[B]: how many targets each row has."""
    return (batch.targets != IGNORED).sum(-1)
