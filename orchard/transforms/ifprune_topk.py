"""The top-k that a gradient gets through, for many rows at once, each with a k of its own.

The relaxed choice of k among n scores z is λ = σ((z + c) / τ), with the one number c a row that makes the sum k; for τ → 0 it is the
hard top-k. What is kept is m = λ · Top(λ, k): the k largest by λ, everything else 0 (instruction-following pruning, arXiv 2501.02086,
which asks of λ only that it sums to k; that it is this one is our choice). c is found by bisection, and its gradient by the implicit
function: dλ = s (dz - Σ s dz / Σ s), s = λ (1 - λ) / τ. `prune_masks` has the same for one row that is learned and not predicted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchard.core.errors import ConfigError

ROUNDS = 24
"""Halvings; then Newton's method does the rest."""
POLISH = 2
REACH = 20.0
"""Temperatures beyond the largest score at which σ is as good as 0 or 1."""


class _SoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, counts: Tensor, temperature: float) -> Tensor:
        scaled = scores / temperature
        low, high = -scaled.amax(-1, keepdim=True) - REACH, -scaled.amin(-1, keepdim=True) + REACH
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            over = torch.sigmoid(scaled + middle).sum(-1, keepdim=True) > counts
            low, high = torch.where(over, low, middle), torch.where(over, middle, high)
        shift = (low + high) / 2
        for _ in range(POLISH):
            soft = torch.sigmoid(scaled + shift)
            slope = (soft * (1 - soft)).sum(-1, keepdim=True).clamp_min(torch.finfo(soft.dtype).tiny)
            shift = torch.clamp(shift + (counts - soft.sum(-1, keepdim=True)) / slope, low, high)
        soft = torch.sigmoid(scaled + shift)
        soft = torch.where(counts >= scores.shape[-1], torch.ones_like(soft), soft)
        ctx.save_for_backward(soft)
        ctx.temperature = temperature
        return soft

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (soft,) = ctx.saved_tensors
        slope = soft * (1 - soft)
        total = slope.sum(-1, keepdim=True).clamp_min(torch.finfo(soft.dtype).tiny)
        mean = (slope * grads[0]).sum(-1, keepdim=True) / total
        return slope * (grads[0] - mean) / ctx.temperature, None, None


def soft_top_k(scores: Tensor, k: int | Tensor, temperature: float) -> Tensor:
    """λ [..., n] in [0, 1], each row of which sums to its k. `k`: one for all rows, or a tensor of one a row [...]. With gradient."""
    counts = _counts(scores, k, temperature)
    made: Tensor = _SoftTopK.apply(scores, counts, temperature)
    return made


def top_k(scores: Tensor, k: int | Tensor) -> Tensor:
    """1 where a score is among the k largest of its row, else 0. Of equals the first are taken, so that smaller sets lie in larger."""
    counts = _counts(scores, k, 1.0)
    order = torch.argsort(scores.detach(), dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(-1, order, places)
    return (ranks < counts).to(scores.dtype)


def chosen(scores: Tensor, k: int | Tensor, temperature: float) -> Tensor:
    """m = λ · Top(λ, k)."""
    return soft_top_k(scores, k, temperature) * top_k(scores, k)


def _counts(scores: Tensor, k: int | Tensor, temperature: float) -> Tensor:
    n = scores.shape[-1]
    counts = torch.as_tensor(k, dtype=scores.dtype, device=scores.device)
    counts = counts.expand(scores.shape[:-1])[..., None] if counts.ndim == 0 else counts[..., None]
    if isinstance(k, int) and not 0 < k <= n or not temperature > 0:
        raise ConfigError(f"no top {k} of {n} at temperature {temperature}", hint="keep some, above 0")
    if isinstance(k, Tensor) and not bool(((counts > 0) & (counts <= n)).all()):
        raise ConfigError(f"a row keeps none or more than its {n}", hint=f"use numbers from 1 to {n}")
    return counts
