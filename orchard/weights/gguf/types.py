"""The numbers of the GGUF format: tensor types with their block sizes, metadata value types, and its limits.

Ids and sizes follow the GGUF specification and `ggml-common.h` of https://github.com/ggml-org/ggml. Types that Orchard
cannot compute with are listed too, so that a file holding them can still be shown and copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 65_536
ALIGNMENT_KEY = "general.alignment"

MAX_KEY_BYTES = 65_535  # from the specification
MAX_NAME_BYTES = 1_024  # ggml itself keeps 63; forks keep more
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
MAX_ELEMENTS = 2**63 - 1

# Far above any real model; they keep the memory that a hostile header can ask for in proportion.
MAX_KEYS = 65_536
MAX_TENSORS = 262_144
MAX_ARRAYS = 65_536
MAX_STRINGS = 2_097_152  # the largest vocabularies bring about 800,000, merges counted


class GGMLType(IntEnum):
    """How a tensor's values are stored. Ids 4, 5, 31-33 and 36-38 were withdrawn by ggml and are unknown here."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    @property
    def block_size(self) -> int:
        """Values in one block."""
        return _BLOCKS[self.name][0]

    @property
    def type_size(self) -> int:
        """Bytes of one block."""
        return _BLOCKS[self.name][1]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape (torch order). The last dimension must be a whole number of blocks."""
        return math.prod(shape) // self.block_size * self.type_size


_BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F64": (1, 8),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 36),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "Q1_0": (128, 18),
}


class GGUFValueType(IntEnum):
    """The type of one metadata value."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# Letters for `struct`. A BOOL is a byte until its value has been checked.
SCALAR_CODES: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "B",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

NUMPY_CODES: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "<u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The type of an array: of its entries and, where those are arrays again, of each of them in turn."""

    item: GGUFValueType
    nested: tuple[ArrayType, ...] = ()


MetadataType = GGUFValueType | ArrayType


@dataclass(frozen=True, slots=True)
class Typed:
    """A metadata value with its type said instead of inferred. A list with a scalar type is an array of that type."""

    value: Any
    type: MetadataType
