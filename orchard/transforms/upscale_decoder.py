"""Linear maps that read a part of their input, and the norm that puts channels in an order in which such parts are runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchard.core.config import REQUIRED, config
from orchard.core.errors import ConfigError
from orchard.nn.formats import Plain
from orchard.nn.formats.base import NotLowered, native_plain
from orchard.nn.linear import Linear
from orchard.nn.lowering import floats
from orchard.nn.norm import RMSNorm
from orchard.ops.plan.builder import Builder, Value


class PartLinear(Linear):
    """y = W x[part] + b. The part is a run of channels, which is a view, or (`index`) any channels, which is a copy."""

    @config
    class Config(Linear.Config):
        whole: int = REQUIRED
        """How wide the input is."""
        start: int = 0
        length: int = REQUIRED
        index: tuple[int, ...] = ()
        """Empty: the run of `length` channels from `start` on."""

        def wire(self) -> None:
            """The parent set `in_dim` to all that there is to read; the weight has columns for a part of it."""
            self.in_dim = self.length
            places = self.index or (self.start, self.start + self.length - 1)
            if (
                self.length < 1
                or min(places) < 0
                or max(places) >= self.whole
                or len(self.index) not in (0, self.length)
            ):
                raise ConfigError(f"no part of {self.length} channels of {self.whole}", hint="set start and length")

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.config: Any = cfg
        self._places: Tensor | None = None

    def part(self, x: Tensor) -> Tensor:
        if not self.config.index:
            return x.narrow(-1, self.config.start, self.config.length)
        if self._places is None or self._places.device != x.device:
            self._places = torch.tensor(self.config.index, device=x.device)
        return x.index_select(-1, self._places)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.config.whole:
            raise ConfigError(
                f"an input of {x.shape[-1]} channels instead of {self.config.whole}", hint="check the norm"
            )
        return super().forward(self.part(x))

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        """Natively as a map of the whole input, with zeros: right, and no smaller. Packed weights have no such form."""
        if not isinstance(self.format, Plain):
            raise NotLowered(f"a part of the input with a weight in format {type(self.format).__name__}")
        cfg, weight = self.config, self.packed()["weight"].detach()
        spread = weight.new_zeros(cfg.out_dim, cfg.whole)
        spread[:, list(cfg.index) or slice(cfg.start, cfg.start + cfg.length)] = weight
        native = native_plain(spread, "f32" if weight.dtype == torch.float32 else "bf16")
        return builder.linear(x, native, floats(self.bias), path=path)


class OrderedNorm(RMSNorm):
    """A norm that writes its channels in another order. Its weight stays in the old one. It is not lowered: natively it runs in
    torch, as a step of its own."""

    @config
    class Config(RMSNorm.Config):
        order: tuple[int, ...] = REQUIRED

        def wire(self) -> None:
            if sorted(self.order) != list(range(self.dim)):
                raise ConfigError(
                    f"the order of a norm names not each of {self.dim} channels once", hint="permute them"
                )

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.config: Any = cfg
        self._places: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self._places is None or self._places.device != x.device:
            self._places = torch.tensor(self.config.order, device=x.device)
        return y.index_select(-1, self._places)
