"""The block codec alone and beside singular vectors, at equal bytes. For the `afm-2025-device` study.

The codec has one rate, so bytes that a side path takes are given to the codec alone in another way: the rows that it holds
worst are kept at eight bits instead, as many as the same bytes buy. That is the strongest plain use of them that we know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from orchard.core.progress import progress
from orchard.core.report import Scalar, Value
from orchard.models.language import Decoder
from orchard.nn.formats import Blocks, Int4, Int8
from orchard.nn.linear import Linear
from orchard.transforms.residual import split

RANKS = (1, 2, 4, 8, 16)
GROUP = 32


@dataclass
class Errors:
    """Sums of squares over all weights, and bytes."""

    squares: float = 0.0
    whole: float = 0.0
    nbytes: int = 0

    def add(self, off: Tensor, weight: Tensor, nbytes: int) -> None:
        self.squares += float(off.double().square().sum())
        self.whole += float(weight.double().square().sum())
        self.nbytes += nbytes

    @property
    def relative(self) -> float:
        return (self.squares / self.whole) ** 0.5


def weights_of(model: Decoder) -> list[Tensor]:
    """Of the linear maps of the layers, dense."""
    return [module.dense().detach().float().cpu() for module in model.stack.modules() if isinstance(module, Linear)]


@torch.no_grad()
def measured(model: Decoder) -> tuple[dict[str, Value | Scalar], list[list[float]]]:
    """Values, and by rank: bits, the relative error with a side path, and of the codec alone at the same bytes."""
    format = Blocks.Config().build()
    weights = weights_of(model)
    offs = [coded(weight) - weight for weight in weights]
    alone, int4, rows = Errors(), Errors(), []
    four = Int4.Config(group=GROUP).build()
    for weight, off in zip(weights, offs, strict=True):
        int4.add(
            four.unpack(four.pack(weight), torch.float32) - weight,
            weight,
            four.nbytes(tuple(weight.shape), torch.float16),
        )
        alone.add(off, weight, format.nbytes(tuple(weight.shape), torch.float16))
    count = sum(weight.numel() for weight in weights)
    with progress("blocks beside singular vectors", total=len(RANKS)) as advance:
        for rank in RANKS:
            beside, same = Errors(), Errors()
            for weight, off in zip(weights, offs, strict=True):
                packed, (a, b) = split(weight, rank, format)
                extra = 2 * (a.numel() + b.numel())
                nbytes = format.nbytes(tuple(weight.shape), torch.float16) + extra
                beside.add(format.unpack(packed, torch.float32) + b.float() @ a.float() - weight, weight, nbytes)
                same.add(with_wide_rows(weight, off, extra), weight, nbytes)
            rows.append([rank, 8 * beside.nbytes / count, beside.relative, same.relative])
            advance()
    cut, best = max((1 - row[2] / row[3], row[0]) for row in rows)
    values: dict[str, Value | Scalar] = {
        "block_bits": Value(8 * alone.nbytes / count, "bits", note="blocks at edges counted whole"),
        "block_bits_inside": Value(
            8 * format.nbytes((60, 60), torch.float16) / 60**2, "bits", note="of a weight that whole blocks divide"
        ),
        "block_error": Value(alone.relative, note="relative, all linear maps"),
        "int4_error": Value(
            int4.relative, note=f"four bits in groups of {GROUP}, {8 * int4.nbytes / count:.2f} bits, for comparison"
        ),
        "residual_error_cut": Value(cut, "x", note=f"at equal bytes, the best rank of {RANKS}: {best}"),
        "residual_error_cut_bytes_apart": Value(
            1 - rows[-1][2] / alone.relative, "x", note=f"rank {RANKS[-1]} against the codec with fewer bytes"
        ),
    }
    return values, rows


def coded(weight: Tensor) -> Tensor:
    format = Blocks.Config().build()
    found: Tensor = format.unpack(format.pack(weight), torch.float32)
    return found


def with_wide_rows(weight: Tensor, off: Tensor, extra: int) -> Tensor:
    """The errors `off` of the codec with its worst rows at eight bits, as many as so many bytes more buy; one that they buy a
    part of is taken whole, in the codec's favour."""
    rows, width = weight.shape
    # Eight bits and a scale, less what a row costs in blocks.
    price = width + 2 - Blocks.Config().build().nbytes((rows, width), torch.float16) / rows
    wide = min(rows, math.ceil(extra / price))
    if not wide:
        return off
    worst = off.square().sum(1).argsort(descending=True)[:wide]
    format = Int8.Config(half=True).build()
    made = off.clone()
    made[worst] = format.unpack(format.pack(weight[worst]), torch.float32) - weight[worst]
    return made
