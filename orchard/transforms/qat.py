"""Quantisation-aware training: weights of two, four or eight bits that are trained as such, scales with them.

    qat = Qat(bits=2, embedding=4, bits_of={"stack.layers.0.mixer.v": 4})
    student = qat.apply(model, texts)                         # `Learned` formats, scales by a search over clips
    train(student)                                            # distillation, whoever calls brings the loop
    model = qat.finish(student)                               # Int2, Int4, Int8: the same values to the last bit

What is trained has names that a recipe can tell apart: `weight_names` (no weight decay: a weight near the border of two codes
must not be pulled over it) and `scale_names` (`….log_scale`: no decay either, and a learning rate of their own).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError
from orchard.nn.formats import Learned, Packed
from orchard.nn.linear import Embedding, Weight
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.inputs import mean_squares
from orchard.transforms.lora import ALL_LINEAR
from orchard.transforms.ptq import NotFinite, fitted_all, holders, integers, plain, refuse_broken, with_formats
from orchard.transforms.reformat import Pack, repacked

M = TypeVar("M", bound=nn.Module)
FLOOR = 1e-3
"""Of the mean importance: an input that was silent on some texts may speak on others."""
HEAD = "head"


@dataclass(frozen=True)
class Qat(Transform):
    """`targets` as in `ptq`. `embedding`: bits of the table and of a head of its own; None: they stay as they are. `bits_of`:
    other bits for single weights, by path (None: that one stays as it is). Groups that do not divide a width become narrower
    ones, or whole rows, and `notes` name them. With texts, the first scales weigh errors by what goes into a weight there.
    """

    bits: int = 2
    group: int | None = 64
    targets: str | Sequence[str] = ALL_LINEAR
    levels: str = "balanced"
    embedding: int | None = 4
    bits_of: Mapping[str, int | None] = field(default_factory=dict)
    outside: str = "stop"
    """The gradient of weights beyond the last level (`Learned`)."""
    flip: bool = True
    """Whether uneven levels may stand on their head (`Learned`)."""
    notes: list[str] = field(default_factory=list, init=False, compare=False, repr=False)
    """What the last `apply` and `finish` did otherwise than asked, and what they found dead."""

    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._learned(integers(self.bits, self.group)).complete()
        for bits in (self.embedding, *self.bits_of.values()):
            if bits is not None:
                integers(bits, self.group)

    def __call__(self, tree: Any) -> Any:
        """The packed tree; levels that no format keeps are refused."""
        return with_formats(tree, {path: cfg.packed() for path, cfg in self.formats(tree)[0].items()})

    def trained(self, tree: Any) -> Any:
        """The tree of the model that `apply` gives."""
        return with_formats(tree, self.formats(tree)[0])

    def formats(self, tree: Any) -> tuple[dict[str, Any], list[str]]:
        """The learned format of each weight, by path, and in words where it is not what was asked for."""
        tree = tree.complete()
        bits: dict[str, int | None] = dict.fromkeys(holders(tree, self.targets), self.bits)
        if self.embedding is not None:
            tables = [plain(path) for path, _ in tree.find(Embedding)]
            bits |= dict.fromkeys([*tables, *([HEAD] if getattr(tree, HEAD, None) is not None else [])], self.embedding)
        for path, number in self.bits_of.items():
            bits[_at(tree, path)] = number
        asked = {path: integers(number, self.group) for path, number in bits.items() if number is not None}
        if not asked:
            raise ConfigError("no weight is to be quantised", hint="name targets, or bits of single weights")
        chosen, notes = fitted_all(tree, asked)
        return {path: self._learned(cfg) for path, cfg in chosen.items()}, notes

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        formats, notes = self.formats(model.config)
        self.notes[:] = notes
        refuse_broken(model, list(formats))
        squares = mean_squares(model, formats, texts) if texts else {}

        def packer(path: str, cfg: Any) -> Pack:
            def pack(module: Any) -> tuple[BaseConfig, Packed]:
                own = isinstance(module.format, Learned)  # trained before: it goes on from its own weights
                dense = module.packed()["weight"] if own else module.dense()
                packed = cfg.build().pack(dense.detach(), _floored(squares.get(path)))
                tell(1 / len(formats))
                return cfg, packed

            return pack

        made = repacked(model, {path: packer(path, cfg) for path, cfg in formats.items()})
        self.notes.extend(dead_groups(made))
        return made.requires_grad_(True)

    def finish(self, model: M) -> M:
        """Packed, bit for bit. Scales or weights that are no numbers are refused by name; dead groups stay zeros and are told."""
        learned = _learned_in(model)
        if not learned:
            raise ConfigError("this model has no learned weights", hint="call apply() first, and finish() once")
        _refuse_broken_scales(learned)
        self.notes[:] = [*self.notes, *(note for note in dead_groups(model) if note not in self.notes)]
        made = repacked(model, dict.fromkeys(learned, lambda module: module.format.packed_as(module.packed())))
        return made.requires_grad_(False)

    def _learned(self, cfg: Any) -> Any:
        bits: int = cfg.builds.bits
        levels = self.levels if bits == 2 or self.bits != 2 else "balanced"
        return Learned.Config(bits=bits, group=cfg.group, levels=levels, outside=self.outside, flip=self.flip)


def weight_names(model: nn.Module) -> list[str]:
    """The parameters that are weights of learned formats."""
    return [f"{path}.weight" for path in _learned_in(model)]


def scale_names(model: nn.Module) -> list[str]:
    """The parameters that are logarithms of scales."""
    return [f"{path}.log_scale" for path in _learned_in(model)]


def dead_groups(model: nn.Module) -> list[str]:
    """In words, the learned weights some of whose groups have no scale: they are zeros, and stay it."""
    found = []
    for path, module in _learned_in(model).items():
        scales = module.format.scales(module.packed())  # type: ignore[attr-defined]
        dead = int((scales == 0).sum())
        if dead:
            first = (scales == 0).nonzero()[0].tolist()
            where = f"row {', '.join(map(str, first[:-1]))}"
            found.append(
                f"{path}: {dead} of {scales.numel()} groups are dead (the first in {where}); kept as zeros, with a scale of zero"
            )
    return found


# Inside ---------------------------------------------------------------------------------------------------------------


def _at(tree: Any, path: str) -> str:
    """The path of a weight as modules are called; `ConfigError` where there is none."""
    if plain(path) not in holders(tree, path):
        raise ConfigError(f"no weight lies at {path}", hint="bits_of goes by whole paths: stack.layers.3.mixer.q")
    return plain(path)


def _learned_in(model: nn.Module) -> dict[str, Weight]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, Weight) and isinstance(module.format, Learned)
    }


def _floored(squares: Tensor | None) -> Tensor | None:
    return None if squares is None else squares + FLOOR * squares.mean() + torch.finfo(torch.float32).tiny


def _refuse_broken_scales(learned: Mapping[str, Weight]) -> None:
    for path, module in learned.items():
        for name, part in module.packed().items():
            bad = (~part.isfinite()).nonzero()
            if len(bad):
                row = ", ".join(map(str, bad[0].tolist()[:-1]))
                what = "scales" if name == "log_scale" else "weights"
                raise NotFinite(
                    f"{path} has {what} that are no numbers ({len(bad)} of {part.numel()}, the first in row {row})",
                    hint="training diverged: go back to a checkpoint, and lower the learning rate (of scales most)",
                )
