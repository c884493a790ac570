"""How a file of records is laid out: its header, checked before anything is believed.

    8 bytes   b"ORCHREC1"
    4 bytes   length of the header, little endian
    4 bytes   CRC-32 of the header
    header    JSON: facts about the model, and the layers with the arrays of a record
    records   each begins at a multiple of 4 KiB: all units of the first layer, then of the second, and so on

All records of a layer are alike, so a record's place follows from its number. 4 KiB is what direct reads and flash pages
ask for; the arrays inside begin at multiples of 64 bytes, where the native kernels may load from. Units much smaller than that
(single neurons of a small model) may begin at multiples of less (`page`), down to the 512 bytes that disks still read directly.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from orchard.core.errors import BadFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAGIC = b"ORCHREC1"
PAGE = 4096
PAGES = (512, 1024, 2048, PAGE)
ALIGNMENT = 64
LONGEST_HEADER = 64 << 20
KINDS = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
}
"""Kinds of numbers: torch's name, and bytes. Torch itself is imported only when somebody looks at an array."""
NAMES = {name: kind for kind, (name, _) in KINDS.items()}
_DAMAGED = "the file is damaged: write it again"
_FRONT = struct.Struct("<8sII")

Facts = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Array:
    """One named array of a record: where it begins and what it is."""

    kind: str
    """One of KINDS."""
    shape: tuple[int, ...]
    at: int

    @property
    def dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, KINDS[self.kind][0])
        return dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * KINDS[self.kind][1]

    def view(self, record: Tensor) -> Tensor:
        """This array inside the bytes of a record [..., bytes], without a copy."""
        part = record[..., self.at : self.at + self.nbytes]
        return part.view(self.dtype).unflatten(-1, self.shape) if self.shape else part.view(self.dtype)[..., 0]


@dataclass(frozen=True)
class Layer:
    """The records of one layer."""

    name: str
    units: int
    arrays: dict[str, Array]
    offset: int = 0
    page: int = PAGE

    @property
    def used(self) -> int:
        """Bytes of a record that mean something."""
        return max((array.at + array.nbytes for array in self.arrays.values()), default=0)

    @cached_property
    def stride(self) -> int:
        """Bytes from a record to the next."""
        return _up(self.used, self.page)

    @property
    def end(self) -> int:
        return self.offset + self.units * self.stride

    def views(self, record: Tensor) -> dict[str, Tensor]:
        """The named arrays inside the bytes of a record."""
        return {name: array.view(record) for name, array in self.arrays.items()}


def arrays_of(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Where the arrays of a record go."""
    found: dict[str, Array] = {}
    at = 0
    for name, tensor in tensors.items():
        kind = NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if kind is None:
            raise BadFile(f"{name}: a record cannot hold {tensor.dtype}", hint="use one of " + ", ".join(NAMES))
        found[name] = Array(kind, tuple(tensor.shape), at)
        at = _up(at + found[name].nbytes, ALIGNMENT)
    return found


def encode(facts: Facts, layers: Sequence[Layer]) -> tuple[bytes, list[Layer]]:
    """The bytes before the first record, and the layers with their places."""
    header = {
        "version": 1,
        "facts": dict(facts),
        "layers": [
            {
                "name": layer.name,
                "units": layer.units,
                "page": layer.page,
                "arrays": {
                    name: {"dtype": array.kind, "shape": list(array.shape), "at": array.at}
                    for name, array in layer.arrays.items()
                },
            }
            for layer in layers
        ],
    }
    text = json.dumps(header, sort_keys=True).encode()
    if len(text) > LONGEST_HEADER:
        raise BadFile(f"a header of {len(text):,} bytes is too long", hint="write fewer layers to one file")
    front = _FRONT.pack(MAGIC, len(text), zlib.crc32(text)) + text
    return front.ljust(_up(len(front), PAGE), b"\0"), place(layers, _up(len(front), PAGE))


def place(layers: Sequence[Layer], start: int) -> list[Layer]:
    """The layers one after another, from `start` on."""
    placed: list[Layer] = []
    for layer in layers:
        placed.append(Layer(layer.name, layer.units, layer.arrays, start, layer.page))
        start = _up(placed[-1].end, PAGE)
    return placed


def front(start: bytes, name: str) -> int:
    """Bytes of the header, from the file's first sixteen."""
    if len(start) < _FRONT.size or start[:8] != MAGIC:
        raise BadFile(f"{name} is not a file of records", hint="make one with orchard.cache.experts.write_records")
    length: int = _FRONT.unpack(start[: _FRONT.size])[1]
    if length > LONGEST_HEADER:
        raise BadFile(f"{name}: a header of {length:,} bytes is too long", hint=_DAMAGED)
    return length


def decode(start: bytes, text: bytes, size: int, name: str) -> tuple[dict[str, Any], list[Layer]]:
    """Facts and layers of a file of `size` bytes. Every number is checked against the others."""
    length, crc = _FRONT.unpack(start[: _FRONT.size])[1:]
    if len(text) != length or zlib.crc32(text) != crc:
        raise BadFile(f"{name}: the header is damaged or cut", hint=_DAMAGED)
    try:
        header = json.loads(text)
        if header["version"] != 1:
            raise BadFile(f"{name} has version {header['version']!r}, not 1", hint="it needs a later Orchard")
        facts = header["facts"]
        layers = [_layer(entry, name) for entry in header["layers"]]
        if not isinstance(facts, dict) or not layers:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(f"{name}: the header makes no sense", hint=_DAMAGED) from error
    placed = place(layers, _up(_FRONT.size + length, PAGE))
    end = _up(placed[-1].end, PAGE)
    if end != size:
        what = "cut off" if size < end else "longer than it says"
        raise BadFile(f"{name} is {what}: {size:,} bytes, not {end:,}", hint=_DAMAGED)
    return facts, placed


def _layer(entry: dict[str, Any], name: str) -> Layer:
    arrays: dict[str, Array] = {}
    after = 0
    for key, value in entry["arrays"].items():
        shape, at = value["shape"], value["at"]
        sizes = all(type(size) is int and 0 <= size < 1 << 40 for size in (*shape, at)) and len(shape) <= 8
        if not sizes or value["dtype"] not in KINDS:
            raise BadFile(f"{name}: the array {key!r} has an impossible shape or place", hint=_DAMAGED)
        arrays[key] = Array(value["dtype"], tuple(shape), at)
    for array in sorted(arrays.values(), key=lambda array: array.at):
        if array.at < after or array.at % ALIGNMENT:
            raise BadFile(f"{name}: arrays of {entry['name']!r} overlap or lie askew", hint=_DAMAGED)
        after = array.at + array.nbytes
    units = entry["units"]
    if type(units) is not int or not 0 < units < 1 << 40 or not after:
        raise BadFile(f"{name}: {entry['name']!r} has no records", hint=_DAMAGED)
    page = entry.get("page", PAGE)
    if type(page) is not int or page not in PAGES:
        raise BadFile(f"{name}: records of {entry['name']!r} cannot begin at multiples of {page!r}", hint=_DAMAGED)
    return Layer(str(entry["name"]), units, arrays, page=page)


def _up(value: int, to: int) -> int:
    return -(-value // to) * to
