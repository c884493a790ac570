"""Distances between a teacher's distribution p and a student's q, per token, from log-probabilities.

forward KL(p‖q) covers all that the teacher would say, reverse KL(q‖p) keeps to what it surely would; the others lie between.
`mix` means, with m the mixture named:

| name             | what is minimised                          | source              |
|------------------|--------------------------------------------|---------------------|
| `forward`        | KL(p‖q)                                    | arXiv 1503.02531    |
| `reverse`        | KL(q‖p)                                    | arXiv 2306.08543    |
| `mixed`          | mix·KL(p‖q) + (1-mix)·KL(q‖p)              |                     |
| `skew`           | KL(p‖m), m = mix·p + (1-mix)·q             | arXiv 2402.03898    |
| `skew_reverse`   | KL(q‖m), m = (1-mix)·p + mix·q             | arXiv 2402.03898    |
| `jensen_shannon` | mix·KL(p‖m) + (1-mix)·KL(q‖m), m = mix·p + (1-mix)·q | arXiv 2306.13649 |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor, float], Tensor]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL [n] of log-probabilities [n, V]. What p holds impossible counts for nothing, also where q does."""
    terms = p.exp() * (p - q)
    return torch.where(p == -math.inf, 0.0, terms).sum(-1)


def between(p: Tensor, q: Tensor, mix: float) -> Tensor:
    """Log-probabilities of mix·p + (1-mix)·q."""
    if mix in (0.0, 1.0):
        return p if mix else q
    return torch.logaddexp(p + math.log(mix), q + math.log1p(-mix))


def _mixed(p: Tensor, q: Tensor, mix: float) -> Tensor:
    return mix * kl(p, q) + (1 - mix) * kl(q, p)


def _jensen_shannon(p: Tensor, q: Tensor, mix: float) -> Tensor:
    m = between(p, q, mix)
    return mix * kl(p, m) + (1 - mix) * kl(q, m)


DIVERGENCES: dict[str, Divergence] = {
    "forward": lambda p, q, mix: kl(p, q),
    "reverse": lambda p, q, mix: kl(q, p),
    "mixed": _mixed,
    "skew": lambda p, q, mix: kl(p, between(p, q, mix)),
    "skew_reverse": lambda p, q, mix: kl(q, between(q, p, mix)),
    "jensen_shannon": _jensen_shannon,
}
