"""Stored blocks taken apart, not computed: the codes, scales and minima of types that are whole numbers by groups of 32.

Computing values and rounding them again would lose something each time. What is split here can be kept as it is, by a weight
format with the same groups and by the native engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from orchard.core.errors import BadFile
from orchard.weights.gguf.kquants import UNPACK_K, scales_and_mins
from orchard.weights.gguf.types import GGMLType

GROUP = 32


class Split(NamedTuple):
    """value = scale · (code - zero) + minimum, where zero is 128 (8 bits), 8 (4 bits without minima), 0 (with minima).

    `codes` is uint8 in the tensor's shape, `scales` and `minima` are float16 [..., groups].
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None
    bits: int
    group: int = GROUP


Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """Every `run` bytes hold that many values in their low halves, and the next as many in their high halves."""
    runs = packed.reshape(-1, 1, run)
    return np.concatenate((runs & np.uint8(0x0F), runs >> 4), axis=1)


def _split_q4_0(blocks: np.ndarray) -> Parts:
    return _nibbles(blocks["q"], 16), blocks["scale"], None


def _split_q4_1(blocks: np.ndarray) -> Parts:
    return _nibbles(blocks["q"], 16), blocks["scale"], blocks["least"]


def _split_q8_0(blocks: np.ndarray) -> Parts:
    return blocks["q"] ^ np.uint8(0x80), blocks["scale"], None  # signed bytes, read as unsigned: code + 128


def _split_q4_k(blocks: np.ndarray) -> Parts:
    """Eight groups of 32 share two half-precision numbers, each multiplied by a group's own 6-bit number."""
    scales, mins = scales_and_mins(blocks["scales"])
    with np.errstate(over="ignore", invalid="ignore"):  # damaged numbers give inf or nan, as they do when computed
        factors = (scales * blocks["scale"].astype(np.float32)[:, None]).astype(np.float16)
        shifts = (mins * -blocks["least"].astype(np.float32)[:, None]).astype(np.float16)
    return _nibbles(blocks["q"], 32), factors, shifts


_SPLIT: dict[GGMLType, tuple[int, np.dtype, Callable[[np.ndarray], Parts]]] = {
    GGMLType.Q4_0: (4, np.dtype([("scale", "<f2"), ("q", "u1", 16)]), _split_q4_0),
    GGMLType.Q4_1: (4, np.dtype([("scale", "<f2"), ("least", "<f2"), ("q", "u1", 16)]), _split_q4_1),
    GGMLType.Q8_0: (8, np.dtype([("scale", "<f2"), ("q", "u1", 32)]), _split_q8_0),
    GGMLType.Q4_K: (4, UNPACK_K[GGMLType.Q4_K][0], _split_q4_k),
}


def split(raw: np.ndarray, type: GGMLType, shape: tuple[int, ...]) -> Split | None:
    """The parts of `raw` (uint8, as stored) for a tensor of `shape` (torch order); None for types that are not split.

    Q4_0, Q4_1 and Q8_0 come out bit for bit. Q4_K keeps its codes, but its scales and minima are products that need more digits
    than float16 has: they are rounded, each by at most one part in 2,048 (more only below 6e-5, where float16 has
    fewer digits).
    """
    if type not in _SPLIT:
        return None
    if raw.nbytes != type.nbytes(shape) or shape[-1] % type.block_size:
        raise BadFile(
            f"{raw.nbytes:,} bytes cannot be a {type.name} tensor of shape {list(shape)}",
            hint="the file is damaged; download it again",
        )
    bits, record, take_apart = _SPLIT[type]
    codes, scales, minima = take_apart(np.ascontiguousarray(raw).reshape(-1).view(np.uint8).view(record))
    by_group = (*shape[:-1], shape[-1] // GROUP)
    return Split(codes.reshape(shape), _own(scales, by_group), None if minima is None else _own(minima, by_group), bits)


def _own(halves: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A contiguous copy in the machine's byte order: the records belong to the file."""
    return halves.reshape(shape).astype(np.float16, order="C")
