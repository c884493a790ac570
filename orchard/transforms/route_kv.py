"""Stochastic KV routing: a model learns to read any earlier layer's keys and values, so that later few of them need be kept.

R-CLA (arXiv 2604.22782). While the model learns, each layer reads in each forward pass, with a probability `p_borrow`, the keys
and values of an earlier layer, each as likely as the others, instead of its own; gradients flow into what is read, and the loss
is what it was. One draw a layer serves the whole batch and all heads, and is kept where blocks are computed again in the backward
pass. The first layer always reads its own. Afterwards any set of layers can be kept (`Retain`), chosen when memory is known.

What differs from the paper: a layer borrows only from layers that see as far back as it does and turn keys in the same way, for
no other could lend them to it from a store (in most models these are all). Layers that already read another's stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import nn

from orchard.core.batch import Batch
from orchard.core.config import REQUIRED
from orchard.core.errors import ConfigError
from orchard.nn.attention.attention import Attention
from orchard.nn.attention.borrow import Borrow
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.owners import attentions, readable
from orchard.transforms.reformat import learning_like

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class RouteKV(Transform):
    """`p_borrow`: how likely a layer reads another's keys and values; 0.5 from the first step on, 0.6 for a trained model."""

    p_borrow: float = 0.5

    learns: ClassVar[bool] = True
    same: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.p_borrow <= 1:
            raise ConfigError(f"p_borrow is {self.p_borrow}", hint="use a probability, from 0 to 1")

    def __call__(self, tree: Any) -> Any:
        """What is kept: the model as it was, for routing leaves nothing behind but other weights."""
        return settled(self.tree(tree))

    def tree(self, tree: Any) -> Any:
        """What learns. Of a tree whose vocabulary is not known yet, the tree as far as it goes."""
        tree = settled(tree)
        mixers, routed = attentions(tree), False
        for layer, mixer in enumerate(mixers):
            sources = readable(mixers, layer) if mixer.store.owner is None else []
            if sources:
                mixer.borrow = Borrow.Config(p_borrow=self.p_borrow, layers=tuple(sources))
                routed = True
        if not routed:
            raise ConfigError(
                f"no layer of {len(mixers)} has an earlier one whose keys and values it could read",
                hint="leave RouteKV out: it is for models of several layers that see equally far",
            )
        return tree if tree.vocab is REQUIRED else tree.complete()

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        made = learning_like(self._in(model, self.tree(model.config)), model)
        tell(1.0)
        return made

    def finish(self, model: M) -> M:
        return learning_like(self._in(model, settled(model.config)), model)


def settled(tree: Any) -> Any:
    """The tree of a model that has learnt: nothing in it is left to chance."""
    tree = tree.clone()
    for _, mixer in tree.find(Attention):
        mixer.borrow = None
    return tree if tree.vocab is REQUIRED else tree.complete()
