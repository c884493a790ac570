"""A base that routes keys and values while it is trained, or keeps those of some layers only."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from orchard.core.config import BaseConfig, Configurable, config
from orchard.transforms.retain import Retain
from orchard.transforms.route_kv import RouteKV

M = TypeVar("M", bound=nn.Module)


class Routed(Configurable):
    """A function from tree to tree, as `Run.Config.rewrites` takes it. What is written in the end knows nothing of it."""

    @config
    class Config(BaseConfig):
        p_borrow: float = 0.6

        def wire(self) -> None:
            RouteKV(self.p_borrow)

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def __call__(self, tree: Any) -> Any:
        return RouteKV(self.config.p_borrow).tree(tree)


class Retained(Configurable):
    """A function from model to model, as `Run.Config.after` takes it; the fields are those of `Retain`."""

    @config
    class Config(BaseConfig):
        layers: list[int] | None = None
        every: int | None = None
        share: float | None = None

        def wire(self) -> None:
            self.transform()

        def transform(self) -> Retain:
            return Retain(None if self.layers is None else tuple(self.layers), self.every, self.share)

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def __call__(self, model: M) -> M:
        return self.config.transform().apply(model)
