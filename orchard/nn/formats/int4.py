"""A weight kept as 4-bit codes, two to a byte, with a half-precision scale per group of input channels.

Without `minimum` the sixteen levels lie around zero: scale · (code - 8). With it they lie between the least and the largest
value of a group: scale · code + minimum. GGUF's Q4_0 and Q4_1 are these two, in groups of 32.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.nn.formats.base import Grouped, GroupedFormat, Packed, as_half, finite_or_nan, nearest, search

# Steps between zero and the value furthest from it. Up to 8 nothing is cut off; further on the largest values are, and the
# others gain. More candidates lower the squared error of normally distributed weights by less than 2 %.
CUTS = (7.0, 7.5, 8.0, 8.5, 9.0)


class Int4(Configurable, GroupedFormat):
    """Values too large for half precision become the largest there is; a group with a value that is not finite becomes
    not-a-number."""

    bits: ClassVar[int] = 4

    @config
    class Config(BaseConfig):
        group: int | None = 64
        """None: one scale a row."""
        minimum: bool = False

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def pack(self, weight: Tensor) -> Packed:
        group = self.group(weight.shape[-1])
        values = weight.float().unflatten(-1, (-1, group))
        minima = None
        if self.config.minimum:
            codes, scales, minima = _between(values)
        else:
            codes, scales = search(values, zero=8.0, bits=4, cuts=CUTS)
        return self.keep(Grouped(codes.flatten(-2), scales, minima, self.bits, group))

    @property
    def has_minimum(self) -> bool:
        return bool(self.config.minimum)


def _between(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and minima of values [..., groups, group]. The scale is measured from the minimum as it is stored."""
    values = finite_or_nan(values)
    minima = as_half(values.amin(-1))
    least = minima.float()
    scales = as_half((values.amax(-1) - least).clamp_min(0) / 15)
    return nearest(values - least[..., None], scales, 0.0, 4), scales, minima
