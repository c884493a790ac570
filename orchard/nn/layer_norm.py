"""Layer normalisation (arXiv 1607.06450): mean and variance of a row, scaled and shifted; in float32 whatever the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config


class LayerNorm(Configurable, nn.Module):
    """(x - mean(x)) / std(x) · weight + bias."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        eps: float = 1e-12

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.weight = nn.Parameter(torch.ones(cfg.dim))
        self.bias = nn.Parameter(torch.zeros(cfg.dim))

    def forward(self, x: Tensor) -> Tensor:
        shape, weight, bias = (self.config.dim,), self.weight.float(), self.bias.float()
        return functional.layer_norm(x.float(), shape, weight, bias, self.config.eps).to(x.dtype)
