"""A base that becomes a mixture of experts before it is trained."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from orchard.core.config import BaseConfig, Configurable, config
from orchard.transforms.upcycle import Upcycle

M = TypeVar("M", bound=nn.Module)


class Upcycled(Configurable):
    """A function from model to model, as `Run.Config.after` takes it; the fields are those of `Upcycle`."""

    @config
    class Config(BaseConfig):
        experts: int = 8
        k: int = 2
        layers: str | list[int] = "all"
        parts: int = 1
        shared: float = 0.0
        noise: float = 0.0
        seed: int = 0

        def wire(self) -> None:
            self.transform()

        def transform(self) -> Upcycle:
            layers = self.layers if isinstance(self.layers, str) else tuple(self.layers)
            return Upcycle(self.experts, self.k, layers, self.parts, self.shared, self.noise, self.seed)

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def __call__(self, model: M) -> M:
        return self.config.transform().apply(model)
