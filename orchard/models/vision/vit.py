"""The vision transformer (arXiv 2010.11929): an image as a row of squares, read whole, and scores of what it shows.

Shapes: B images, T tokens.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.attention.bidirectional import BidirectionalAttention
from orchard.nn.layer_norm import LayerNorm
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.nn.vision.patches import Patches


class ViT(Configurable, nn.Module):
    """Squares to tokens, the stack, a norm, one vector an image, a head. Layers are blocks of the same kind as everywhere, with
    attention in both directions; any of them may have a mixture of experts for an MLP."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        classes: int = REQUIRED
        patches: Patches.Config = field(default_factory=Patches.Config)
        stack: Stack.Config = field(default_factory=Stack.Config)
        norm: LayerNorm.Config = field(default_factory=lambda: LayerNorm.Config(eps=1e-6))
        pool: Literal["mean", "first"] = "mean"
        """What stands for an image: the mean of its tokens, or the one before them (`patches.first`)."""
        head: Linear.Config = field(default_factory=lambda: Linear.Config(bias=True))

        def wire(self) -> None:
            self.patches.dim = self.stack.dim = self.norm.dim = self.head.in_dim = self.dim
            self.head.out_dim = self.classes
            if self.pool not in ("mean", "first"):
                raise ConfigError(f"no pooling called {self.pool!r}", hint="one of mean, first")
            if self.pool == "first" and not self.patches.first:
                raise ConfigError("there is no first token to read", hint="set patches.first, or pool='mean'")

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.patches: Patches = cfg.patches.build()
        self.stack: Stack = cfg.stack.build()
        self.norm: LayerNorm = cfg.norm.build()
        self.head: Linear = cfg.head.build()

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in: the dtype of the norm, which no format packs."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def forward(self, images: Tensor, context: Context | None = None) -> Tensor:
        """Scores [B, classes] for images [B, C, H, W]."""
        return self.scores(self.hidden(images, context))

    def hidden(self, images: Tensor, context: Context | None = None) -> Tensor:
        """One vector an image, [B, dim]: what the head reads. What layers leave on the way is in the context."""
        x = self.patches(images.to(self.dtype))
        x = self.norm(self.stack(x, context or self.context(images)))
        return x[:, 0] if self.config.pool == "first" else x.mean(1)

    def scores(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out

    def context(self, images: Tensor, groups: Tensor | None = None) -> Context:
        """What goes through a pass over these images; `groups` [B] (or shares [B, groups]) is what routers are taught."""
        return image_context(len(images), self.config.patches.tokens, images.device, groups)


def image_context(
    count: int, tokens: int, device: torch.device | str | None = None, groups: Tensor | None = None
) -> Context:
    """A context for images, all of whose tokens are there."""
    positions = torch.arange(tokens, device=device).expand(count, tokens)
    return Context(positions=positions, labels=groups)


def small_vit(
    *,
    side: int,
    patch: int,
    classes: int,
    dim: int,
    layers: int,
    heads: int,
    hidden_dim: int,
    channels: int = 3,
) -> ViT.Config:
    """The tree of a ViT whose layers are all alike, with gated MLPs (which experts can take the place of) and no first token."""
    block = Block.Config(
        mixer_norm=LayerNorm.Config(eps=1e-6),
        mixer=BidirectionalAttention.Config(heads=heads),
        mlp_norm=LayerNorm.Config(eps=1e-6),
        mlp=GatedMLP.Config(hidden_dim=hidden_dim),
    )
    return ViT.Config(
        dim=dim,
        classes=classes,
        patches=Patches.Config(side=side, patch=patch, channels=channels),
        stack=Stack.Config(layers=[block.clone() for _ in range(layers)]),
    )
