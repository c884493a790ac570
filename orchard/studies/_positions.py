"""Eight position encodings that no module of Orchard knows: the `axlearn` study adds them from outside.

Each fits the socket `Attention.rotary` (an object called with queries or keys and their positions) or the socket
`Rotary.scaling`. They are here to be plugged in, not to be good: some are published, some are plain ideas.
Shapes: B sequences, H heads, T tokens, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.seeds import generator
from orchard.nn.attention import Rotary
from orchard.nn.attention.scaling import Scaling


class Truncated(Configurable, Scaling):
    """The slowest channels do not turn at all (p-RoPE, arXiv 2410.06205)."""

    @config
    class Config(BaseConfig):
        keep: float = 0.5

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        kept = torch.arange(len(frequencies)) < self.config.keep * len(frequencies)
        return frequencies * kept


class Neighbours(Rotary):
    """Channels are paired with their neighbour instead of half a head away (GPT-J)."""

    @config
    class Config(Rotary.Config):
        pass

    def __call__(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        apart = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        first, second = super().__call__(apart, positions, context).chunk(2, dim=-1)
        return torch.stack([first, second], dim=-1).flatten(-2)


class Grouped(Rotary):
    """Neighbouring tokens share a position (the far part of Self-Extend, arXiv 2401.01325)."""

    @config
    class Config(Rotary.Config):
        group: int = 4

    config: Config

    def __call__(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        return super().__call__(x, positions // self.config.group, context)


class Logarithmic(Rotary):
    """Positions grow like a logarithm."""

    @config
    class Config(Rotary.Config):
        stretch: float = 8.0

    config: Config

    def __call__(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        return super().__call__(x, positions.clamp_min(0).float().log1p() * self.config.stretch, context)


class Randomized(Rotary):
    """Positions are an increasing draw from a longer range (arXiv 2305.16843); here one draw, not one a step."""

    @config
    class Config(Rotary.Config):
        span: int = 256

    config: Config

    def __call__(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        draw = torch.randperm(self.config.span, generator=generator(0, "randomized"))[: self.config.span // 2]
        return super().__call__(x, draw.sort().values.to(x.device)[positions.clamp_min(0)], context)


class Axial(Rotary):
    """Positions as rows and columns: half of the channels turn by each."""

    @config
    class Config(Rotary.Config):
        width: int = 4

    config: Config

    def __call__(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        by_row = super().__call__(x, positions // self.config.width, context)
        by_column = super().__call__(x, positions % self.config.width, context)
        pair = torch.arange(x.shape[-1], device=x.device) % (x.shape[-1] // 2)
        return torch.where(pair % 2 == 1, by_column, by_row)


class Sinusoidal(Configurable):
    """Sines and cosines added to queries and keys (arXiv 1706.03762 adds them to the embeddings)."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        theta: float = 10_000.0

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def __call__(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        half = self.config.dim // 2
        angles = positions[..., None].float() / self.config.theta ** (torch.arange(half, device=x.device) / half)
        return x + torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)


class Learned(Configurable, nn.Module):
    """A trained vector for each position, added to queries and keys."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        length: int = 64

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.table = nn.Parameter(torch.empty(cfg.length, cfg.dim).normal_(std=0.02))

    def forward(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        added: Tensor = x + self.table[positions.clamp(0, self.config.length - 1)].to(x.dtype)
        return added
