"""Gradients brought to size: divided by what was counted, bounded by their global norm (arXiv 1211.5063), and looked at.

A gradient that is not finite is found by its norm, which is computed anyway; only then is each parameter looked at, to name the
ones that are at fault. Nothing is changed in that case: what to do is the caller's decision.

The stages of a pipeline have different parameters. Each clips its own by the norm of all (`others`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError


@dataclass(frozen=True)
class Norm:
    """The global norm before clipping (after scaling), and which parameters have gradients that are not finite."""

    value: float
    bad: tuple[str, ...] = ()
    clipped: bool = False


class Others(Protocol):
    """What processes with other parameters of the same model know. All of them clip at the same time."""

    def counts(self, name: str) -> bool:
        """Whether a parameter of this process is counted here: one that several processes have is counted by one of them."""

    def added(self, value: float) -> float:
        """The sum of a number over all of them."""

    def joined(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names that any of them has."""


class Clip(Configurable):
    """`clip(model.named_parameters(), scale=1/weight) → Norm`. DTensor gradients are counted over all their shards."""

    @config
    class Config(BaseConfig):
        limit: float | None = 1.0
        """The largest norm that is let through; None: all, the norm is only reported."""

        def wire(self) -> None:
            if self.limit is not None and not self.limit > 0:
                raise ConfigError(f"limit is {self.limit}", hint="use a number above 0, or None for no limit")

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    @torch.no_grad()
    def __call__(
        self, named_parameters: Iterable[tuple[str, Tensor]], *, scale: float = 1.0, others: Others | None = None
    ) -> Norm:
        """Multiply all gradients by `scale` and, where their norm is then above the limit, bring it down to the limit."""
        found = [(name, parameter.grad) for name, parameter in named_parameters if parameter.grad is not None]
        if not found and others is None:
            return Norm(0.0)
        counted = [gradient for name, gradient in found if others is None or others.counts(name)]
        norm = _norm(counted, others)
        if not math.isfinite(norm):
            bad = tuple(name for name, gradient in found if not bool(_whole(torch.isfinite(gradient).all())))
            bad = bad if others is None else others.joined(bad)
            if bad:
                return Norm(norm, bad)
            norm = _norm(counted, others, torch.float64)  # finite numbers whose squares are not
        norm *= abs(scale)
        limit: float = math.inf if self.config.limit is None else self.config.limit
        clipped = norm > limit
        factor = scale * (limit / norm if clipped else 1.0)
        if factor != 1.0 and found:
            torch._foreach_mul_([gradient for _, gradient in found], factor)
        return Norm(norm, clipped=clipped)


def _norm(gradients: list[Tensor], others: Others | None, dtype: torch.dtype = torch.float32) -> float:
    mine = global_norm(gradients, dtype) if gradients else 0.0
    return mine if others is None else math.sqrt(others.added(mine * mine))


def global_norm(gradients: list[Tensor], dtype: torch.dtype = torch.float32) -> float:
    """The norm of all numbers together, added up in float32 whatever the gradients are (float64 in float64)."""
    if dtype == torch.float32 and {gradient.dtype for gradient in gradients} == {torch.float32}:
        return float(_whole(torch.nn.utils.get_total_norm(gradients)))
    norms = [
        _whole(torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, dtype))).to(torch.float64)
        for g in gradients
    ]
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))


def _whole(value: Any) -> Tensor:
    """A value that shards hold together, as one that everybody knows."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole
