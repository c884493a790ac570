"""Who says which hidden units a prompt needs: scores of all groups of all layers, from the tokens up to a place.

- `Reader`: a small language model of its own reads the prompt; two linear maps make scores of its last state (arXiv 2501.02086,
  where it has 302 million weights).
- `FirstLayers`: the model's own first layers read it, which choose nothing themselves (the "lightweight dense block" of
  AFM 3 Core Advanced, as far as its announcement tells).
- `Fixed`: the same scores for every prompt, learned: a static mask, to compare with.

Each is called as `(ids [B, T], at [B, n], decoder) → scores [B, n, layers, groups]`, and sees nothing after `at`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.attention.attention import Attention
from orchard.nn.linear import Embedding, Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack

Pool = Literal["last", "mean"]


class _Head(nn.Module):
    """Two linear maps, from a state to scores. `spread`: how far apart scores are at the beginning, in logits."""

    def __init__(self, dim: int, hidden: int, layers: int, groups: int, spread: float) -> None:
        super().__init__()
        self.shape = (layers, groups)
        self.wide: Linear = Linear.Config(in_dim=dim, out_dim=hidden, bias=True).build()
        self.out: Linear = Linear.Config(in_dim=hidden, out_dim=layers * groups, bias=True).build()
        if not self.out.weight.is_meta:  # type: ignore[union-attr]
            nn.init.normal_(self.wide.weight, std=dim**-0.5)  # type: ignore[arg-type]
            nn.init.normal_(self.out.weight, std=spread * (hidden / 2) ** -0.5)  # type: ignore[arg-type]

    def forward(self, state: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.relu(self.wide(state)))
        return scores.unflatten(-1, self.shape)


def _pooled(states: Tensor, at: Tensor, pool: Pool) -> Tensor:
    """States [B, T, d] as one for each place of `at` [B, n]: the state there, or the mean of all up to there."""
    if pool == "mean":
        places = torch.arange(1, states.shape[1] + 1, device=states.device, dtype=states.dtype)
        states = states.cumsum(1) / places[None, :, None]
    return states.gather(1, at[..., None].expand(*at.shape, states.shape[-1]))


class Reader(Configurable, nn.Module):
    """A small causal transformer with a head of scores."""

    @config
    class Config(BaseConfig):
        vocab: int = REQUIRED
        layers: int = REQUIRED
        groups: int = REQUIRED
        dim: int = 64
        depth: int = 2
        heads: int = 4
        hidden: int = 128
        """Width of the head."""
        pool: Pool = "last"
        spread: float = 1.0
        embedding: Embedding.Config = field(default_factory=Embedding.Config)
        stack: Stack.Config | None = None
        norm: RMSNorm.Config = field(default_factory=RMSNorm.Config)

        def wire(self) -> None:
            if self.dim % self.heads:
                raise ConfigError(f"a width of {self.dim} has no {self.heads} equal heads", hint="use a divisor")
            self.embedding.vocab, self.embedding.dim, self.norm.dim = self.vocab, self.dim, self.dim
            if self.stack is None:
                block = Block.Config(
                    mixer=Attention.Config(heads=self.heads, kv_heads=self.heads, head_dim=self.dim // self.heads),
                    mlp=GatedMLP.Config(hidden_dim=2 * self.dim),
                )
                self.stack = Stack.Config(layers=[block.clone() for _ in range(self.depth)])
            self.stack.dim = self.dim

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        assert cfg.stack is not None
        self.config = cfg
        self.embedding: Embedding = cfg.embedding.build()
        self.stack: Stack = cfg.stack.build()
        self.norm: RMSNorm = cfg.norm.build()
        self.head = _Head(cfg.dim, cfg.hidden, cfg.layers, cfg.groups, cfg.spread)

    def forward(self, ids: Tensor, at: Tensor, decoder: Any = None) -> Tensor:
        states = self.norm(self.stack(self.embedding(ids, self.norm.weight.dtype), Context.whole(ids)))
        scores: Tensor = self.head(_pooled(states, at, self.config.pool))
        return scores


class FirstLayers(Configurable, nn.Module):
    """A head of scores over the state after the decoder's own first layers."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        layers: int = REQUIRED
        groups: int = REQUIRED
        first: int = 1
        hidden: int = 128
        pool: Pool = "mean"
        spread: float = 1.0
        norm: RMSNorm.Config = field(default_factory=RMSNorm.Config)

        def wire(self) -> None:
            self.norm.dim = self.dim

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.norm: RMSNorm = cfg.norm.build()
        self.head = _Head(cfg.dim, cfg.hidden, cfg.layers, cfg.groups, cfg.spread)

    def forward(self, ids: Tensor, at: Tensor, decoder: Any) -> Tensor:
        x, context = decoder.embedding(ids, decoder.dtype), Context.whole(ids)
        for layer in decoder.stack.layers[: self.config.first]:
            x = layer(x, context)
        scores: Tensor = self.head(_pooled(self.norm(x), at, self.config.pool))
        return scores


class Fixed(Configurable, nn.Module):
    """Scores that are learned and do not depend on the prompt."""

    @config
    class Config(BaseConfig):
        layers: int = REQUIRED
        groups: int = REQUIRED
        spread: float = 1.0
        speed: float = 30.0
        """Scores are this times their parameter: a learning rate that suits weights is slow for masks."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.table = nn.Parameter(torch.empty(cfg.layers, cfg.groups))
        if not self.table.is_meta:
            nn.init.normal_(self.table, std=cfg.spread / cfg.speed)

    def forward(self, ids: Tensor, at: Tensor, decoder: Any = None) -> Tensor:
        scores = self.table * self.config.speed
        return scores.expand(*at.shape, *scores.shape)
