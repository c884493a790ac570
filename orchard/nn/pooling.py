"""From a vector a token to one vector a sequence, of length 1."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError

KINDS = ("mean", "first", "max")


class Pooling(Configurable, nn.Module):
    """The mean of a sequence's tokens, its first one ([CLS]), or the largest number of each channel; padding never counts."""

    @config
    class Config(BaseConfig):
        how: Literal["mean", "first", "max"] = "mean"

        def wire(self) -> None:
            if self.how not in KINDS:
                raise ConfigError(f"no pooling called {self.how!r}", hint="one of " + ", ".join(KINDS))

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg

    def forward(self, hidden: Tensor, valid: Tensor) -> Tensor:
        """float32 [B, dim] for hidden [B, T, dim] and valid [B, T], which marks padding False."""
        wide, kept = hidden.float(), valid[:, :, None]
        if self.config.how == "first":
            pooled = wide[:, 0]
        elif self.config.how == "max":
            pooled = wide.masked_fill(~kept, float("-inf")).amax(1)
        else:
            pooled = (wide * kept).sum(1) / kept.sum(1)
        return functional.normalize(pooled, dim=-1)
