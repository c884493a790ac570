"""An image becomes tokens: it is cut into squares, and one linear map makes a vector of each (ViT, arXiv 2010.11929).

Shapes: B images, C channels, H × W pixels, P pixels a side of a square, T = (H / P) · (W / P) squares.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import ConfigError, UsageError
from orchard.nn.linear import INIT_STD, Linear


class Patches(Configurable, nn.Module):
    """[B, C, H, W] → [B, T, dim]: squares row by row, plus a learned vector for each place; with `first`, a learned token before
    them that belongs to no place of the image."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        side: int = REQUIRED
        """Pixels a side of the image."""
        patch: int = REQUIRED
        """Pixels a side of a square."""
        channels: int = 3
        first: bool = False
        map: Linear.Config = field(default_factory=lambda: Linear.Config(bias=True))

        def wire(self) -> None:
            if self.patch < 1 or self.side < 1 or self.side % self.patch:
                raise ConfigError(
                    f"an image of {self.side} pixels a side has no whole squares of {self.patch}", hint="use a divisor"
                )
            self.map.in_dim, self.map.out_dim = self.channels * self.patch**2, self.dim

        @property
        def tokens(self) -> int:
            return (self.side // self.patch) ** 2 + self.first

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.map: Linear = cfg.map.build()
        self.places = nn.Parameter(torch.empty(cfg.tokens, cfg.dim).normal_(std=INIT_STD))
        self.first = nn.Parameter(torch.empty(cfg.dim).normal_(std=INIT_STD)) if cfg.first else None

    def forward(self, images: Tensor) -> Tensor:
        cfg = self.config
        wanted = (cfg.channels, cfg.side, cfg.side)
        if images.dim() != 4 or tuple(images.shape[1:]) != wanted:
            raise UsageError(
                f"images of shape {tuple(images.shape)} where [count, {', '.join(map(str, wanted))}] belong",
                hint="resize them, channels first",
            )
        x: Tensor = self.map(cut(images, cfg.patch))
        if self.first is not None:
            x = torch.cat([self.first.to(x.dtype).expand(len(x), 1, -1), x], 1)
        return x + self.places.to(x.dtype)


def cut(images: Tensor, patch: int) -> Tensor:
    """Squares [B, T, C · P · P] of images [B, C, H, W], numbers in the order of a convolution's weight."""
    rows = images.unflatten(2, (-1, patch)).unflatten(4, (-1, patch))  # [B, C, H/P, P, W/P, P]
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
