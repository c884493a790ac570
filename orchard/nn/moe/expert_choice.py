"""Expert-choice routing: each expert takes its best tokens of a sequence (arXiv 2202.09368; for diffusion, arXiv 2410.02098).

Every expert gets the same number of tokens by construction, so no loss has to keep them even. A token may meet several experts,
or none: then only the residual path carries it on. Choices are made within one sequence, so a result does not depend on what else
is in a batch. They depend on the whole sequence: a model that writes token by token cannot use this, and is refused.

Shapes: B sequences, S tokens each, N = B · S, E experts, K tokens an expert takes of a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.linear import Linear
from orchard.nn.moe.dispatch import Pairs
from orchard.nn.moe.router import Router
from orchard.nn.moe.rows import whole_rows


@dataclass(frozen=True)
class Choices:
    """Which tokens of each sequence each expert takes [B, E, K] (numbers among all N), with what weights [B, E, K], and the
    scores behind it [N, E]. A weight of zero: the sequence is shorter than others, and its experts take fewer."""

    tokens: Tensor
    weights: Tensor
    logits: Tensor

    def pairs(self) -> Pairs:
        """Tokens and experts, sorted by expert."""
        rows, experts, taken = self.tokens.shape
        source, weights = (part.transpose(0, 1).flatten() for part in (self.tokens, self.weights))
        counts = torch.full((experts,), rows * taken, dtype=torch.int64, device=source.device)
        return Pairs(source, weights, counts)


class ExpertChoice(Configurable, Router):
    """Softmax over experts; then each expert takes ⌈length · capacity / experts⌉ tokens of each sequence."""

    whole_rows: ClassVar[bool] = True

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        experts: int = REQUIRED
        capacity: float = 1.0
        """How many experts a token meets on average."""
        gate: Linear.Config = field(default_factory=Linear.Config)

        def wire(self) -> None:
            if not 0 < self.capacity <= self.experts:
                raise ConfigError(
                    f"a token cannot meet {self.capacity} of {self.experts} experts on average",
                    hint="use 0 < capacity ≤ experts",
                )
            self.gate.in_dim, self.gate.out_dim = self.dim, self.experts

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.gate: Linear = cfg.gate.build()

    def forward(self, x: Tensor, context: Context | None = None) -> Choices:
        real = whole_rows(x, context, "experts that choose tokens")
        rows, length = x.shape[0], x.shape[1]
        logits = self.gate(x)
        affinity = logits.float().softmax(-1).masked_fill(~real[..., None], -1.0)  # [B, S, E]: padding comes last
        weights, tokens = affinity.transpose(1, 2).topk(self.takes(length), dim=-1)
        # A sequence with padding is given no more than it would be without.
        share = self.config.capacity / self.config.experts
        limit = (real.sum(-1).double() * share - 1e-6).ceil().clamp_min(1)  # [B]
        rank = torch.arange(tokens.shape[-1], device=x.device)
        weights = torch.where((rank < limit[:, None, None]) & (weights >= 0), weights, 0.0)
        first = torch.arange(rows, device=x.device)[:, None, None] * length
        return Choices(tokens=tokens + first, weights=weights.to(x.dtype), logits=logits.flatten(0, 1))

    def takes(self, length: int) -> int:
        """How many tokens each expert takes of a sequence of this length."""
        return min(length, max(1, math.ceil(length * self.config.capacity / self.config.experts - 1e-6)))
