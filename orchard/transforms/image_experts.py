"""Experts for whole images: the last layers of a model that reads images get several MLPs, of which each image uses a few.

From Mobile V-MoEs (arXiv 2309.04354). One router reads the mean token that enters the first of these layers and decides once an
image, for all of them, so only the chosen experts have to be loaded. It is taught super-classes (`ImageBatch.groups`, the loss
`moe.router`); where none are known, `orchard.models.vision.superclasses` finds some in what a dense model confuses.

Of a model that was trained, every expert begins as a copy of the MLP it replaces (`Upcycle`): with renormalised weights the new
model computes what the old one did until experts part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import nn

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError
from orchard.nn.moe import Follow, ImageLevel
from orchard.nn.tensors import carried
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.reformat import learning_like
from orchard.transforms.upcycle import Upcycle

M = TypeVar("M", bound=nn.Module)


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
    single: bool = True
    """The first of these layers decides for all, as published; or each has a router of its own."""
    seed: int = 0
    """Of the routers, which no trained model has."""

    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ConfigError(f"experts in the last {self.last} layers", hint="use a whole number from 1")
        self._copies(range(self.last))  # which says what is wrong with the numbers of experts

    def __call__(self, tree: Any) -> Any:
        layers = self._layers(tree)
        made = self._copies(layers)(tree)
        decides = ImageLevel.Config(k=self.k, renormalize=self.renormalize, through=self.through)
        for layer in layers:
            first = layer == layers[0] or not self.single
            made.stack.layers[layer].mlp.router = decides.clone() if first else Follow.Config(k=self.k)
        return made.complete()  # layers that cannot have such a router are refused here, by name

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        old: Any = model.config
        copies = self._copies(self._layers(old)).apply(model)
        made: M = carried(copies, self(old))
        tell(1.0)
        return learning_like(made, copies)

    def _copies(self, layers: Sequence[int]) -> Upcycle:
        return Upcycle(experts=self.experts, k=self.k, layers=tuple(layers), seed=self.seed)

    def _layers(self, tree: Any) -> range:
        count = len(tree.stack.layers)
        if self.last > count:
            raise ConfigError(f"there are {count} layers, not {self.last}", hint=f"use last=1 to last={count}")
        return range(count - self.last, count)
