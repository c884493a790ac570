"""A weight kept as one dense floating-point tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.nn.formats.base import Format, NativeWeight, Packed, PackedPart, native_plain


class Plain(Configurable, Format):
    """The format that is trained."""

    @config
    class Config(BaseConfig):
        pass

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        return {"weight": PackedPart(shape, trained=True)}

    def pack(self, weight: Tensor) -> Packed:
        return {"weight": weight}

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return packed["weight"].to(dtype)

    def matmul(self, x: Tensor, packed: Packed) -> Tensor:
        weight = packed["weight"]  # as it is: there is nothing to unpack again
        if not torch.is_autocast_enabled(x.device.type):  # which brings both to its dtype, each at most once
            weight = weight.to(x.dtype)
        return torch.nn.functional.linear(x, weight)

    def fake(self, weight: Tensor) -> Tensor:
        return weight

    def native(self, packed: Packed, shape: tuple[int, ...]) -> NativeWeight:
        weight = packed["weight"]
        return native_plain(weight, "f32" if weight.dtype == torch.float32 else "bf16")
