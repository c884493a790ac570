"""One decision a row: all tokens of an image go to the same experts, so only those have to be loaded (arXiv 2309.04354).

The router reads the mean token. It can be taught which group a row belongs to (`Context.labels`): the cross-entropy of its scores
is left under the name `moe.router`.

Shapes: B rows, S tokens each, N = B · S, E experts, K chosen.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.linear import Linear
from orchard.nn.moe.router import Router, Routing
from orchard.nn.moe.rows import whole_rows

DECIDED = "moe.decided"
"""Where a context keeps the last decision about its rows."""


class ImageLevel(Configurable, Router):
    """Softmax over all experts, then the k largest, once a row.

    Renormalised weights of one expert are always 1: then the router learns from labels alone, unless gradients go `through`.
    """

    whole_rows: ClassVar[bool] = True

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        experts: int = REQUIRED
        k: int = 1
        renormalize: bool = False
        through: bool = False
        """Renormalised weights pass on the gradient of plain ones (straight-through, arXiv 1308.3432), so that a router learns
        without labels too."""
        gate: Linear.Config = field(default_factory=Linear.Config)

        def wire(self) -> None:
            if not 1 <= self.k <= self.experts:
                raise ConfigError(f"{self.k} of {self.experts} experts cannot be chosen", hint="use 1 ≤ k ≤ experts")
            if self.through and not self.renormalize:
                raise ConfigError("plain weights have a gradient of their own", hint="use through with renormalize")
            self.gate.in_dim, self.gate.out_dim = self.dim, self.experts

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.gate: Linear = cfg.gate.build()

    def forward(self, x: Tensor, context: Context | None = None) -> Routing:
        real = whole_rows(x, context, "a router that reads whole rows")[..., None]
        mean = (x.float() * real).sum(1) / real.sum(1).clamp_min(1)
        logits = self.gate(mean.to(x.dtype))
        if context is not None and context.labels is not None:
            context.collect("moe.router", _taught(logits.float(), context.labels))
        weights, experts = torch.topk(logits.float().softmax(-1), self.config.k, dim=-1)
        if self.config.renormalize:
            even = weights / weights.sum(-1, keepdim=True)
            weights = even + (weights - weights.detach()) if self.config.through else even
        parts = (experts, weights.to(x.dtype), logits)
        routing = Routing(*(part.repeat_interleave(x.shape[1], 0) for part in parts))
        if context is not None:
            context.memo[DECIDED] = routing  # for layers that follow
        return routing


def _taught(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy over rows whose group is known: one number a row (-1: not known), or the share of each group."""
    rows, experts = logits.shape
    if labels.shape not in ((rows,), (rows, experts)):
        raise ConfigError(
            f"labels of shape {tuple(labels.shape)} for {rows} rows and {experts} experts",
            hint="give one number a row, or the share of each group",
        )
    if labels.dim() == 2:
        return functional.cross_entropy(logits, labels.to(logits.dtype))
    total = functional.cross_entropy(logits, labels.long(), ignore_index=-1, reduction="sum")
    return total / (labels != -1).sum().clamp_min(1)
