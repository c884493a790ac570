"""Stored blocks to float32 and back: the plain types and the blocks of 32; `kquants` has the blocks of 256.

A block is described by a numpy record type, so that its fields read by name straight from the file's bytes. Values are
computed chunk by chunk into the result, which keeps the extra memory at a few MiB and the work in the processor's cache.
Layouts: `ggml-common.h` of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from orchard.core.errors import BadFile, UnsupportedFormat, UsageError
from orchard.weights.gguf.kquants import UNPACK_K, Unpack
from orchard.weights.gguf.types import GGMLType

CHUNK_VALUES = 1 << 18

_LOW = np.uint8(0x0F)
_HIGH_BIT = np.uint8(0x10)


def _nibbles_into(packed: np.ndarray, out: np.ndarray) -> None:
    """Sixteen bytes hold values 0-15 in their low halves and values 16-31 in their high halves."""
    out[:, :16] = packed & _LOW
    out[:, 16:] = packed >> 4


def _five_bits(packed: np.ndarray, high: np.ndarray) -> np.ndarray:
    """As above with a fifth bit per value, bit i of the 32 in `high` for value i."""
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    values = np.empty((len(packed), 32), np.uint8)
    _nibbles_into(packed, values)
    values |= fifth * _HIGH_BIT
    return values


def _column(field: np.ndarray) -> np.ndarray:
    return field.astype(np.float32)[:, None]


def _unpack_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles_into(blocks["q"], out)
    out -= 8
    out *= _column(blocks["scale"])


def _unpack_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles_into(blocks["q"], out)
    out *= _column(blocks["scale"])
    out += _column(blocks["least"])


def _unpack_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = _five_bits(blocks["q"], blocks["high"])
    out -= 16
    out *= _column(blocks["scale"])


def _unpack_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = _five_bits(blocks["q"], blocks["high"])
    out *= _column(blocks["scale"])
    out += _column(blocks["least"])


def _unpack_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks["q"]
    out *= _column(blocks["scale"])


def _unpack_plain(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:, 0] = blocks


def _unpack_bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    bits = out.view(np.uint32)
    bits[:, 0] = blocks
    bits <<= 16


_Q4_0 = np.dtype([("scale", "<f2"), ("q", "u1", 16)])
_Q8_0 = np.dtype([("scale", "<f2"), ("q", "i1", 32)])

_UNPACK: dict[GGMLType, tuple[np.dtype, Unpack]] = {
    GGMLType.F32: (np.dtype("<f4"), _unpack_plain),
    GGMLType.F16: (np.dtype("<f2"), _unpack_plain),
    GGMLType.BF16: (np.dtype("<u2"), _unpack_bf16),
    GGMLType.Q4_0: (_Q4_0, _unpack_q4_0),
    GGMLType.Q4_1: (np.dtype([("scale", "<f2"), ("least", "<f2"), ("q", "u1", 16)]), _unpack_q4_1),
    GGMLType.Q5_0: (np.dtype([("scale", "<f2"), ("high", "u1", 4), ("q", "u1", 16)]), _unpack_q5_0),
    GGMLType.Q5_1: (np.dtype([("scale", "<f2"), ("least", "<f2"), ("high", "u1", 4), ("q", "u1", 16)]), _unpack_q5_1),
    GGMLType.Q8_0: (_Q8_0, _unpack_q8_0),
    **UNPACK_K,
}

READABLE = frozenset(_UNPACK)


def dequantize(raw: np.ndarray, type: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 values of `raw` (uint8, as stored) in `shape` (torch order)."""
    if type not in _UNPACK:
        raise UnsupportedFormat(
            f"Orchard does not read tensors of type {type.name}",
            hint="use a file of one of these types: " + ", ".join(sorted(t.name for t in READABLE)),
        )
    if raw.nbytes != type.nbytes(shape) or (shape and shape[-1] % type.block_size):
        raise BadFile(
            f"{raw.nbytes:,} bytes cannot be a {type.name} tensor of shape {list(shape)}",
            hint="the file is damaged; download it again",
        )
    record, unpack = _UNPACK[type]
    blocks = np.ascontiguousarray(raw).reshape(-1).view(np.uint8).view(record)
    values = np.empty((len(blocks), type.block_size), np.float32)
    step = max(1, CHUNK_VALUES // type.block_size)
    with np.errstate(over="ignore", invalid="ignore"):  # damaged scales give inf or nan, as they do everywhere else
        for start in range(0, len(blocks), step):
            unpack(blocks[start : start + step], values[start : start + step])
    return values.reshape(shape)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1/scale, and 0 for a block of zeros."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _half(scale: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = scale[:, 0].astype(np.float16)
    if not np.isfinite(half).all():
        raise UsageError(
            "the values are not finite, or too large to quantise", hint="keep this tensor in F32, F16 or BF16"
        )
    return half


def _pack_q4_0(values: np.ndarray, blocks: np.ndarray) -> None:
    """The value furthest from zero becomes -8 exactly, so the scale carries its sign turned round."""
    furthest = np.abs(values).argmax(axis=1)[:, None]
    scale = np.take_along_axis(values, furthest, axis=1) / np.float32(-8)
    blocks["scale"] = _half(scale)
    levels = np.minimum(values * _inverse(scale) + np.float32(8.5), np.float32(15)).astype(np.uint8)
    blocks["q"] = levels[:, :16] | levels[:, 16:] << 4


def _pack_q8_0(values: np.ndarray, blocks: np.ndarray) -> None:
    """Round half away from zero, as C's roundf does; numpy's own rint rounds half to even."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    blocks["scale"] = _half(scale)
    scaled = values * _inverse(scale)
    whole = np.trunc(scaled)
    whole += np.copysign(np.abs(scaled - whole) >= np.float32(0.5), scaled)
    blocks["q"] = whole


def _pack_f32(values: np.ndarray, blocks: np.ndarray) -> None:
    blocks[:] = values[:, 0]


def _pack_f16(values: np.ndarray, blocks: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        blocks[:] = values[:, 0]


def _pack_bf16(values: np.ndarray, blocks: np.ndarray) -> None:
    """Round to nearest even. A nan keeps its sign and upper payload and becomes a quiet one, so rounding cannot clear it."""
    bits = values[:, 0].view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))
    quiet = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x00400000)
    blocks[:] = np.where(np.isnan(values[:, 0]), quiet, rounded) >> 16


_PACK: dict[GGMLType, tuple[np.dtype, Callable[[np.ndarray, np.ndarray], None]]] = {
    GGMLType.F32: (np.dtype("<f4"), _pack_f32),
    GGMLType.F16: (np.dtype("<f2"), _pack_f16),
    GGMLType.BF16: (np.dtype("<u2"), _pack_bf16),
    GGMLType.Q4_0: (_Q4_0, _pack_q4_0),
    GGMLType.Q8_0: (_Q8_0, _pack_q8_0),
}

WRITABLE = frozenset(_PACK)


def quantize(array: np.ndarray, type: GGMLType) -> np.ndarray:
    """`array` as the bytes of `type`: uint8, with the last dimension now counting bytes."""
    if type not in _PACK:
        raise UnsupportedFormat(
            f"Orchard does not write tensors of type {type.name}",
            hint="choose one of " + ", ".join(sorted(t.name for t in WRITABLE)),
        )
    if array.ndim == 0 or array.shape[-1] % type.block_size:
        raise UsageError(
            f"a tensor of shape {list(array.shape)} cannot be {type.name}: "
            f"its last dimension must be a multiple of {type.block_size}",
            hint="keep this tensor in F32, F16 or BF16",
        )
    record, pack = _PACK[type]
    values = np.ascontiguousarray(array).reshape(-1, type.block_size)
    blocks = np.empty(len(values), record)
    step = max(1, CHUNK_VALUES // type.block_size)
    for start in range(0, len(values), step):
        # Wider inputs become float32 here, a chunk at a time.
        pack(values[start : start + step].astype(np.float32, copy=False), blocks[start : start + step])
    row_bytes = array.shape[-1] // type.block_size * type.type_size
    return blocks.view(np.uint8).reshape(*array.shape[:-1], row_bytes)
