"""A GGUF writer: version 3, little endian, written whole or not at all, one tensor in memory at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from orchard.core.errors import UsageError
from orchard.core.files import atomic_write
from orchard.weights.gguf import types as limits
from orchard.weights.gguf.types import (
    NUMPY_CODES,
    SCALAR_CODES,
    ArrayType,
    GGMLType,
    GGUFValueType,
    MetadataType,
    Typed,
)

VERSION = 3

_FROM_NUMPY: dict[np.dtype, GGUFValueType] = {
    **{np.dtype(code): kind for kind, code in NUMPY_CODES.items() if kind is not GGUFValueType.BOOL},
    np.dtype(np.bool_): GGUFValueType.BOOL,
}


@dataclass(frozen=True, slots=True)
class TensorOut:
    """One tensor to write. `shape` is in torch order; `data()` gives its bytes as `type` stores them, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    data: Callable[[], Any]


def write_gguf(
    path: Path | str, metadata: Mapping[str, Any], tensors: Iterable[TensorOut], *, alignment: int | None = None
) -> None:
    """Write `metadata` and `tensors` in the order given.

    Types of plain values are inferred (bool, int as INT32/UINT32/INT64/UINT64 by size, float as FLOAT32, text, lists, numpy
    arrays as their own type); `Typed(value, type)` says them. `alignment` defaults to the metadata's own, else 32.
    """
    tensors = list(tensors)
    alignment = _agree_alignment(metadata, alignment)
    if alignment != limits.DEFAULT_ALIGNMENT and limits.ALIGNMENT_KEY not in metadata:
        metadata = {**metadata, limits.ALIGNMENT_KEY: Typed(alignment, GGUFValueType.UINT32)}
    header = [limits.MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        header.append(_text(key, limits.MAX_KEY_BYTES, "metadata key"))
        header.append(_keyed_value(key, value))
    place = 0
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise UsageError(f"two tensors are named {tensor.name!r}", hint="give each tensor its own name")
        seen.add(tensor.name)
        header.append(_tensor_entry(tensor, place))
        size = tensor.type.nbytes(tensor.shape)
        place += size + -size % alignment
    with atomic_write(Path(path)) as file:
        file.write(b"".join(header))
        _pad(file, alignment)
        for tensor in tensors:
            file.write(_tensor_bytes(tensor))
            _pad(file, alignment)


def _pad(file: IO[bytes], alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def _agree_alignment(metadata: Mapping[str, Any], asked: int | None) -> int:
    said = metadata.get(limits.ALIGNMENT_KEY)
    if isinstance(said, Typed):
        said = said.value
    alignment = asked if asked is not None else said if said is not None else limits.DEFAULT_ALIGNMENT
    if said is not None and said != alignment:
        raise UsageError(
            f"alignment {alignment} contradicts the metadata's {limits.ALIGNMENT_KEY} of {said}", hint="give only one"
        )
    if not isinstance(alignment, int) or not 0 < alignment <= limits.MAX_ALIGNMENT or alignment & (alignment - 1):
        raise UsageError(
            f"{alignment} is no usable alignment", hint=f"choose a power of two up to {limits.MAX_ALIGNMENT}"
        )
    return alignment


def _text(text: str, limit: int, what: str) -> bytes:
    data = _utf8(text)
    if not 0 < len(data) <= limit:
        raise UsageError(f"the {what} {text[:80]!r} has {len(data):,} bytes", hint=f"1 to {limit:,} are allowed")
    return struct.pack("<Q", len(data)) + data


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"{type(text).__name__} is not text")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text[:80]!r} cannot be written as UTF-8", hint="remove the broken characters") from None


def _keyed_value(key: str, value: Any) -> bytes:
    if key == limits.ALIGNMENT_KEY and not isinstance(value, Typed):
        value = Typed(value, GGUFValueType.UINT32)
    try:
        value, kind = _resolve(value)
        outer = GGUFValueType.ARRAY if isinstance(kind, ArrayType) else kind
        return struct.pack("<I", outer) + _value(value, kind, 1)
    except (struct.error, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"the metadata value {key!r} cannot be written: {error}", hint="check its type") from error


def _resolve(value: Any) -> tuple[Any, MetadataType]:
    """The plain value and its full type, said or inferred."""
    said: MetadataType | None = None
    if isinstance(value, Typed):
        value, said = value.value, value.type
    is_array = isinstance(value, list | tuple | np.ndarray)
    if isinstance(said, ArrayType):
        return value, said
    if said is not None and said is not GGUFValueType.ARRAY:
        return value, ArrayType(said) if is_array else said
    return value, _infer_array(value) if is_array else _infer_scalar([value])


