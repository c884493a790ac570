"""A weight kept as 8-bit integers with one scale per group of input channels (the whole row when `group` is None)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.nn.formats.base import (
    Grouped,
    GroupedFormat,
    Packed,
    PackedPart,
    as_half,
    exact_half,
    finite_or_nan,
)

_SIGN = 0x80


class Int8(Configurable, GroupedFormat):
    """Symmetric round-to-nearest. With `half`, scales are float16, as in GGUF's Q8_0 and in the native engine."""

    bits: ClassVar[int] = 8

    @config
    class Config(BaseConfig):
        group: int | None = None
        half: bool = False

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        *lead, width = shape
        return {
            "codes": PackedPart(shape, torch.int8),
            "scales": PackedPart((*lead, width // self.group(width)), self._scale_dtype),
        }

    def pack(self, weight: Tensor) -> Packed:
        values = weight.float().unflatten(-1, (-1, self.group(weight.shape[-1])))
        if self.config.half:
            values = finite_or_nan(values)
            scales = as_half(values.abs().amax(-1) / 127)
            # A scale of zero, and one that was rounded down near zero, are why this is not simply rounded.
            steps = (values / scales.float()[..., None]).nan_to_num(nan=0.0).clamp(-127, 127)
        else:
            scales = values.abs().amax(-1).clamp_min(1e-12) / 127
            steps = values / scales[..., None]
        return {"codes": steps.round().to(torch.int8).flatten(-2), "scales": scales}

    def values(self, packed: Packed) -> Tensor:
        codes, scales = packed["codes"], packed["scales"]
        return codes.float().unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None]).flatten(-2)

    def keep(self, grouped: Grouped) -> Packed:
        codes = (grouped.codes ^ _SIGN).view(torch.int8)
        return {"codes": codes, "scales": grouped.scales.to(self._scale_dtype)}

    def grouped(self, packed: Packed, shape: tuple[int, ...]) -> Grouped:
        codes = packed["codes"].view(torch.uint8) ^ _SIGN
        return Grouped(codes, exact_half(packed["scales"]), None, self.bits, self.group(shape[-1]))

    @property
    def _scale_dtype(self) -> torch.dtype:
        return torch.float16 if self.config.half else torch.float32
