"""Recovery: low-rank side paths that make good for some of what compression took, beside weights that stay bit for bit.

As in Apple's on-device model (arXiv 2507.13575): the compressed base is frozen and side paths on its linear maps are trained, by
distillation for instance. They belong to the model afterwards (`kept`): adapters for tasks go beside them (`lora_kept`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError
from orchard.core.seeds import generator
from orchard.nn.formats.base import as_half
from orchard.nn.linear import Linear
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.lora import ALL_LINEAR, Lora, LoraLinear, freeze_base
from orchard.transforms.lora_kept import keep
from orchard.transforms.lora_linear import check
from orchard.transforms.lora_sides import found_in
from orchard.transforms.lora_twin import replaced
from orchard.transforms.ptq import NotFinite, holders

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Recover(Transform):
    """`apply` gives every target a side path and freezes all the rest; side paths are trained in float32 and kept in half
    precision. Maps that have a side path already (`Residual`) go on training that one, whatever its rank, and `notes` say so."""

    r: int = 16
    alpha: float = 32.0
    targets: str | Sequence[str] = ALL_LINEAR
    seed: int = 0
    notes: list[str] = field(default_factory=list, init=False, compare=False, repr=False)

    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self.r, self.alpha, 0.0)

    def __call__(self, tree: Any) -> Any:
        tree = tree.complete()
        fresh = self._fresh(tree)
        if fresh:
            tree = Lora(r=self.r, alpha=self.alpha, targets=fresh)(_let_go(tree))
        return tree.rewrite(LoraLinear, lambda node: node.clone(kept=True, dropout=0.0))

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        self.notes[:] = []
        tree: Any = model.config
        fresh = self._fresh(tree.complete())
        made = copy.deepcopy(model)
        for path, module in found_in(made):
            module.config = module.config.clone(kept=False)
            for name in ("lora_a", "lora_b"):
                setattr(module, name, nn.Parameter(getattr(module, name).detach().float()))
            if module.config.r != self.r:
                self.notes.append(f"{path}: has a side path of rank {module.config.r} already, which is trained on")
        made.config = _let_go(tree.complete())
        if fresh:
            made = Lora(r=self.r, alpha=self.alpha, targets=fresh).attach(made)
            self._begin(made, fresh)
        freeze_base(made)
        tell(1.0)
        return made

    def finish(self, model: M) -> M:
        """Side paths in half precision, as the model's own; every other tensor is the one that was there."""
        found = found_in(model)
        if not found:
            raise ConfigError("this model has no side paths", hint="call apply() first")
        for path, module in found:
            for name in ("lora_a", "lora_b"):
                if not getattr(module, name).isfinite().all():
                    raise NotFinite(
                        f"{path}.{name} has values that are no numbers",
                        hint="training diverged: go back to a checkpoint, and lower the learning rate",
                    )
        made = replaced(model, {path: _halved for path, _ in found})
        return made.requires_grad_(False)

    def _begin(self, model: nn.Module, fresh: Sequence[str]) -> None:
        """The same numbers every time, wherever the model is."""
        random = generator(self.seed, "recover")
        for path in fresh:
            parameter: Any = model.get_submodule(_plain(path)).lora_a
            bound = parameter.shape[1] ** -0.5
            parameter.data.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=random))

    def _fresh(self, tree: Any) -> tuple[str, ...]:
        """The paths of targets that have no side path yet, as trees write them. Experts take none."""
        named = holders(tree, self.targets)
        linear = {path for path, node in named.items() if isinstance(node, Linear.Config)}
        if not linear:
            raise ConfigError(f"nothing that {self.targets!r} names takes a side path", hint="name linear maps")
        return tuple(path for path, node in tree.walk() if _plain(path) in linear and type(node) is Linear.Config)


def _plain(path: str) -> str:
    return path.replace("[", ".").replace("]", "")


def _let_go(tree: Any) -> Any:
    """The tree with side paths that are trained: none belongs to the model until it is finished."""
    return tree.rewrite(LoraLinear, lambda node: node.clone(kept=False)) if tree.find(LoraLinear) else tree


def _halved(module: LoraLinear) -> nn.Module:
    def half(values: Tensor) -> Tensor:
        return as_half(values.float()).to(torch.float16)

    return keep(module, half)
