"""What quantising a trained model without training it has in common: which weights, into which formats, and what to say.

`Rtn` rounds each value to the nearest level, `Gptq` lets later columns make good for the errors of earlier ones, `Awq` gives
channels that matter a finer grid. All of them end in formats of the tree, and the packed model has exactly the values that
were computed.

A weight that a format cannot hold (its group does not divide the width) gets the nearest format that can, and `notes` say so.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError, OrchardError, UsageError
from orchard.nn.formats import Int2, Int4, Int8
from orchard.nn.linear import Embedding, GroupedLinear, Linear, Weight
from orchard.transforms.base import Transform
from orchard.transforms.lora import ALL_LINEAR
from orchard.transforms.lora_twin import dotted

HOLDERS = (Linear.Config, GroupedLinear.Config, Embedding.Config)
NARROWEST = 32
"""Groups that the native engine can read are multiples of this."""


class NotFinite(OrchardError):
    """A weight, or what goes into it, holds something that is no number."""

    code = "not-finite"


@dataclass(frozen=True)
class Quantise(Transform):
    """Weights go into formats of `bits` with a scale per `group` of inputs (None: one a row); `minimum` as in `Int4`.

    `targets` are "all-linear" (every linear map inside the layers, experts too, routers not) or names: the last part of a path
    ("q"), a longer ending ("mixer.q"), or a pattern of paths ("stack.layers[0].*"); "head" and "embedding" are taken by name
    only. `formats` says more exactly, by path, what single weights become; with no targets at all, nothing else changes.
    """

    bits: int = 4
    group: int | None = 64
    minimum: bool = False
    targets: str | Sequence[str] = ALL_LINEAR
    formats: Mapping[str, BaseConfig] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list, init=False, compare=False, repr=False)
    """What the last `apply` did otherwise than it was asked, and why."""

    def __post_init__(self) -> None:
        self.usual()

    def usual(self) -> BaseConfig:
        """The format of every target that `formats` does not name."""
        return integers(self.bits, self.group, self.minimum)

    def __call__(self, tree: Any) -> Any:
        return with_formats(tree, self.chosen(tree)[0])

    def chosen(self, tree: Any) -> tuple[dict[str, BaseConfig], list[str]]:
        """The format of each weight, by path, and in words where it is not the one that was asked for."""
        tree = tree.complete()
        asked = {path: self.usual() for path in holders(tree, self.targets)}
        asked |= {_known(tree, path): format for path, format in self.formats.items()}
        if not asked:
            raise UsageError(f"{type(self).__name__} has nothing to quantise", hint="name targets or formats")
        return fitted_all(tree, asked)


def integers(bits: int, group: int | None, minimum: bool = False) -> BaseConfig:
    """The format of so many bits."""
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise ConfigError(f"groups of {group!r} inputs", hint="use a whole number from 1, or None for whole rows")
    if minimum and bits != 4:
        raise ConfigError(f"{bits} bits have no minimum", hint="only 4 bits do")
    if bits == 2:
        return Int2.Config(group=group)
    if bits == 4:
        return Int4.Config(group=group, minimum=minimum)
    if bits == 8:
        return Int8.Config(group=group, half=True)
    raise ConfigError(f"no format has {bits!r} bits", hint="use 2, 4 or 8")


# Which weights --------------------------------------------------------------------------------------------------------


def holders(tree: Any, targets: str | Sequence[str]) -> dict[str, Any]:
    """The weights that targets name, by the path of their module (`stack.layers.3.mixer.q`), in the order of the tree."""
    nodes = {path: node for path, node in tree.walk() if isinstance(node, HOLDERS)}
    found: set[str] = set()
    for target in (targets,) if isinstance(targets, str) else tuple(targets):
        named = {path for path, node in nodes.items() if _names(target, path, node)}
        if not named:
            raise ConfigError(f"no weight is called {target!r}", hint="print the tree with describe()")
        found |= named
    return {plain(path): node for path, node in nodes.items() if path in found}


def plain(path: str) -> str:
    """A path of a config tree as modules are called."""
    return path.replace("[", ".").replace("]", "")


def _names(target: str, path: str, node: Any) -> bool:
    if target == ALL_LINEAR:
        return not isinstance(node, Embedding.Config) and path != "head" and ".router." not in path
    name = target.removesuffix("_proj")
    if name in (path, plain(path)) or path.endswith(f".{name}"):
        return True
    return fnmatch.fnmatchcase(path, target.replace("[", "[[]")) or fnmatch.fnmatchcase(plain(path), target)


def _known(tree: Any, path: str) -> str:
    """The path as modules are called, refused when no weight is there."""
    there = {plain(at) for at, node in tree.walk() if isinstance(node, HOLDERS)}
    if plain(path) not in there:
        raise ConfigError(f"no weight lies at {path}", hint="paths look like " + next(iter(sorted(there)), "…"))
    return plain(path)


# Which formats --------------------------------------------------------------------------------------------------------


def with_formats(tree: Any, formats: Mapping[str, BaseConfig]) -> Any:
    """The tree with other formats at some paths."""
    tree = tree.complete()
    for path, format in formats.items():
        tree.get(dotted(path)).format = format.clone()
    return tree


def fitted_all(tree: Any, asked: Mapping[str, BaseConfig]) -> tuple[dict[str, BaseConfig], list[str]]:
    """For each path the format asked for, or the nearest that can hold the weight there, with words about the latter."""
    chosen, notes = {}, []
    seen: dict[tuple[str, str], tuple[BaseConfig, str]] = {}
    for path, format in asked.items():
        node = tree.get(dotted(path))
        key = (repr(node.clone(format=format)), type(node).__qualname__)
        if key not in seen:  # layers are alike
            seen[key] = fitted(node, format)
        chosen[path], why = seen[key]
        if why:
            notes.append(f"{path}: {why}")
    return chosen, notes


def fitted(node: Any, format: BaseConfig) -> tuple[BaseConfig, str]:
    """The format, if the weight of this node can live in it; otherwise the nearest that it can live in, and why. Nearest are
    narrower groups of the same kind, then one group a row, then 8 bits."""
    reason = _obstacle(node, format)
    if reason is None:
        return format, ""
    for other in _nearest(node, format):
        if _obstacle(node, other) is None:
            return other, f"{reason}; {words(other)} instead"
    raise ConfigError(f"no format can hold this weight: {reason}", hint="leave it out of the targets")


def _nearest(node: Any, format: Any) -> Iterator[BaseConfig]:
    width = node.dim if isinstance(node, Embedding.Config) else node.in_dim
    if hasattr(format, "group"):
        asked = width if format.group is None else format.group
        for group in range(min(asked, width) // NARROWEST * NARROWEST, 0, -NARROWEST):
            if width % group == 0:
                yield format.clone(group=group)
        yield format.clone(group=width)
    yield Int8.Config(half=True)


def _obstacle(node: Any, format: BaseConfig) -> str | None:
    """Why the weight of a node cannot live in a format."""
    try:
        with torch.device("meta"):
            node.clone(format=format).build()
    except OrchardError as error:
        return error.message
    return None


def words(format: Any) -> str:
    """A format in a few words: Int4(group=64), Palette(bits=4, rows=16)."""
    fields = [f"{name}={getattr(format, name)!r}" for name in format.__dataclass_fields__]
    usual = {f"{name}={getattr(type(format)(), name)!r}" for name in format.__dataclass_fields__}
    told = [text for text in fields if text not in usual or text.startswith(("group=", "bits="))]
    return f"{format.builds.__name__}({', '.join(told)})" if told else str(format.builds.__name__)


# What they hold -------------------------------------------------------------------------------------------------------


def refuse_broken(model: nn.Module, paths: Sequence[str]) -> None:
    """Refuse weights that hold something that is no finite number: rounding would spread it over a whole group."""
    for path in paths:
        module = model.get_submodule(path)
        assert isinstance(module, Weight)
        if not module.dense().isfinite().all():
            raise NotFinite(f"{path} has weights that are not finite", hint="the model is damaged: load it again")
