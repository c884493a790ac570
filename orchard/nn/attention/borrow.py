"""Keys and values of an earlier layer instead of a layer's own, by chance, while a model learns (arXiv 2604.22782).

A model that has learnt so can later be run with the keys and values of any few of its layers (`orchard.transforms.route_kv`).
Queries are always the layer's own. What is lent was turned by position, and normalised, by the layer that made it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import KVView
from orchard.core.errors import ConfigError


class Borrow(Configurable):
    """Draws from whom to read; once for a whole batch and all heads."""

    @config
    class Config(BaseConfig):
        p_borrow: float = 0.5
        """How likely another layer is read."""
        layers: tuple[int, ...] = REQUIRED
        """Those that may be, each as likely as the others."""

        def wire(self) -> None:
            if not 0 <= self.p_borrow <= 1:
                raise ConfigError(f"p_borrow is {self.p_borrow}", hint="use a probability, from 0 to 1")
            if not self.layers:
                raise ConfigError("there is no layer to borrow from", hint="name earlier layers, or set borrow to None")

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def draw(self) -> int | None:
        """The layer to read; None: the own one. By torch's numbers for the processor, which every step of training seeds."""
        chance, place = torch.rand(2, device="cpu").tolist()
        layers = self.config.layers
        return layers[int(place * len(layers))] if chance < self.config.p_borrow else None


def in_place_of(own: KVView, lent: KVView) -> KVView:
    """What is lent, for a layer whose own keys and values nobody may look at in this step. They get gradients of zero, and not
    none: processes that draw differently then still exchange the same ones, and no part of a block is left out of its backward
    pass."""
    return replace(lent, k=_Beside.apply(lent.k, own.k), v=_Beside.apply(lent.v, own.v))


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lent: Tensor, own: Tensor) -> Tensor:
        return lent.view_as(lent)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        return slope, torch.zeros_like(slope)
