"""What a codec finds hard goes beside it: a weight's leading singular vectors into a side path, the rest into the format.

As Apple's server model is kept (arXiv 2507.13575): W = B A + R, where B A are the leading directions in half precision
and R is packed. R has less to lose, so its rounding errors are smaller; and the side path is there for recovery to
train on. `rounds` beyond the first fit B A to what the packed rest leaves, and the rest to that, in turns (as in LoftQ,
arXiv 2310.08659): of the errors, too, the leading directions are the cheapest to keep.

With `weighted`, errors count by the mean square of the input of their column, in what leads and in the packed rest
alike (formats without an `importance` pack the rest as ever).

A side path costs 16 r (out + in) bits. In a narrow model that is much: `bits` sets what a weight may cost in all, and r
follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError
from orchard.nn.formats import Blocks, Format, Packed, Palette
from orchard.nn.formats.base import as_half
from orchard.nn.linear import Linear
from orchard.transforms.base import M, Tell, Transform, _tree, silent
from orchard.transforms.lora import ALL_LINEAR, LoraLinear
from orchard.transforms.lora_kept import KeptLinear, keep
from orchard.transforms.lora_twin import dotted, replaced
from orchard.transforms.palettize import input_squares
from orchard.transforms.ptq import fitted_all, holders, refuse_broken, with_formats
from orchard.transforms.reformat import Pack, repacked

SIDE_BITS = 16
LEAST = 1e-3


@dataclass(frozen=True)
class Residual(Transform):
    """Every linear map that `targets` name (as in `Rtn`) gets a side path of rank `r`, and what is left goes into `then`.

    With `bits` the rank is the largest with which the map, side path included, costs no more than so many bits per
    weight; a map where that is none at all is packed alone, and `notes` say so. Experts are packed alone too.
    """

    r: int = 16
    then: BaseConfig = field(default_factory=Blocks.Config)
    targets: str | Sequence[str] = ALL_LINEAR
    bits: float | None = None
    rounds: int = 3
    weighted: bool = False
    notes: list[str] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, value, least in (("rank", self.r, 0), ("number of rounds", self.rounds, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"a {name} of {value!r}", hint=f"use a whole number from {least}")
        if self.bits is not None and not (math.isfinite(self.bits) and self.bits > 0):
            raise ConfigError(f"{self.bits!r} bits per weight", hint="use a number above the format's own bits")

    @property
    def looks(self) -> bool:  # type: ignore[override]
        return self.weighted

    def __call__(self, tree: Any) -> Any:
        formats, ranks, _ = self._chosen(tree)
        made = with_formats(tree, formats)
        for path, rank in ranks.items():
            above, _, name = path.rpartition(".")
            parent = made.get(dotted(above)) if above else made
            fields = {"r": rank, "alpha": float(rank), "kept": True}
            setattr(parent, name, getattr(parent, name).derive(LoraLinear, **fields))
        return made

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        formats, ranks, notes = self._chosen(_tree(model))
        self.notes[:] = notes
        refuse_broken(model, list(formats))
        counts = input_squares(self, model, list(formats), texts) if self.weighted else {}
        sides: dict[str, tuple[Tensor, Tensor]] = {}

        def packer(path: str) -> Pack:
            def pack(module: Any) -> tuple[BaseConfig, Packed]:
                format = formats[path]
                weight, rank = module.dense().detach(), ranks.get(path, 0)
                packed, sides[path] = split(weight, rank, format.build(), self.rounds, counts.get(path))
                tell(1 / len(formats))
                return format, packed

            return pack

        made = repacked(model, {path: packer(path) for path in formats})
        return replaced(made, {path: _beside(*sides[path]) for path in ranks})

    def _chosen(self, tree: Any) -> tuple[dict[str, BaseConfig], dict[str, int], list[str]]:
        """Formats and ranks by path, and in words what is otherwise than asked."""
        tree = tree.complete()
        formats, notes = fitted_all(tree, dict.fromkeys(holders(tree, self.targets), self.then))
        ranks: dict[str, int] = {}
        for path, format in formats.items():
            node = tree.get(dotted(path))
            if isinstance(node, LoraLinear.Config | KeptLinear.Config):
                raise ConfigError(f"{path} has a side path already", hint="merge it first, or name other linear maps")
            if type(node) is not Linear.Config:
                notes.append(f"{path}: takes no side path; packed alone")
                continue
            rank = self._rank((node.out_dim, node.in_dim), format)
            if rank:
                ranks[path] = rank
            if rank < self.r and (self.bits is None or not rank):
                why = f"of rank {rank} at most" if rank else f"not within {self.bits} bits per weight; packed alone"
                notes.append(f"{path}: a side path {why}")
        return formats, ranks, notes

    def _rank(self, shape: tuple[int, int], format: BaseConfig) -> int:
        if self.bits is None:
            return min(self.r, *shape)
        left = self.bits * math.prod(shape) - 8 * format.build().nbytes(shape, torch.bfloat16)
        return max(0, min(*shape, int(left // (SIDE_BITS * sum(shape)))))


def split(
    weight: Tensor, rank: int, format: Format, rounds: int = 3, counts: Tensor | None = None
) -> tuple[Packed, tuple[Tensor, Tensor]]:
    """A weight [..., out, in] as a packed rest and the two matrices of a side path in half precision, A [rank, in] and
    B [out, rank]: the weight is about unpack(rest) + B A. Errors of a column count as `counts` [in] says; of several
    rounds the best is taken."""
    weight, best = weight.float(), math.inf
    rest = torch.zeros_like(weight)
    if not rank:
        return _packed(format, weight, counts), (
            weight.new_zeros(0, weight.shape[-1]),
            weight.new_zeros(weight.shape[-2], 0),
        )
    root = _roots(weight, counts)
    for _ in range(rounds):
        a, b = leading((weight - rest) * root, rank)
        a = as_half(a.float() / root)
        beside = b.float() @ a.float()
        packed = _packed(format, weight - beside, counts)
        rest = format.unpack(packed, torch.float32)
        error = float(((rest + beside - weight) * root).norm())
        if error < best:
            best, kept, sides = error, packed, (a, b)
    return kept, sides


def _packed(format: Format, weight: Tensor, counts: Tensor | None) -> Packed:
    return format.pack(weight, counts) if isinstance(format, Palette | Blocks) else format.pack(weight)


def _roots(weight: Tensor, counts: Tensor | None) -> Tensor:
    """What columns are multiplied with so that all errors count alike. One whose input is nearly always zero still
    counts a little: it is divided by this again."""
    if counts is None or not counts.any():
        return torch.ones_like(weight[0])
    share = counts.to(weight.device, torch.float32) / counts.mean()
    return share.clamp_min(LEAST).sqrt()


def leading(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The leading singular vectors as A [rank, in] and B [out, rank] of like size, in half precision."""
    wide = weight.shape[0] < weight.shape[1]
    matrix = weight.double().mT if wide else weight.double()
    # By the smaller square matrix: many times faster than a whole decomposition, and exact enough for what leads.
    squares, vectors = torch.linalg.eigh(matrix.mT @ matrix)
    root = squares[-rank:].flip(0).clamp_min(0).pow(0.25)
    narrow = vectors[:, -rank:].flip(1)
    tall = (matrix @ narrow / root).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    a, b = as_half(narrow * root), as_half(tall)
    return (b.mT.contiguous(), a.contiguous()) if wide else (a.mT.contiguous(), b.contiguous())


def relative_errors(model: nn.Module, made: nn.Module) -> dict[str, float]:
    """By path, how far the weights of a compressed model (side paths included) are from what they were, as a share of
    their length."""
    found: dict[str, float] = {}
    for path, module in made.named_modules():
        if isinstance(module, Linear):
            was: Any = model.get_submodule(path)
            off = _whole(module) - _whole(was)
            found[path] = float(off.norm() / _whole(was).norm().clamp_min(torch.finfo(torch.float32).tiny))
    return found


def _whole(module: Any) -> Tensor:
    dense: Tensor = module.dense().detach()
    if isinstance(module, LoraLinear):
        dense = dense + module.scale * (module.lora_b.detach().float() @ module.lora_a.detach().float())
    return dense


def _beside(a: Tensor, b: Tensor) -> Callable[[Any], nn.Module]:
    def make(linear: Any) -> nn.Module:
        made = LoraLinear.around(linear, len(a), float(len(a)))
        made.lora_a, made.lora_b = nn.Parameter(a), nn.Parameter(b)
        return keep(made, lambda values: values)

    return make
