"""Slots kept as 8-bit integers with one scale per head and position: half the bytes of bf16, a quarter of fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.cache.codecs.base import Codec, Parts, Role
from orchard.core.config import BaseConfig, Configurable, config


class Int8(Configurable, Codec):
    """Symmetric, scaled by the largest magnitude of the head's channels."""

    native = "int8"

    @config
    class Config(BaseConfig):
        pass

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def layout(self, dim: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"codes": ((dim,), torch.int8), "scale": ((1,), torch.float32)}

    def encode(self, x: Tensor, role: Role) -> Parts:
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        return {"codes": (x / scale).round().to(torch.int8), "scale": scale}

    def decode(self, parts: Parts, role: Role, dtype: torch.dtype) -> Tensor:
        return (parts["codes"].float() * parts["scale"]).to(dtype)
