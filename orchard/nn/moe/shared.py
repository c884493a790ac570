"""Experts that every token meets, beside those it chooses (arXiv 2401.06066), weighed by a gate of their own as in Qwen2-MoE."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from orchard.core.config import config
from orchard.core.context import Context
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP


class SharedMLP(GatedMLP):
    """σ(weigh(x)) · mlp(x): each token says how much of it it takes. Without that a shared expert is a plain GatedMLP."""

    @config
    class Config(GatedMLP.Config):
        weigh: Linear.Config = field(default_factory=Linear.Config)

        def wire(self) -> None:
            GatedMLP.Config.wire(self)
            self.weigh.in_dim, self.weigh.out_dim = self.dim, 1

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.weigh: Linear = cfg.weigh.build()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return torch.sigmoid(self.weigh(x)) * super().forward(x, context)
