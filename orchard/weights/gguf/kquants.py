"""Stored blocks to float32 for the K types: 256 values share one half-precision scale, sub-blocks have small integer scales.

Each function fills `out` (blocks × 256, float32) from records whose fields are named after what they hold. Inside a
block the packed bytes are laid out in runs of 32 values: a byte's lowest bits belong to the first run, its next bits to the
second, and so on. Layouts: `ggml-common.h` and the dequantize_row_* functions of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from orchard.weights.gguf.types import GGMLType

Unpack = Callable[[np.ndarray, np.ndarray], None]

_SIX_BITS = np.uint8(0x3F)
_LOW = np.uint8(0x0F)
_TOP_TWO = np.uint8(0x30)


def _runs(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Spread bytes into values of `bits` bits. Every `width` bytes give 8/bits runs of `width` values, lowest bits first."""
    count = len(packed)
    groups = packed.reshape(count, -1, width)
    per_byte = 8 // bits
    values = np.empty((count, groups.shape[1], per_byte, width), np.uint8)
    for run in range(per_byte):
        np.right_shift(groups, bits * run, out=values[:, :, run])
    values &= np.uint8((1 << bits) - 1)
    return values.reshape(count, -1)


def _per_value(fine: np.ndarray, coarse: np.ndarray) -> np.ndarray:
    """Sub-block factors: the integer scales times the block's own scale, as float32 (blocks × sub-blocks × 1)."""
    return (fine.astype(np.float32) * coarse.astype(np.float32)[:, None])[:, :, None]


def _scale(out: np.ndarray, values: np.ndarray, factors: np.ndarray, shifts: np.ndarray | None = None) -> None:
    out[:] = values
    grouped = out.reshape(len(out), factors.shape[1], -1)
    grouped *= factors
    if shifts is not None:
        grouped -= shifts


def _unpack_q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    fine = blocks["scales"]
    factors = _per_value(fine & _LOW, blocks["scale"])
    shifts = _per_value(fine >> 4, blocks["least"])
    _scale(out, _runs(blocks["q"], 2, 32), factors, shifts)


def _unpack_q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Sixteen 6-bit scales: the low four bits as nibbles of eight bytes, the top two spread over four bytes."""
    packed = blocks["scales"]
    fine = _runs(packed[:, :8], 4, 8) | _runs(packed[:, 8:], 2, 4) << 4
    factors = _per_value(fine.astype(np.int8) - np.int8(32), blocks["scale"])
    # The third bit counts from below: where it is clear, 4 is taken away.
    values = _runs(blocks["q"], 2, 32) | _runs(blocks["high"], 1, 32) << 2
    _scale(out, values.view(np.int8) - np.int8(4), factors)


def scales_and_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minimums in twelve bytes.

    Bytes 0-3 and 4-7 hold the first four of each in six bits; their spare top bits are the top bits of the last four,
    whose lower nibbles share bytes 8-11 (scales low, minimums high).
    """
    first, second, shared = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & _SIX_BITS, (shared & _LOW) | (first >> 2 & _TOP_TWO)), axis=1)
    mins = np.concatenate((second & _SIX_BITS, (shared >> 4) | (second >> 2 & _TOP_TWO)), axis=1)
    return scales, mins


def _unpack_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, mins = scales_and_mins(blocks["scales"])
    factors, shifts = _per_value(scales, blocks["scale"]), _per_value(mins, blocks["least"])
    _scale(out, _runs(blocks["q"], 4, 32), factors, shifts)


def _unpack_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, mins = scales_and_mins(blocks["scales"])
    factors, shifts = _per_value(scales, blocks["scale"]), _per_value(mins, blocks["least"])
    _scale(out, _runs(blocks["q"], 4, 32) | _runs(blocks["high"], 1, 32) << 4, factors, shifts)


def _unpack_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    values = _runs(blocks["q"], 4, 64) | _runs(blocks["high"], 2, 32) << 4
    _scale(out, values.view(np.int8) - np.int8(32), _per_value(blocks["scales"], blocks["scale"]))


UNPACK_K: dict[GGMLType, tuple[np.dtype, Unpack]] = {
    GGMLType.Q2_K: (
        np.dtype([("scales", "u1", 16), ("q", "u1", 64), ("scale", "<f2"), ("least", "<f2")]),
        _unpack_q2_k,
    ),
    GGMLType.Q3_K: (
        np.dtype([("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 12), ("scale", "<f2")]),
        _unpack_q3_k,
    ),
    GGMLType.Q4_K: (
        np.dtype([("scale", "<f2"), ("least", "<f2"), ("scales", "u1", 12), ("q", "u1", 128)]),
        _unpack_q4_k,
    ),
    GGMLType.Q5_K: (
        np.dtype([("scale", "<f2"), ("least", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)]),
        _unpack_q5_k,
    ),
    GGMLType.Q6_K: (
        np.dtype([("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("scale", "<f2")]),
        _unpack_q6_k,
    ),
}
