"""A GGUF reader that trusts nothing: every count, length and offset is checked against the file before it is used.

The file is mapped, so opening reads the header and nothing else. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.errors import BadFile, UnsupportedFormat, UsageError
from orchard.weights.gguf import types as limits
from orchard.weights.gguf.quants import READABLE, dequantize
from orchard.weights.gguf.types import (
    NUMPY_CODES,
    SCALAR_CODES,
    ArrayType,
    GGMLType,
    GGUFValueType,
    MetadataType,
    Typed,
)
from orchard.weights.mapped import map_file

if TYPE_CHECKING:
    import torch

LONG_ARRAY = 1024  # numeric arrays above this length stay numpy arrays; shorter ones become lists

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_SCALARS = {kind: struct.Struct("<" + code) for kind, code in SCALAR_CODES.items()}
_TYPES = {int(kind): kind for kind in GGMLType}
_VALUE_TYPES = {int(kind): kind for kind in GGUFValueType}

# Types that torch holds as they are; the rest of READABLE is computed.
_NATIVE = {
    GGMLType.F32: "float32",
    GGMLType.F16: "float16",
    GGMLType.BF16: "bfloat16",
    GGMLType.F64: "float64",
    GGMLType.I8: "int8",
    GGMLType.I16: "int16",
    GGMLType.I32: "int32",
    GGMLType.I64: "int64",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. `shape` is in torch order; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


class _Cursor:
    """Reads the header front to back and knows where it is when something is wrong."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0
        self.arrays = self.strings = 0

    def bad(self, what: str, hint: str = "the file is damaged or incomplete; download it again") -> BadFile:
        return BadFile(f"{self.path}: {what} (at byte {self.at:,} of {self.size:,})", hint=hint)

    def need(self, count: int, what: str) -> None:
        """Refuse when fewer than `count` bytes are left."""
        if count > self.size - self.at:
            raise self.bad(f"the file ends inside {what}, which needs {count:,} more bytes")

    def u32(self, what: str) -> int:
        self.need(4, what)
        value: int = _U32(self.data, self.at)[0]
        self.at += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        value: int = _U64(self.data, self.at)[0]
        self.at += 8
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and not 0 < length <= limit:
            raise self.bad(f"{what} has {length:,} bytes; 1 to {limit:,} are allowed")
        self.need(length, what)
        try:
            text = str(self.data[self.at : self.at + length], "utf-8")
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not UTF-8 text") from None
        self.at += length
        return text

    def value_type(self, what: str) -> GGUFValueType:
        number = self.u32(what)
        if number not in _VALUE_TYPES:
            raise self.bad(f"{what} has the unknown value type {number}")
        return _VALUE_TYPES[number]

    def value(self, kind: GGUFValueType, what: str) -> tuple[Any, MetadataType]:
        if kind is GGUFValueType.STRING:
            return self.string(what), kind
        if kind is GGUFValueType.ARRAY:
            return self.array(what, 1)
        form = _SCALARS[kind]
        self.need(form.size, what)
        (value,) = form.unpack_from(self.data, self.at)
        if kind is GGUFValueType.BOOL:
            if value > 1:
                raise self.bad(f"{what} is a boolean of value {value}")
            value = bool(value)
        self.at += form.size
        return value, kind

    def array(self, what: str, depth: int) -> tuple[Any, ArrayType]:
        self.arrays += 1
        if depth > limits.MAX_ARRAY_DEPTH or self.arrays > limits.MAX_ARRAYS:
            raise self.bad(f"{what} nests arrays too deeply, or the file has too many of them")
        item = self.value_type(what)
        count = self.u64(what)
        if item is GGUFValueType.STRING:
            return self.strings_of(count, what), ArrayType(item)
        if item is GGUFValueType.ARRAY:
            self.need(count * 12, what)
            if count > limits.MAX_ARRAYS:
                raise self.bad(f"{what} is made of {count:,} arrays; {limits.MAX_ARRAYS:,} are allowed")
            entries = [self.array(what, depth + 1) for _ in range(count)]
            return [value for value, _ in entries], ArrayType(item, tuple(kind for _, kind in entries))
        return self.numbers(item, count, what), ArrayType(item)

    def numbers(self, item: GGUFValueType, count: int, what: str) -> Any:
        self.need(count * _SCALARS[item].size, what)
        if count == 0:
            return []
        found = np.frombuffer(self.data, NUMPY_CODES[item], count, self.at)
        if item is GGUFValueType.BOOL:
            if int(found.max()) > 1:
                raise self.bad(f"{what} has a boolean above 1")
            found = found.astype(np.bool_)
        self.at += count * _SCALARS[item].size
        return found.tolist() if count <= LONG_ARRAY else found.copy()

    def strings_of(self, count: int, what: str) -> list[str]:
        """Token lists have hundreds of thousands of entries: one tight loop, the checks kept inside it."""
        self.need(count * 8, what)
        self.strings += count
        if self.strings > limits.MAX_STRINGS:
            raise self.bad(f"{what} brings the file above {limits.MAX_STRINGS:,} texts")
        data, size, at = self.data, self.size, self.at
        found: list[str] = []
        keep = found.append
        try:
            for _ in range(count):
                end = at + 8 + _U64(data, at)[0]
                if end > size:
                    break
                keep(str(data[at + 8 : end], "utf-8"))
                at = end
        except UnicodeDecodeError:
            self.at = at
            raise self.bad(f"entry {len(found):,} of {what} is not UTF-8 text") from None
        except struct.error:
            pass
        self.at = at
        if len(found) != count:
            raise self.bad(f"the file ends inside entry {len(found):,} of {what}")
        return found


