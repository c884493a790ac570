"""Round to nearest: every value becomes the nearest level of its group, whose scale the format searches for itself.

Looks at no text and takes seconds. It is the start of every other method, and what those are measured against. With a format of
its own (`Rtn(format=Palette.Config(bits=4))`) it packs into anything a tree can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.transforms.base import M, Tell, _tree, silent
from orchard.transforms.ptq import Quantise, refuse_broken
from orchard.transforms.reformat import learning_like


@dataclass(frozen=True)
class Rtn(Quantise):
    """The transform: `Rtn(bits=4, group=64).apply(model)`."""

    format: BaseConfig | None = None
    """A format of any other kind, in place of bits, group and minimum."""

    def usual(self) -> BaseConfig:
        return super().usual() if self.format is None else self.format

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        formats, notes = self.chosen(_tree(model))
        self.notes[:] = notes
        refuse_broken(model, list(formats))
        made = learning_like(self._in(model, self(_tree(model))), model)
        tell(1.0)
        return made
