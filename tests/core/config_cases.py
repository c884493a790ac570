"""Parts to build trees of: what tests of configs share."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config


class Leaf(Configurable):
    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        width: int = 4
        name: str = "leaf"

    def __init__(self, cfg: Config, *, device: str = "here") -> None:
        self.config = cfg
        self.device = device


class Wide(Configurable):
    """Shares dim, width and name with Leaf, and has one field of its own."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        width: int = 8
        name: str = "wide"
        extra: int = 1

    def __init__(self, cfg: Config) -> None:
        self.config = cfg


class Wrapper(Configurable):
    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        inner: BaseConfig = REQUIRED

        def wire(self) -> None:
            self.inner.dim = self.dim  # type: ignore[attr-defined]

    def __init__(self, cfg: Config) -> None:
        self.config = cfg
        self.inner = cfg.inner.build()


class Node(Configurable):
    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        half: int = REQUIRED
        left: BaseConfig = field(default_factory=Leaf.Config)
        right: BaseConfig | None = None
        layers: list[BaseConfig] = field(default_factory=list)
        named: dict[str, BaseConfig] = field(default_factory=dict)
        pair: tuple[Any, ...] = ()

        def wire(self) -> None:
            self.half = self.dim // 2
            for child in (self.left, self.right, *self.layers, *self.named.values(), *self.pair):
                if isinstance(child, BaseConfig):
                    child.dim = self.half  # type: ignore[attr-defined]

    def __init__(self, cfg: Config) -> None:
        self.config = cfg
        self.left = cfg.left.build()
        self.layers = [layer.build() for layer in cfg.layers]


def tree() -> Any:
    return Node.Config(
        layers=[Leaf.Config(width=i) for i in range(3)],
        named={"a": Leaf.Config(name="in a dict")},
        pair=(Leaf.Config(), 7),
        right=Node.Config(layers=[Leaf.Config()]),
    )
