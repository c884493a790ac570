"""The block of the first transformers: what goes in is added to what comes out, and the sum is normalised.

In `Block` the sum itself stays as it is, and norms stand on the way into and out of a part.
"""

from __future__ import annotations

from dataclasses import field

from torch import Tensor, nn

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.nn.attention.bidirectional import BidirectionalAttention
from orchard.nn.feed_forward import FeedForward
from orchard.nn.layer_norm import LayerNorm
from orchard.nn.stack import Layer


class PostNormBlock(Configurable, nn.Module):
    """x = norm(x + mixer(x)), then x = norm(x + mlp(x)). `mixer` and `mlp` are sockets, as in `Block`."""

    @config
    class Config(Layer):
        mixer: BaseConfig = field(default_factory=BidirectionalAttention.Config)
        mixer_norm: LayerNorm.Config = field(default_factory=LayerNorm.Config)
        mlp: BaseConfig = field(default_factory=FeedForward.Config)
        mlp_norm: LayerNorm.Config = field(default_factory=LayerNorm.Config)

        def wire(self) -> None:
            self.mixer_norm.dim = self.mlp_norm.dim = self.dim
            self.mixer.dim = self.mlp.dim = self.dim  # type: ignore[attr-defined]
            self.mixer.layer = self.layer  # type: ignore[attr-defined]

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.mixer: nn.Module = cfg.mixer.build()
        self.mixer_norm: LayerNorm = cfg.mixer_norm.build()
        self.mlp: nn.Module = cfg.mlp.build()
        self.mlp_norm: LayerNorm = cfg.mlp_norm.build()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.mixer_norm(x + self.mixer(x, context))
        out: Tensor = self.mlp_norm(x + self.mlp(x, context))
        return out
