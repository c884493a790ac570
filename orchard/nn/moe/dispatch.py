"""Tokens on their way to experts and back: sorted by expert, so that each expert reads one contiguous run. None is dropped.

Shapes: N tokens, K choices a token, E experts, P pairs of a token and an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Which token meets which expert, sorted by expert: `source` [P] is the token, `weights` [P] what its result counts, and
    `counts` [E] how many pairs each expert has."""

    source: Tensor
    weights: Tensor
    counts: Tensor


def sort_by_expert(experts: Tensor, weights: Tensor, count: int) -> Pairs:
    """The pairs of each token with its choices, `experts` and `weights` [N, K]. Tokens of one expert stay in their order."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    return Pairs(order // experts.shape[1], weights.flatten()[order], count_by_expert(flat, count))


def count_by_expert(experts: Tensor, count: int) -> Tensor:
    """How often each of `count` experts occurs: int64 [count]. (`bincount` has no fixed shape where it is compiled.)"""
    return torch.zeros(count, dtype=torch.int64, device=experts.device).scatter_add_(
        0, experts, torch.ones_like(experts)
    )


def add_up(results: Tensor, pairs: Pairs, tokens: Tensor) -> Tensor:
    """The weighted sum of each token's results [P, dim]; a token that meets no expert gets zeros."""
    weighted = results * pairs.weights[:, None]
    return torch.zeros_like(tokens).index_add_(0, pairs.source, weighted.to(tokens.dtype))