def _infer_array(values: Any) -> ArrayType:
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype not in _FROM_NUMPY:
            raise TypeError(f"an array of {values.ndim} dimensions and type {values.dtype}")
        return ArrayType(_FROM_NUMPY[values.dtype])
    if not len(values):
        raise ValueError("an empty list needs its type said: Typed([], ArrayType(...))")
    if any(isinstance(value, list | tuple | np.ndarray) for value in values):
        return ArrayType(GGUFValueType.ARRAY, tuple(_infer_array(value) for value in values))
    return ArrayType(_infer_scalar(values))


def _infer_scalar(values: Any) -> GGUFValueType:
    """The narrowest usual type that holds all of `values`."""
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return GGUFValueType.BOOL
    if kinds == {str}:
        return GGUFValueType.STRING
    if kinds and kinds <= {int, float} and float in kinds:
        return GGUFValueType.FLOAT32
    if kinds == {int}:
        least, most = min(values), max(values)
        if least < 0:
            return GGUFValueType.INT32 if least >= -(2**31) and most < 2**31 else GGUFValueType.INT64
        return GGUFValueType.UINT32 if most < 2**32 else GGUFValueType.UINT64
    raise TypeError("no GGUF type holds " + ", ".join(sorted(kind.__name__ for kind in kinds)))


def _value(value: Any, kind: MetadataType, depth: int) -> bytes:
    if isinstance(kind, ArrayType):
        return _array(value, kind, depth)
    if kind is GGUFValueType.STRING:
        data = _utf8(value)
        return struct.pack("<Q", len(data)) + data
    if kind is GGUFValueType.BOOL:
        if value not in (0, 1):
            raise ValueError(f"{value!r} is no boolean")
        value = int(value)
    return struct.pack("<" + SCALAR_CODES[kind], value)


def _array(values: Any, kind: ArrayType, depth: int) -> bytes:
    if depth > limits.MAX_ARRAY_DEPTH:
        raise ValueError(f"arrays are nested more than {limits.MAX_ARRAY_DEPTH} deep")
    head = struct.pack("<IQ", kind.item, len(values))
    if kind.item is GGUFValueType.ARRAY:
        nested = kind.nested or tuple(_infer_array(value) for value in values)
        if len(nested) != len(values):
            raise ValueError(f"{len(values)} arrays have {len(nested)} types")
        return head + b"".join(_array(value, inner, depth + 1) for value, inner in zip(values, nested))
    if isinstance(values, np.ndarray):
        return head + _array_bytes(values, kind.item)
    if kind.item is GGUFValueType.STRING:
        return head + b"".join(_value(value, kind.item, depth) for value in values)
    if kind.item is GGUFValueType.BOOL:
        values = [_value(value, kind.item, depth)[0] for value in values]
    return head + struct.pack(f"<{len(values)}{SCALAR_CODES[kind.item]}", *values)


def _array_bytes(values: np.ndarray, item: GGUFValueType) -> bytes:
    """A numpy array as entries of `item`; a value that would change on the way is refused."""
    if values.ndim != 1:
        raise ValueError(f"an array of {values.ndim} dimensions")
    if _FROM_NUMPY.get(values.dtype) is not item:
        changed = values.astype(NUMPY_CODES[item])
        if not np.array_equal(changed, values):
            raise ValueError(f"{values.dtype} values do not fit {item.name}")
        values = changed
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def _tensor_entry(tensor: TensorOut, offset: int) -> bytes:
    shape, kind = tensor.shape, tensor.type
    if not 1 <= len(shape) <= limits.MAX_DIMS or min(shape) < 1 or math.prod(shape) > limits.MAX_ELEMENTS:
        raise UsageError(
            f"tensor {tensor.name!r} has shape {list(shape)}, which GGUF cannot hold",
            hint=f"it holds 1 to {limits.MAX_DIMS} dimensions, none of them 0",
        )
    if shape[-1] % kind.block_size:
        raise UsageError(
            f"tensor {tensor.name!r}: rows of {shape[-1]:,} values are no whole number of {kind.name} blocks",
            hint="keep this tensor in F32, F16 or BF16",
        )
    name = _text(tensor.name, limits.MAX_NAME_BYTES, "tensor name")
    return name + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def _tensor_bytes(tensor: TensorOut) -> memoryview:
    data = tensor.data()
    view = np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else memoryview(data)
    expected = tensor.type.nbytes(tensor.shape)
    if view.nbytes != expected:
        raise UsageError(
            f"tensor {tensor.name!r} came with {view.nbytes:,} bytes; {tensor.type.name} {list(tensor.shape)} has {expected:,}",
            hint="give the bytes as the type stores them; `quantize` makes them",
        )
    return view
