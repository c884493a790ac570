"""What every compression has in common: a rewrite of a config tree, and a model that goes along with it.

    smaller = transform(tree)                                 # what it will be: cost it, show it, build it
    model = transform.apply(model, texts)                     # weights go along; local fits look at some batches
    train(model)                                              # only where `learns`: whoever calls brings the loop
    model = transform.finish(model)                           # what is kept: packed, nothing left to train

A transform knows modules and formats, never files, tokenizers or the trainer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from torch import nn

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.nn.tensors import carried

M = TypeVar("M", bound=nn.Module)
Tell = Callable[[float], None]
"""Progress: how much more of the work, as a share, is done."""


def silent(_: float) -> None: ...


class Transform(ABC):
    """A compression. It holds settings and no weights, so one object serves many models.

    Trees are completed (`complete()`): every dimension is there. `texts` are batches of the kind of text the model is meant for,
    a few thousand tokens; a transform that `looks` refuses an empty sequence.
    """

    looks: ClassVar[bool] = False
    """Whether `apply` needs texts."""
    learns: ClassVar[bool] = False
    """Whether the model is to be trained between `apply` and `finish`."""
    same: ClassVar[bool] = False
    """Whether the finished model is made of the same parts, and only what it learnt is different."""

    @abstractmethod
    def __call__(self, tree: Any) -> Any:
        """The tree of the finished model."""

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        """A new model; the one given stays as it was."""
        return self._in(model, self(_tree(model)))

    def finish(self, model: M) -> M:
        """The model as it is kept."""
        return model

    @staticmethod
    def _in(model: M, tree: BaseConfig) -> M:
        made: M = carried(model, tree)
        return made


def _tree(model: nn.Module) -> Any:
    tree: Any = model.config
    return tree.complete()
