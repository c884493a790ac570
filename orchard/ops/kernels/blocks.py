"""6×6 blocks of 16 bytes (`orchard.nn.formats.blocks` has the bits) in the order the native kernels read them, and back.

A digit from 0 to 9 gets 4 bits of its own and a block's first byte stays as it is, which makes 4.33 bits of 3.56: kernels then
need no division. Packing changes no value. The layout is described in `native/kernels.h`.
"""

from __future__ import annotations

import numpy as np

from orchard.core.errors import UsageError
from orchard.ops.kernels.packing import BLOCK, BLOCKS_GROUP, matrix_bytes, room

SIDE = 6
LEVELS = (
    (-116, -78, -50, -27, -6, 14, 36, 60, 89, 127),
    (-86, -56, -34, -15, 0, 16, 33, 53, 80, 127),
)
SCALES = (
    0.0,
    *(2.0**exponent / 128 for exponent in range(-23, -10, 2)),
    *(2.0**exponent * (1 + quarter / 4) / 128 for exponent in range(-9, 3) for quarter in range(4)),
    *(2.0**exponent / 128 for exponent in (3, 5, 7, 9, 11, 13, 16)),
    float("nan"),
)
_HEADERS = 64
_STRIPS = BLOCKS_GROUP // SIDE
_MOST = 9
"""The largest digit."""


def pack_blocks(blocks: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """uint8 [rows / 6, cols / 6, 16], both rounded up, → packed bytes of a matrix [rows, cols]."""
    high, wide = -(-rows // SIDE), -(-cols // SIDE)
    if blocks.dtype != np.uint8 or blocks.shape != (high, wide, 16):
        raise UsageError(
            f"blocks are {blocks.dtype} {blocks.shape}, not uint8 {(high, wide, 16)}", hint="give one for every 6 × 6"
        )
    out = room(matrix_bytes("blocks", rows, cols, BLOCKS_GROUP))
    count, groups = -(-rows // BLOCK), -(-cols // BLOCKS_GROUP)
    to = out.reshape(count, groups, -1)
    digits = np.zeros((count * BLOCK, groups * BLOCKS_GROUP), np.uint8)
    found = _digits(blocks[..., 1:])[:rows, :cols]
    digits[:rows, :cols] = found
    nibbles = digits.reshape(count, BLOCK, groups, BLOCKS_GROUP // 8, 8).astype(np.uint32)
    words = np.bitwise_or.reduce(nibbles << (4 * np.arange(8, dtype=np.uint32)), axis=-1)
    to[:, :, _HEADERS:] = np.ascontiguousarray(words.transpose(0, 2, 3, 1)).view(np.uint8).reshape(count, groups, -1)
    headers = np.zeros((high + 8, groups * _STRIPS), np.uint8)
    headers[:high, :wide] = blocks[..., 0]
    for block in range(count):
        first = block * BLOCK // SIDE
        some = headers[first : first + 8].T.reshape(groups, _STRIPS, 8)
        to[block, :, :_HEADERS] = np.ascontiguousarray(some).reshape(groups, _HEADERS)
    return out


def block_values(data: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """What packed blocks stand for: float32 [rows, cols]."""
    count, groups = -(-rows // BLOCK), -(-cols // BLOCKS_GROUP)
    parts = data.reshape(count, groups, -1)
    words = np.ascontiguousarray(parts[:, :, _HEADERS:]).view(np.uint32).reshape(count, groups, -1, BLOCK)
    nibbles = words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & np.uint32(15)
    digits = nibbles.transpose(0, 3, 1, 2, 4).reshape(count * BLOCK, -1)[:rows, :cols].clip(max=_MOST)
    headers = np.ascontiguousarray(parts[:, :, :_HEADERS]).reshape(count, groups * _STRIPS, 8)
    row = np.arange(rows)
    of_row = headers[row // BLOCK, :, row // SIDE - row // BLOCK * BLOCK // SIDE]  # [rows, strips]
    header = np.repeat(of_row, SIDE, axis=1)[:, :cols]
    levels = np.array(LEVELS, np.float32)[header >> 6 & 1, digits]
    scales = np.array(SCALES, np.float32)[header & 63]
    values: np.ndarray = np.where(header >> 7, -scales, scales) * levels
    return values


def _digits(five: np.ndarray) -> np.ndarray:
    """Bytes [R, C, 15] → digits uint8 [6 R, 6 C]."""
    high, wide = five.shape[:2]
    a, b, c, d, e = five.astype(np.uint16).reshape(high, wide, 3, 5).transpose(3, 0, 1, 2)
    groups = np.stack([a | (b & 3) << 8, b >> 2 | (c & 15) << 6, c >> 4 | (d & 63) << 4, d >> 6 | e << 2], -1).clip(
        max=999
    )
    digits = np.stack([groups % 10, groups // 10 % 10, groups // 100], -1).astype(np.uint8)  # [R, C, 3, 4, 3]
    return digits.reshape(high, wide, SIDE, SIDE).transpose(0, 2, 1, 3).reshape(high * SIDE, wide * SIDE)
