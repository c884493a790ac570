"""Low-rank adaptation (arXiv 2106.09685): beside a frozen weight of any format, two small trained matrices.

`Lora` is the transform of a config tree; `attach` does the same to a model that is built, which then shares every tensor with it.
Names of parameters stay what they were (`stack.layers.0.mixer.q.weight`), with `lora_a`, `lora_b` and, for DoRA,
`lora_magnitude` beside them. What one adapted map computes is in `lora_linear`, adapters beside side paths of the model's own in
`lora_kept`, trained side paths and files in `lora_sides`, merging and going back in `lora_merge`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.linear import GroupedLinear, Linear
from orchard.transforms.lora_kept import KeptLinear, beside, beside_config, kept_config, refuse_twice
from orchard.transforms.lora_linear import LoraLinear as LoraLinear
from orchard.transforms.lora_linear import check
from orchard.transforms.lora_merge import lengths_of as lengths_of
from orchard.transforms.lora_merge import merged as merged
from orchard.transforms.lora_merge import merged_in as merged_in
from orchard.transforms.lora_merge import unmerged as unmerged
from orchard.transforms.lora_sides import Side as Side
from orchard.transforms.lora_sides import found_in
from orchard.transforms.lora_sides import freeze_base as freeze_base
from orchard.transforms.lora_sides import magnitudes_of as magnitudes_of
from orchard.transforms.lora_sides import sides_of as sides_of
from orchard.transforms.lora_sides import with_sides as with_sides
from orchard.transforms.lora_twin import dotted, replaced

ALL_LINEAR = "all-linear"
"""Every linear map inside the layers, except routers: they choose, and small changes make them choose otherwise."""
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Lora:
    """The transform: `Lora(r=16, alpha=32)(tree)`, or `.attach(model)`.

    `targets` are "all-linear", or names: the last part of a path ("q"; "q_proj" means the same), a longer ending
    ("mixer.q"), or a pattern of whole paths ("stack.layers[0].*"). `rslora` and `dora` as in `LoraLinear`.
    """

    r: int = 16
    alpha: float = 32.0
    targets: str | Sequence[str] = ALL_LINEAR
    rslora: bool = False
    dropout: float = 0.0
    dora: bool = False

    def __post_init__(self) -> None:
        check(self.r, self.alpha, self.dropout)

    def __call__(self, tree: BaseConfig) -> Any:
        """The tree with a side path at every target."""
        found = self._paths({path: node for path, node in tree.walk() if isinstance(node, _KINDS)})
        fields = self._fields()
        made = tree.rewrite(Linear, lambda node: beside_config(node, **fields), lambda path, node: path in found)
        return made.rewrite(LoraLinear, kept_config, _kept) if made.find(LoraLinear, _kept) else made

    def attach(self, model: M) -> M:
        """The same for a built model: a twin that shares all its tensors and has fresh side paths to train."""
        configs = {dotted(path): node.config for path, node in model.named_modules() if isinstance(node, _MODULES)}
        found = {path.replace("[", ".").replace("]", "") for path in self._paths(configs)}
        fields = self._fields()
        makers: dict[str, Callable[[Any], nn.Module]]
        makers = {path: lambda linear: beside(linear, **fields) for path in sorted(found)}
        for path, module in found_in(model):  # side paths that belong to the model are nothing that an adapter trains
            if path not in found and module.config.kept:
                makers[path] = KeptLinear.of
        return replaced(model, makers)

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("r", "alpha", "rslora", "dropout", "dora")}

    def _paths(self, nodes: Mapping[str, Any]) -> set[str]:
        """The paths that the targets name; each has to name something, and only what can take a side path."""
        asked = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        found: set[str] = set()
        for target in asked:
            if target == ALL_LINEAR:
                named = {
                    path
                    for path, node in nodes.items()
                    if isinstance(node, Linear.Config) and path != "head" and ".router." not in path
                }
            else:
                named = {path for path in nodes if _names(target, path)}
            experts = sorted(path for path in named if not isinstance(nodes[path], Linear.Config))
            if experts:
                raise UnsupportedPair(
                    f"{experts[0]} holds experts, which take no side path", hint="adapt other linear maps"
                )
            if not named:
                raise ConfigError(f"no linear map is called {target!r}", hint="print the tree with describe()")
            found |= named
        for path in sorted(found):
            refuse_twice(path, nodes[path])
        return found


_KINDS = (Linear.Config, GroupedLinear.Config)
_MODULES = (Linear, GroupedLinear)


def _kept(path: str, node: Any) -> bool:
    return bool(node.kept)


def _names(target: str, path: str) -> bool:
    plain = target.removesuffix("_proj")
    return path == plain or path.endswith(f".{plain}") or fnmatch.fnmatchcase(path, target.replace("[", "[[]"))
