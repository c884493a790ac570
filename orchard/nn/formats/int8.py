"""A weight kept as 8-bit integers with one scale per group of input channels (the whole row when `group` is None)."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError
from orchard.nn.formats.base import Format, Packed, PackedPart


class Int8(Configurable, Format):
    """Symmetric round-to-nearest."""

    @config
    class Config(BaseConfig):
        group: int | None = None

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        *lead, width = shape
        groups = width // self._group(width)
        return {
            "codes": PackedPart(shape, torch.int8),
            "scales": PackedPart((*lead, groups), torch.float32),
        }

    def pack(self, weight: Tensor) -> Packed:
        grouped = weight.float().unflatten(-1, (-1, self._group(weight.shape[-1])))
        scales = grouped.abs().amax(-1).clamp_min(1e-12) / 127
        codes = (grouped / scales[..., None]).round().to(torch.int8)
        return {"codes": codes.flatten(-2), "scales": scales}

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        codes, scales = packed["codes"], packed["scales"]
        grouped = codes.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
        return grouped.flatten(-2).to(dtype)

    def fake(self, weight: Tensor) -> Tensor:
        rounded = self.unpack(self.pack(weight.detach()), weight.dtype)
        return weight + (rounded - weight).detach()

    def _group(self, width: int) -> int:
        group = self.config.group or width
        if width % group:
            raise ConfigError(f"Int8 groups of {group} do not divide a width of {width}", hint="choose a divisor")
        return group
