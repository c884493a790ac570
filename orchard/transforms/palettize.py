"""Palettes: every 16 rows of a weight share a small table of values, found by k-means (arXiv 2407.21075), 4 or 2 bits a
weight.

    Palettize(bits=4, two=("mlp.up",)).apply(model, texts)

What a value's error costs depends on what it is multiplied with and on what the result is used for, so errors are
weighed: by the mean square of the input of their column ("inputs", one pass forward), or by the squared gradient of the
loss ("gradients", forward and back). Both are means over `texts`; k-means then minimises the weighted square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError, UsageError
from orchard.nn.formats import Packed, Palette
from orchard.transforms.base import M, Tell, Transform, _tree, silent
from orchard.transforms.inputs import mean_squares
from orchard.transforms.lora import ALL_LINEAR
from orchard.transforms.lora_twin import dotted
from orchard.transforms.palettize_gradients import squared_gradients
from orchard.transforms.ptq import NotFinite, fitted_all, holders, refuse_broken, with_formats
from orchard.transforms.reformat import Pack, repacked

MEASURES = ("inputs", "gradients")


@dataclass(frozen=True)
class Palettize(Transform):
    """Weights that `targets` name get palettes of `bits`, those that `two` names get palettes of 2 bits; names as in `Rtn`.

    A weight that no palette can hold (its rows are no whole bytes) gets the nearest format that can, and `notes` say so.
    """

    bits: int = 4
    two: Sequence[str] = ()
    rows: int = 16
    weighted: bool = True
    targets: str | Sequence[str] = ALL_LINEAR
    by: str = "inputs"
    """What errors are weighed by where they are: "inputs" or "gradients"."""
    notes: list[str] = field(default_factory=list, init=False, compare=False, repr=False)
    """What the last `apply` did otherwise than it was asked, and why."""

    def __post_init__(self) -> None:
        Palette.Config(bits=self.bits, rows=self.rows).build()
        if self.by not in MEASURES:
            raise ConfigError(f"errors weighed by {self.by!r}", hint=f"use one of {', '.join(MEASURES)}")

    @property
    def looks(self) -> bool:  # type: ignore[override]
        return self.weighted

    def __call__(self, tree: Any) -> Any:
        return with_formats(tree, self.chosen(tree)[0])

    def chosen(self, tree: Any) -> tuple[dict[str, BaseConfig], list[str]]:
        """The format of each weight, by path, and in words where it is no palette."""
        tree = tree.complete()
        asked: dict[str, BaseConfig]
        asked = {path: Palette.Config(bits=self.bits, rows=self.rows) for path in holders(tree, self.targets)}
        asked |= {path: Palette.Config(bits=2, rows=self.rows) for path in holders(tree, tuple(self.two))}
        if not asked:
            raise UsageError("Palettize has no targets", hint="name some, or leave them out for all linear maps")
        return fitted_all(tree, asked)

    def bits_per_weight(self, tree: Any) -> float:
        """Of the weights that it packs, tables counted."""
        return bits_per_weight(self(tree), self.chosen(tree)[0])

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        formats, notes = self.chosen(_tree(model))
        self.notes[:] = notes
        refuse_broken(model, list(formats))
        importance = input_squares(self, model, list(formats), texts, self.by) if self.weighted else {}
        if self.weighted:
            tell(0.5)
        share = (0.5 if self.weighted else 1.0) / len(formats)
        return repacked(model, {path: _packer(formats[path], importance.get(path), tell, share) for path in formats})


def input_squares(
    transform: Any, model: Any, paths: Sequence[str], texts: Sequence[Batch], by: str = "inputs"
) -> dict[str, Tensor]:
    """How much errors count, by path: [in], or the weight's shape by gradients. What no text reached counts alike
    everywhere, and is named in the transform's notes."""
    name = type(transform).__name__
    if not any(batch.tokens for batch in texts):
        raise UsageError(f"{name} weighs errors by texts, and has none", hint="give texts, or weighted=False")
    found = mean_squares(model, paths, texts) if by == "inputs" else squared_gradients(model, paths, texts)
    for path in paths:
        if path in found and not found[path].isfinite().all():
            raise NotFinite(f"{by} of {path} are not finite", hint="the model is damaged, or a text is")
        if path not in found or not found[path].any():
            transform.notes.append(f"{path}: no text says what its errors cost; all count alike")
    return found


def bits_per_weight(tree: Any, paths: Sequence[str] | Mapping[str, Any]) -> float:
    """Of the weights at some paths of a completed tree, with everything that their formats keep."""
    size = count = 0
    with torch.device("meta"):
        for path in paths:
            module = tree.get(dotted(path)).build()
            size += module.format.nbytes(module.shape, torch.bfloat16)
            count += torch.Size(module.shape).numel()
    return 8 * size / count


def _packer(format: BaseConfig, importance: Tensor | None, tell: Tell, share: float) -> Pack:
    def pack(module: Any) -> tuple[BaseConfig, Packed]:
        built = format.build()
        # Experts of one map are weighed alike: inputs are known for all of them together.
        dense = module.dense().detach()
        packed = built.pack(dense, importance) if isinstance(built, Palette) else built.pack(dense)
        tell(share)
        return format, packed

    return pack
