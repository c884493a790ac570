"""Cross-entropy over a vocabulary with its gradient, in as few passes over the scores as there can be.

What is trained knows the gradient of a sum of losses as soon as it knows the scores: softmax minus the target, row by row. So
both are made together, the gradient in the place of the scores. On a GPU one kernel does it (orchard/ops/kernels/triton); here
is the same in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchard.core.errors import MissingExtra


@dataclass(frozen=True)
class Told:
    """Of each row: minus the target's log-probability, the log of the sum of exponentials, the likeliest token; and the gradient
    of the sum [n, V], in the dtype of the scores."""

    nll: Tensor
    spread: Tensor
    best: Tensor
    slope: Tensor


def cross_entropy_with_slope(scores: Tensor, targets: Tensor, weights: Tensor, z: float = 0.0) -> Told:
    """For the sum over rows of weight · (nll + z · spread²). `scores` [n, V] are overwritten."""
    if scores.is_cuda and scores.dtype != torch.float64 and scores.is_contiguous():
        try:
            from orchard.ops.kernels.triton.loss import cross_entropy_on_gpu
        except (ImportError, MissingExtra):  # torch without Triton
            pass
        else:
            return cross_entropy_on_gpu(scores, targets, weights, z)
    return cross_entropy_in_torch(scores, targets, weights, z)


def cross_entropy_in_torch(scores: Tensor, targets: Tensor, weights: Tensor, z: float = 0.0) -> Told:
    """The plain twin."""
    x = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    weights = weights.to(x.dtype)
    best = x.argmax(-1)
    spread = x.logsumexp(-1)
    picked = x.gather(-1, targets[:, None])[:, 0]
    nll = spread - picked
    slope = x.sub_(spread[:, None]).exp_().mul_((weights * (1 + 2 * z * spread))[:, None])
    slope.scatter_add_(1, targets[:, None], -weights[:, None])
    return Told(nll, spread, best, slope.to(scores.dtype))
