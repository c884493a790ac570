"""A weight kept as 2-bit codes, four to a byte, with a half-precision scale per group of input channels.

The four levels are balanced: scale · (-1.5, -0.5, 0.5, 1.5). None of them is zero, which costs little: a level at zero would
leave only three to the rest. The other set, scale · (-2, -1, 0, 1), can be trained for comparison (`Learned`), and is not stored.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError
from orchard.nn.formats.base import Grouped, GroupedFormat, Packed, search

# Steps between zero and the value furthest from it: 1.5 keeps it, more cuts it off. With four levels
# that is nearly always worth it.
CUTS = (1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 5.0)


class Int2(Configurable, GroupedFormat):
    """Values too large for half precision become the largest there is; a group with a value that is not finite becomes
    not-a-number."""

    bits: ClassVar[int] = 2

    @config
    class Config(BaseConfig):
        group: int | None = 64
        """None: one scale a row."""
        levels: str = "balanced"

        def wire(self) -> None:
            if self.levels != "balanced":
                raise ConfigError(
                    f"no packed format keeps {self.levels!r} levels of two bits",
                    hint="train the balanced ones; the others are for comparison only",
                )

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def pack(self, weight: Tensor) -> Packed:
        group = self.group(weight.shape[-1])
        codes, scales = search(weight.float().unflatten(-1, (-1, group)), zero=1.5, bits=2, cuts=CUTS)
        return self.keep(Grouped(codes.flatten(-2), scales, None, self.bits, group))
