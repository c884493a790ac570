"""Attention in which every token sees the whole of its sequence, those after it too: for models that read and do not write.

It keeps nothing between steps, so it has no store; positions are the model's own affair (BERT adds them to its embedding).
Shapes: B sequences, T tokens, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import field

from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.linear import Linear
from orchard.ops.attention import attend


def _biased() -> Linear.Config:
    return Linear.Config(bias=True)


class BidirectionalAttention(Configurable, nn.Module):
    """A mixer: nothing attends to padding, and everything to everything else."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        layer: int = REQUIRED
        heads: int = REQUIRED
        q: Linear.Config = field(default_factory=_biased)
        k: Linear.Config = field(default_factory=_biased)
        v: Linear.Config = field(default_factory=_biased)
        o: Linear.Config = field(default_factory=_biased)

        def wire(self) -> None:
            if self.heads < 1 or self.dim % self.heads:
                raise ConfigError(f"a width of {self.dim} has no {self.heads} equal heads", hint="use a divisor")
            for side in (self.q, self.k, self.v, self.o):
                side.in_dim = side.out_dim = self.dim

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.scale = (cfg.dim // cfg.heads) ** -0.5
        self.q: Linear = cfg.q.build()
        self.k: Linear = cfg.k.build()
        self.v: Linear = cfg.v.build()
        self.o: Linear = cfg.o.build()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        view = context.append(self.config.layer, self._heads(self.k(x)), self._heads(self.v(x)))
        seen = view.valid[:, :, None, :]  # [B, 1, 1, S]: the same for every query
        y = attend(self._heads(self.q(x)), view.k, view.v, seen, scale=self.scale)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H · D] → [B, H, T, D]."""
        return x.unflatten(-1, (self.config.heads, -1)).transpose(1, 2)