class GGUFFile:
    """An open file: `metadata` with `metadata_types`, `tensors`, `raw(name)` and `read(name)`. Use it with `with`."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        self._data: mmap.mmap | bytes | None = data
        cursor = _Cursor(path, data)
        self.version, tensor_count, key_count = _start(cursor)
        self.metadata: dict[str, Any] = {}
        self.metadata_types: dict[str, MetadataType] = {}
        for _ in range(key_count):
            key = cursor.string("a metadata key", limits.MAX_KEY_BYTES)
            if key in self.metadata:
                raise cursor.bad(f"the metadata key {key[:80]!r} appears twice")
            what = f"the metadata value {key[:80]!r}"
            self.metadata[key], self.metadata_types[key] = cursor.value(cursor.value_type(what), what)
        self.alignment = _alignment(cursor, self.metadata, self.metadata_types)
        self.tensors = _tensors(cursor, tensor_count, self.alignment)

    @classmethod
    def open(cls, path: Path | str) -> GGUFFile:
        path = Path(path)
        return cls(path, map_file(path))

    def typed_metadata(self) -> dict[str, Typed]:
        """The metadata with each value's own type: what `write_gguf` needs to write it back unchanged."""
        return {key: Typed(value, self.metadata_types[key]) for key, value in self.metadata.items()}

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes as stored, straight from the mapped file (uint8, read-only)."""
        if self._data is None:
            raise UsageError(f"{self.path} is closed", hint="read tensors before closing the file")
        info = self._info(name)
        return np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)

    def read(self, name: str, dtype: torch.dtype | str | None = "float32") -> torch.Tensor:
        """The tensor's values in memory of its own, as `dtype` (a torch dtype or its name).

        `None` keeps the stored type where torch has it (F32, F16, BF16, F64, integers) and is float32 otherwise.
        """
        import torch

        info = self._info(name)
        if info.type in _NATIVE:
            flat = torch.from_numpy(self.raw(name).copy()).view(getattr(torch, _NATIVE[info.type]))
            tensor = flat.reshape(info.shape)
        elif info.type in READABLE:
            tensor = torch.from_numpy(dequantize(self.raw(name), info.type, info.shape))
        else:
            raise UnsupportedFormat(
                f"{self.path}: tensor {name!r} has type {info.type.name}, which Orchard does not read",
                hint="use a file of another quantisation, such as Q4_K_M, Q8_0 or F16",
            )
        if dtype is None:
            return tensor
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise BadFile(f"{self.path} has no tensor {name!r}", hint="the file may belong to another model")
        return self.tensors[name]

    def close(self) -> None:
        """Let go of the file. Arrays from `raw` stay valid: the mapping lives until the last of them is gone."""
        self._data = None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata keys."""
    if cursor.data[:4] != limits.MAGIC:
        hint = "check that this is a GGUF file; if it should be, download it again"
        if cursor.data[:15] == b"version https:/":
            hint = "this is a Git LFS pointer, not the file itself; run `git lfs pull`"
        raise cursor.bad("this is not a GGUF file", hint)
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in (2, 3):
        # Version 3 in big-endian order reads as 0x03000000 here.
        what = "is in big-endian byte order" if version and version & 0xFFFF == 0 else f"has GGUF version {version}"
        raise UnsupportedFormat(
            f"{cursor.path} {what}; Orchard reads little-endian versions 2 and 3",
            hint="convert the model again with a current tool, or download another file of it",
        )
    tensor_count, key_count = cursor.u64("the number of tensors"), cursor.u64("the number of metadata keys")
    left = cursor.size - cursor.at
    # The smallest key takes 14 bytes and the smallest tensor entry 33: more of them than fit is nonsense.
    if key_count > min(left // 14, limits.MAX_KEYS):
        raise cursor.bad(f"the file claims {key_count:,} metadata keys, more than it can hold")
    if tensor_count > min(left // 33, limits.MAX_TENSORS):
        raise cursor.bad(f"the file claims {tensor_count:,} tensors, more than it can hold")
    return version, tensor_count, key_count


def _alignment(cursor: _Cursor, metadata: dict[str, Any], kinds: dict[str, MetadataType]) -> int:
    alignment = metadata.get(limits.ALIGNMENT_KEY, limits.DEFAULT_ALIGNMENT)
    if kinds.get(limits.ALIGNMENT_KEY, GGUFValueType.UINT32) is not GGUFValueType.UINT32:
        raise cursor.bad(f"{limits.ALIGNMENT_KEY} must be an unsigned 32-bit number")
    if not 0 < alignment <= limits.MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.bad(
            f"{limits.ALIGNMENT_KEY} is {alignment}; it must be a power of two up to {limits.MAX_ALIGNMENT}"
        )
    return int(alignment)


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for _ in range(count):
        info = _tensor_entry(cursor, alignment)
        if info.name in found:
            raise cursor.bad(f"the tensor {info.name[:80]!r} appears twice")
        found[info.name] = info
    data_start = cursor.at + -cursor.at % alignment
    room = cursor.size - data_start
    end = 0
    for info in sorted(found.values(), key=lambda info: info.offset):
        if info.offset + info.nbytes > room:
            raise cursor.bad(f"the file ends before the data of tensor {info.name[:80]!r}")
        if info.offset < end:
            raise cursor.bad(f"the tensor {info.name[:80]!r} overlaps the one before it")
        end = info.offset + info.nbytes
    return {
        name: TensorInfo(name, info.shape, info.type, data_start + info.offset, info.nbytes)
        for name, info in found.items()
    }


def _tensor_entry(cursor: _Cursor, alignment: int) -> TensorInfo:
    """One entry, with its offset still counted from the start of the data."""
    name = cursor.string("a tensor name", limits.MAX_NAME_BYTES)
    what = f"the entry of tensor {name[:80]!r}"
    dims = cursor.u32(what)
    if not 1 <= dims <= limits.MAX_DIMS:
        raise cursor.bad(f"{what} has {dims:,} dimensions; 1 to {limits.MAX_DIMS} are allowed")
    shape = tuple(cursor.u64(what) for _ in range(dims))[::-1]
    if 0 in shape or math.prod(shape) > limits.MAX_ELEMENTS:
        raise cursor.bad(f"{what} has the impossible shape {list(shape)}")
    number = cursor.u32(what)
    if number not in _TYPES:
        raise cursor.bad(f"{what} has the unknown type {number}", "the file is damaged, or newer than this Orchard")
    kind = _TYPES[number]
    if shape[-1] % kind.block_size:
        raise cursor.bad(f"{what}: rows of {shape[-1]:,} values are no whole number of {kind.name} blocks")
    offset = cursor.u64(what)
    if offset % alignment:
        raise cursor.bad(f"{what}: its data is not aligned to {alignment} bytes")
    return TensorInfo(name, shape, kind, offset, kind.nbytes(shape))
