"""The feed-forward layer without a gate, as the first transformers have it (arXiv 1706.03762)."""

from __future__ import annotations

from dataclasses import field

from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.nn.linear import Linear
from orchard.nn.mlp import activation


class FeedForward(Configurable, nn.Module):
    """down(act(up(x)))."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        hidden_dim: int = REQUIRED
        activation: str = "gelu"
        up: Linear.Config = field(default_factory=lambda: Linear.Config(bias=True))
        down: Linear.Config = field(default_factory=lambda: Linear.Config(bias=True))

        def wire(self) -> None:
            self.up.in_dim, self.up.out_dim = self.dim, self.hidden_dim
            self.down.in_dim, self.down.out_dim = self.hidden_dim, self.dim

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.act = activation(cfg.activation)
        self.up: Linear = cfg.up.build()
        self.down: Linear = cfg.down.build()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y
