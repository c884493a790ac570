"""Sparse upcycling (arXiv 2212.05055): a trained dense model becomes a mixture of experts that begins as what it was.

Every expert is a copy of the layer's MLP, or one of `parts` slices of its hidden units (finer experts, arXiv 2410.07524). The
router begins at random. Because the weights of the chosen experts add up to one, copies say together what the dense layer said,
whichever are chosen; slices do where `k` is a multiple of `parts`, for slices of one copy begin with the same score and are
chosen together (in float32: rounder scores may tie with those of another copy). So the model answers as before until it is
trained. `noise` gives that up, to let experts begin apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.core.seeds import generator
from orchard.nn.formats import Plain
from orchard.nn.linear import INIT_STD
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, TopK
from orchard.nn.tensors import carried, dense_tensor
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.reformat import learning_like

M = TypeVar("M", bound=nn.Module)
ALL, SECOND = "all", "second"
EVERY = (slice(None), slice(1, None, 2))


@dataclass(frozen=True)
class Upcycle(Transform):
    """`experts` in all, of which each token meets `k`. `layers`: "all", "second" (every second one, as in arXiv 2507.13575), or
    their numbers. `parts`: into how many slices the MLP is cut, of which each expert is one. `shared`: the share of the output
    that a copy of the MLP keeps for itself, which every token meets; 0: there is none. `noise`: what is added to experts, as a
    share of each matrix's own spread."""

    experts: int = 8
    k: int = 2
    layers: str | Sequence[int] = ALL
    parts: int = 1
    shared: float = 0.0
    noise: float = 0.0
    seed: int = 0

    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.experts < 2 or not 1 <= self.k <= self.experts:
            raise ConfigError(f"{self.k} of {self.experts} experts", hint="use 2 experts or more, and 1 ≤ k ≤ experts")
        if self.parts < 1 or self.experts % self.parts:
            raise ConfigError(f"{self.experts} experts of {self.parts} slices", hint="use a multiple of the slices")
        if not 0 <= self.shared < 1:
            raise ConfigError(f"a share of {self.shared!r} of the output", hint="use a number from 0 to below 1")
        if not 0 <= self.noise < float("inf"):
            raise ConfigError(f"noise of {self.noise!r}", hint="use 0, or a small number such as 0.01")
        if isinstance(self.layers, str) and self.layers not in (ALL, SECOND):
            raise ConfigError(f"layers {self.layers!r}", hint=f"use {ALL}, {SECOND}, or numbers of layers")

    def __call__(self, tree: Any) -> Any:
        tree = tree.complete()
        for layer in self.chosen(tree):
            block = tree.stack.layers[layer]
            block.mlp = self._mixture(block.mlp, f"stack.layers[{layer}].mlp")
        return tree.complete()

    def chosen(self, tree: Any) -> list[int]:
        """The numbers of the layers that become mixtures."""
        every = list(range(len(tree.stack.layers)))
        if isinstance(self.layers, str):
            found = every[EVERY[self.layers == SECOND]]
        else:
            found = sorted(set(self.layers))
            if any(layer not in every for layer in found):
                raise ConfigError(f"layers {found}", hint=f"the model has layers 0 to {len(every) - 1}")
        if not found:
            raise ConfigError("no layer would become a mixture", hint="name some layers")
        return found

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        old: Any = model.config
        layers = self.chosen(old.complete())
        begins: dict[str, Callable[[], Tensor]] = {}
        for layer in layers:
            begins |= self._begins(f"stack.layers.{layer}.mlp", model.get_submodule(f"stack.layers.{layer}.mlp"))
        made: M = carried(model, self(old), begins=begins)
        tell(1.0)
        return learning_like(made, model)

    def _mixture(self, mlp: Any, path: str) -> MoE.Config:
        if type(mlp) is not GatedMLP.Config:
            kind = mlp.builds.__name__
            raise UnsupportedPair(f"{path} is a {kind}, not a gated MLP", hint="choose other `layers`")
        for name in ("gate", "up", "down"):
            linear = getattr(mlp, name)
            if linear.bias:
                raise UnsupportedPair(f"{path}.{name} has a bias, and experts have none", hint="choose other `layers`")
            if type(linear.format) is not Plain.Config:
                packed = linear.format.builds.__name__
                raise UnsupportedPair(f"{path}.{name} is packed as {packed}", hint="upcycle first, and pack afterwards")
        if mlp.hidden_dim % self.parts:
            raise ConfigError(f"{path}: {mlp.hidden_dim} hidden units in {self.parts} slices", hint="use a divisor")
        router = TopK.Config(k=self.k, renormalize=True)
        made: MoE.Config = mlp.derive(
            MoE,
            hidden_dim=mlp.hidden_dim // self.parts,
            experts=self.experts,
            router=router,
            shared=mlp.clone() if self.shared else None,
        )
        return made

    # What the new tensors begin as ------------------------------------------------------------------------------------

    def _begins(self, path: str, mlp: nn.Module) -> dict[str, Callable[[], Tensor]]:
        begins: dict[str, Callable[[], Tensor]] = {f"{path}.router.gate.weight": partial(self._router, path, mlp)}
        for name in ("gate", "up", "down"):
            begins[f"{path}.{name}.weight"] = partial(self._experts, f"{path}.{name}", getattr(mlp, name))
            if self.shared:
                factor = self.shared if name == "down" else 1.0
                begins[f"{path}.shared.{name}.weight"] = partial(_scaled, getattr(mlp, name), factor)
        return begins

    def _experts(self, path: str, linear: nn.Module) -> Tensor:
        """[experts, out, in]: copy after copy, slice after slice."""
        weight = dense_tensor(linear, "weight").detach()
        down = path.endswith(".down")
        slices = weight.chunk(self.parts, 1 if down else 0)
        # Slices share out weights that add up to one, where each should count whole.
        made = torch.stack([*slices] * (self.experts // self.parts)) * ((1 - self.shared) * self.parts if down else 1.0)
        if self.noise:
            drawn = torch.randn(made.shape, generator=self._generator(path)).to(made)
            made = made + self.noise * made.float().std().to(made) * drawn
        return made

    def _router(self, path: str, mlp: Any) -> Tensor:
        """[experts, dim]: one score a copy."""
        rows = torch.randn(self.experts // self.parts, mlp.config.dim, generator=self._generator(path)) * INIT_STD
        return rows.repeat_interleave(self.parts, 0).to(dense_tensor(mlp.gate, "weight"))

    def _generator(self, path: str) -> torch.Generator:
        return generator(self.seed, path)


def _scaled(linear: nn.Module, factor: float) -> Tensor:
    return dense_tensor(linear, "weight").detach() * factor
