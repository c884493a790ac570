"""Slots kept as they come, in the model's own dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.cache.codecs.base import Codec, Parts, Role
from orchard.core.config import BaseConfig, Configurable, config


class Plain(Configurable, Codec):
    """No loss, no saving."""

    native = "plain"

    @config
    class Config(BaseConfig):
        pass

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def layout(self, dim: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"x": ((dim,), dtype)}

    def encode(self, x: Tensor, role: Role) -> Parts:
        return {"x": x}

    def decode(self, parts: Parts, role: Role, dtype: torch.dtype) -> Tensor:
        return parts["x"]
