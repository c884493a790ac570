"""Experts for whole images: the last layers of a model that reads images get several MLPs, of which each image uses a few.

From Mobile V-MoEs (arXiv 2309.04354). One router a layer reads the mean token and decides once an image, so only the chosen
experts have to be loaded. It is taught super-classes (`ImageBatch.groups`, the loss `moe.router`); where none are known,
`orchard.models.vision.superclasses` finds some in what a dense model confuses.

Of a model that was trained, every expert begins as a copy of the MLP it replaces (sparse upcycling, arXiv 2212.05055): with
renormalised weights the new model computes what the old one did until experts part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.core.seeds import fold
from orchard.nn.linear import GroupedLinear, Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import ImageLevel, MoE
from orchard.nn.tensors import dense_tensor, fill, tensor_names
from orchard.transforms.base import Tell, Transform, silent

M = TypeVar("M", bound=nn.Module)
_MAPS = ("gate", "up", "down")


@dataclass(frozen=True)
class ImageExperts(Transform):
    """`last` layers get `experts` MLPs each, of which an image uses `k`."""

    experts: int = 10
    last: int = 2
    k: int = 1
    renormalize: bool = True
    """Weights of the chosen experts sum to one. A weight below one would shrink what a layer adds to its input."""
    through: bool = False
    """Routers learn from what their choice is worth, too, and not from labels alone (`ImageLevel`)."""
    seed: int = 0
    """Of the routers, which no trained model has."""

    heals: ClassVar[bool] = True
    """Whether the model should be trained afterwards: until then all experts are the same."""

    def __post_init__(self) -> None:
        if self.experts < 2:
            raise ConfigError(f"{self.experts} experts leave nothing to choose", hint="use at least two")
        if not 1 <= self.k <= self.experts:
            raise ConfigError(f"{self.k} of {self.experts} experts cannot be chosen", hint="use 1 ≤ k ≤ experts")
        if self.last < 1:
            raise ConfigError(f"experts in the last {self.last} layers", hint="use a whole number from 1")

    def __call__(self, tree: Any) -> Any:
        tree = tree.complete()
        blocks: list[Any] = tree.stack.layers
        if self.last > len(blocks):
            raise ConfigError(f"there are {len(blocks)} layers, not {self.last}", hint=f"use last=1 to {len(blocks)}")
        router = ImageLevel.Config(k=self.k, renormalize=self.renormalize, through=self.through)
        for layer in range(len(blocks) - self.last, len(blocks)):
            mlp = blocks[layer].mlp
            if not isinstance(mlp, GatedMLP.Config) or any(getattr(mlp, name).bias for name in _MAPS):
                raise UnsupportedPair(
                    f"layer {layer} has a {mlp.builds.__name__}, and experts are gated MLPs without biases",
                    hint="build the model with GatedMLP in these layers",
                )
            maps: dict[str, Any] = {name: GroupedLinear.Config(format=getattr(mlp, name).format) for name in _MAPS}
            settings = {"hidden_dim": mlp.hidden_dim, "experts": self.experts, "activation": mlp.activation}
            blocks[layer].mlp = MoE.Config(router=router.clone(), **settings, **maps)
        return tree.complete()  # layers that cannot have such a router are refused here, by name

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(fold(self.seed, "routers"))
            new: M = self(model.config).build()
        old = tensor_names(model)
        for name, (module, attribute) in tensor_names(new).items():
            if name in old:
                tensor = dense_tensor(*old[name]).detach().clone()
            elif isinstance(module, Linear):  # a router's: it begins by itself
                tensor = dense_tensor(module, attribute).detach()
            else:
                raise ConfigError(
                    f"the new tree has {name}, which the model lacks", hint="apply it to a model of its tree"
                )
            if isinstance(module, GroupedLinear):
                tensor = tensor.expand(self.experts, *tensor.shape).contiguous()
            like = next(model.parameters())
            fill(module, attribute, name, tensor, like.dtype, like.device)
        for parameter in new.parameters():
            parameter.requires_grad_(True)
        tell(1.0)
        return new.train(model.training)
