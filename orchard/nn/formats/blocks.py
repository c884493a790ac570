"""A weight kept as 6×6 blocks of 128 bits: 3.56 bits per weight, whatever the weight's values are.

The idea is ASTC's (textures; AFM 2025, arXiv 2507.13575, keeps a server model that way): a block is decoded alone,
every value of it lies on one of a few levels, and the number of levels need be no power of two. The layout is not
ASTC's. Two half-precision ends and 6 levels between them leave 3.7 % of the square of normal weights; ten levels and
one byte of everything else leave 1.5 %.

The bits
--------
`blocks` is uint8 [..., ceil(out / 6), ceil(in / 6), 16]. Block (R, C) holds rows 6R to 6R + 5 and columns 6C to 6C + 5.

    byte 0       bits 0-5   the scale, a number of `SCALES`: 0 is zero, 63 is not-a-number
                 bit 6      the levels: 0 `LEVELS[0]`, 1 `LEVELS[1]`
                 bit 7      1: the levels are mirrored (each is negated; the digit keeps its place)
    bytes 1-15   three numbers of five bytes, the lowest byte first: rows 0 and 1, rows 2 and 3, rows 4 and 5

Each number of 40 bits is four groups of 10 bits, the first in the lowest bits: columns 0-2 of the first row, columns
3-5 of the first row, columns 0-2 of the second row, columns 3-5 of the second row. A group is d0 + 10 d1 + 100 d2,
where d0 is the digit of the leftmost column; 1000 to 1023 are never written, and are read as 999.

    value = scale · level[digit]            (times -1 when mirrored)

A scale has three significant bits and a level seven: every product is exact in single precision, and a half-precision
number too but for the three smallest scales.

    SCALES[0]           = 0
    SCALES[1 + i]       = 2^(-23 + 2i) / 128                             i = 0…6
    SCALES[8 + 4e + m]  = 2^(e - 9) · (1 + m / 4) / 128                  e = 0…11, m = 0…3
    SCALES[56 + i]      = 2^(3, 5, 7, 9, 11, 13, 16)[i] / 128            i = 0…6
    SCALES[63]          = NaN

So blocks whose largest value lies between 0.002 and 8 have a scale within an eighth of the best; beyond,
half-precision's range is covered in strides. What a digit beyond the weight's edge says means nothing: `extent`, an
empty tensor [..., out, in, 0] of no bytes, says by its shape where the edge is.

How levels and scale are chosen is in `blocks_search`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.config import BaseConfig, Configurable, config
from orchard.nn.formats.base import LARGE, Format, NativeWeight, Packed, PackedPart, counted, finite_or_nan
from orchard.nn.formats.blocks_search import LEVELS, SCALES, SIDE, best_blocks
from orchard.nn.formats.native_tables import native_blocks

BYTES = 16
"""Of one block."""


class Blocks(Configurable, Format):
    """A block with a value that is not finite becomes not-a-number; values beyond 65,024 become that."""

    @config
    class Config(BaseConfig):
        pass

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        *lead, out, width = shape
        return {
            "blocks": PackedPart((*lead, -(-out // SIDE), -(-width // SIDE), BYTES), torch.uint8),
            "extent": PackedPart((*shape, 0), torch.uint8),
        }

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> Packed:
        """The blocks of least squared error that the search finds; `importance` (broadcast to the weight, not negative)
        is how much the square of each value's error counts."""
        values = weight.detach().float()
        counts = torch.ones_like(values) if importance is None else counted(importance, values)
        header, digits = best_blocks(_tiles(finite_or_nan(values)), _tiles(counts))
        blocks = torch.cat([header[..., None], _written(digits)], -1)
        return {"blocks": blocks, "extent": weight.new_empty((*weight.shape, 0), dtype=torch.uint8)}

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        blocks, (*lead, out, width, _) = packed["blocks"], packed["extent"].shape
        if lead or blocks.device.type != "cpu" or torch.compiler.is_compiling() or blocks.numel() <= LARGE:
            return _dense(blocks)[..., :out, :width].to(dtype)
        # A large weight goes faster in pieces that a cache holds.
        made, step = torch.empty(out, width, dtype=dtype), max(1, LARGE // blocks[0].numel())
        for first in range(0, len(blocks), step):
            rows = made[first * SIDE : (first + step) * SIDE]
            rows.copy_(_dense(blocks[first : first + step])[: len(rows), :width])
        return made

    def fake(self, weight: Tensor) -> Tensor:
        rounded = self.unpack(self.pack(weight.detach()), weight.dtype)
        return weight + (rounded - weight).detach()

    def native(self, packed: Packed, shape: tuple[int, ...]) -> NativeWeight:
        return native_blocks(packed["blocks"], shape)

    def rows(self, packed: Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
        # Of a block of six rows only the five bytes are read that the asked one lies in.
        blocks, width = packed["blocks"][ids // SIDE], packed["extent"].shape[-2]
        pairs = blocks[..., 1:].unflatten(-1, (3, 5))
        pair = (ids % SIDE // 2)[..., None, None, None].expand(*pairs.shape[:-2], 1, 5)
        both = _values(blocks[..., 0], pairs.gather(-2, pair).squeeze(-2)).unflatten(-1, (2, SIDE))
        one = (ids % 2)[..., None, None, None].expand(*both.shape[:-2], 1, SIDE)
        return both.gather(-2, one).flatten(-3)[..., :width].to(dtype)


# Blocks and weights ---------------------------------------------------------------------------------------------------


def _tiles(weight: Tensor) -> Tensor:
    """[..., out, in] as [..., R, C, 36], with zeros beyond the edge."""
    *_, out, width = weight.shape
    whole = functional.pad(weight, (0, -width % SIDE, 0, -out % SIDE))
    return whole.unflatten(-1, (-1, SIDE)).unflatten(-3, (-1, SIDE)).transpose(-2, -3).flatten(-2)


def _dense(blocks: Tensor) -> Tensor:
    """Blocks [..., R, C, 16] as values [..., 6 R, 6 C] in float32."""
    tiles = _values(blocks[..., 0], blocks[..., 1:]).unflatten(-1, (SIDE, SIDE))
    return tiles.transpose(-2, -3).flatten(-2).flatten(-3, -2)


# Digits and bytes -----------------------------------------------------------------------------------------------------


def _written(digits: Tensor) -> Tensor:
    """Digits [..., 36] as 15 bytes."""
    threes = digits.to(torch.int32).unflatten(-1, (3, 4, 3))
    a, b, c, d = (threes[..., 0] + 10 * threes[..., 1] + 100 * threes[..., 2]).unbind(-1)
    five = (a & 255, a >> 8 | (b & 63) << 2, b >> 6 | (c & 15) << 4, c >> 4 | (d & 3) << 6, d >> 2)
    return torch.stack(five, -1).to(torch.uint8).flatten(-2)


def _values(header: Tensor, five: Tensor) -> Tensor:
    """The values behind headers [...] and bytes [..., 5 n], float32 [..., 12 n]."""
    a, b, c, d, e = five.int().unflatten(-1, (-1, 5)).unbind(-1)
    groups = (a | (b & 3) << 8, b >> 2 | (c & 15) << 6, c >> 4 | (d & 63) << 4, d >> 6 | e << 2)
    kind = (header >> 6).int()
    which = torch.stack(groups, -1).flatten(-2) + (kind << 10)[..., None]
    levels = functional.embedding(which, _GROUPS.to(header.device)).flatten(-2)
    return levels * _SCALES.to(header.device)[(header & 63).int()][..., None]


def _all_groups() -> Tensor:
    """The three levels of every group of 10 bits, [4 · 1024, 3]: first by bits 6 and 7 of the header, then by the group."""
    number = torch.arange(1024).clamp_max(999)
    digits = torch.stack([number % 10, number // 10 % 10, number // 100], -1)
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    return torch.cat([levels, -levels])[:, digits].flatten(0, 1)


_GROUPS = _all_groups()
_SCALES = torch.tensor(SCALES, dtype=torch.float32)
