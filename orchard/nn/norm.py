"""Root-mean-square normalisation (arXiv 1910.07467), computed in float32 whatever the input: of rows, or of heads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.ops.plan.builder import Builder, Value


class RMSNorm(Configurable, nn.Module):
    """x / rms(x) · (weight + offset). Gemma stores its weights around zero: offset 1."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        eps: float = 1e-6
        offset: float = 0.0
        cast_first: bool = True
        """Cast back to the input's dtype before scaling (Llama) rather than after (Gemma, OLMo 2); equal in float32."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.weight = nn.Parameter(torch.full((cfg.dim,), 1.0 - cfg.offset))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.eps)
        weight = self.weight.float() + self.config.offset if self.config.offset else self.weight
        if self.config.cast_first:
            return weight.to(x.dtype) * wide.to(x.dtype)
        return (weight.float() * wide).to(x.dtype)

    def scales(self) -> np.ndarray:
        """What a normalised row is multiplied with, float32: the weight with its offset."""
        weight: np.ndarray = (self.weight.detach().float() + self.config.offset).cpu().numpy()
        return weight

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        return builder.norm(x, self.scales(), self.config.eps, path=path)


class HeadNorm(Configurable, nn.Module):
    """Normalises each head [B, H, T, D] by itself, with gains of its own: one vector of H · D numbers for all of them."""

    @config
    class Config(BaseConfig):
        heads: int = REQUIRED
        dim: int = REQUIRED
        """Of all heads together."""
        eps: float = 1e-6

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.weight = nn.Parameter(torch.ones(cfg.dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.eps)
        return wide * self.weight.float().view(self.config.heads, 1, -1)
