"""Formats that look values up, in the native engine's layout: palettes and 6×6 blocks.

Like `native_codes` of `base`: bits are moved and no value is changed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from orchard.nn.formats.base import NativeWeight, NotLowered, _matrices, _one_after_another, exact_half
from orchard.ops.kernels.blocks import pack_blocks
from orchard.ops.kernels.packing import BLOCKS_GROUP, PALETTE_GROUP, PALETTE_ROWS, PALETTES, pack_palette


def native_palette(codes: Tensor, tables: Tensor, *, bits: int, rows: int) -> NativeWeight:
    """Codes uint8 [..., out, in], one to a byte, and tables [..., tables, 2**bits] of `rows` rows each."""
    if f"p{bits}" not in PALETTES:
        raise NotLowered(f"palettes of {bits} bits have no native form")
    if rows % PALETTE_ROWS:
        raise NotLowered(f"palettes of {rows} rows are no multiple of {PALETTE_ROWS}")
    half = tables if tables.dtype == torch.float16 else exact_half(tables)
    known, entries = _matrices(codes), _matrices(half)
    count, out, width = known.shape
    repeated = np.repeat(entries, rows // PALETTE_ROWS, axis=1)[:, : -(-out // PALETTE_ROWS)]

    def pack(i: int) -> np.ndarray:
        return pack_palette(known[i], np.ascontiguousarray(repeated[i]), bits=bits)

    return NativeWeight(f"p{bits}", PALETTE_GROUP, False, out, width, count, _one_after_another(count, pack))


def native_blocks(blocks: Tensor, shape: tuple[int, ...]) -> NativeWeight:
    """Blocks uint8 [..., out / 6, in / 6, 16] of a weight [..., out, in]."""
    out, width = shape[-2:]
    known = blocks.detach().cpu().contiguous().numpy().reshape(-1, *blocks.shape[-3:])
    data = _one_after_another(len(known), lambda i: pack_blocks(known[i], out, width))
    return NativeWeight("blocks", BLOCKS_GROUP, False, out, width, len(known), data)
