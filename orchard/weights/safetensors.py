"""Safetensors files in and out, with every number of the header checked against the file before it is used.

The format (https://github.com/huggingface/safetensors): eight bytes of header length, a JSON header naming each tensor's
dtype, shape and place, then the tensors' bytes with no gap and no overlap. The `safetensors` package is not used: this reader
gives typed errors, never trusts a length, and maps the file instead of reading it.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.errors import BadFile, UnsupportedFormat, UsageError
from orchard.core.files import atomic_write
from orchard.core.frozen import frozen
from orchard.weights.mapped import AGAIN, json_object, map_file

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 32 * 1024 * 1024
MAX_HEADER_VALUES = 1_000_000  # a tensor takes six; a hostile header must not become millions of small objects
MAX_DIMS = 32
MAX_ELEMENTS = 2**63 - 1

# dtype name -> (bits of one value, name in torch or "" where Orchard cannot read it)
_DTYPES: dict[str, tuple[int, str]] = {
    "F64": (64, "float64"),
    "F32": (32, "float32"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I64": (64, "int64"),
    "I32": (32, "int32"),
    "I16": (16, "int16"),
    "I8": (8, "int8"),
    "U64": (64, "uint64"),
    "U32": (32, "uint32"),
    "U16": (16, "uint16"),
    "U8": (8, "uint8"),
    "BOOL": (8, "bool"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, ""),
    "C64": (64, ""),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "F4": (4, ""),
}
_NAMES = {torch_name: name for name, (_, torch_name) in _DTYPES.items() if torch_name}


@frozen
class SafeTensorInfo:
    """One tensor of a file. `dtype` is the format's own name, `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open file: `tensors`, `metadata`, and `read(name)`. Use it with `with`, or call `close()`."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        self._data: mmap.mmap | bytes | None = data
        header, start = _header(path, data)
        self.metadata = _metadata(path, header.pop("__metadata__", None))
        self.tensors = _layout(path, header, start, len(data))

    @classmethod
    def open(cls, path: Path | str) -> SafetensorsFile:
        path = Path(path)
        return cls(path, map_file(path))

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, straight from the mapped file (read-only)."""
        if self._data is None:
            raise UsageError(f"{self.path} is closed", hint="read tensors before closing the file")
        info = self._info(name)
        return np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype, in memory of its own."""
        import torch

        info = self._info(name)
        torch_name = _DTYPES.get(info.dtype, (0, ""))[1]
        if not torch_name:
            raise UnsupportedFormat(
                f"{self.path}: tensor {name!r} has dtype {info.dtype!r}, which Orchard does not read",
                hint="use a file with one of " + ", ".join(sorted(_NAMES.values())),
            )
        if not info.nbytes:
            return torch.empty(info.shape, dtype=getattr(torch, torch_name))
        flat = torch.from_numpy(self.raw(name).copy())
        if info.dtype == "BOOL":
            return flat.ne(0).reshape(info.shape)  # a byte above 1 is no valid bool in memory
        return flat.view(getattr(torch, torch_name)).reshape(info.shape)

    def _info(self, name: str) -> SafeTensorInfo:
        if name not in self.tensors:
            raise BadFile(f"{self.path} has no tensor {name!r}", hint="the file may belong to another model")
        return self.tensors[name]

    def close(self) -> None:
        """Let go of the file. Arrays from `raw` stay valid: the mapping lives until the last of them is gone."""
        self._data = None

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _header(path: Path, data: mmap.mmap | bytes) -> tuple[dict[str, Any], int]:
    if len(data) < 8:
        raise BadFile(f"{path} is too short to be a safetensors file ({len(data)} bytes)", hint=AGAIN)
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise BadFile(
            f"{path} is not a safetensors file, or its start is damaged: "
            f"it claims a header of {length:,} bytes (at most {MAX_HEADER_BYTES:,} are allowed)",
            hint="check that this is the right file; if it is, download it again",
        )
    if length > len(data) - 8:
        raise BadFile(f"{path} ends inside its header of {length:,} bytes", hint=AGAIN)
    text = data[8 : 8 + length]
    if text.count(b",") > MAX_HEADER_VALUES:
        raise BadFile(f"{path}: the header has more than {MAX_HEADER_VALUES:,} values", hint=AGAIN)
    return json_object(text, f"{path}: the header"), 8 + length


def _metadata(path: Path, found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise BadFile(f"{path}: the header's __metadata__ must map text to text", hint=AGAIN)
    return found


def _layout(path: Path, header: dict[str, Any], start: int, size: int) -> dict[str, SafeTensorInfo]:
    """Check every entry and that together they cover the data exactly once; in the header's own order."""
    infos = {name: _entry(path, name, entry, start, size) for name, entry in header.items()}
    place = start
    for info in sorted(infos.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != place:
            fault = "overlaps another tensor" if info.offset < place else "leaves a gap before it"
            raise BadFile(f"{path}: tensor {info.name[:80]!r} {fault} (at byte {info.offset:,})", hint=AGAIN)
        place += info.nbytes
    if place != size:
        raise BadFile(f"{path}: {size - place:,} bytes at the end belong to no tensor", hint=AGAIN)
    return infos


def _whole_numbers(value: Any, limit: int) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number <= limit for number in value)


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> SafeTensorInfo:
    where = f"{path}: tensor {name[:80]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"{where} must have a dtype, a shape and data_offsets, and nothing else", hint=AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise BadFile(f"{where} has a dtype that is not text", hint=AGAIN)
    if not _whole_numbers(shape, MAX_ELEMENTS) or len(shape) > MAX_DIMS:
        raise BadFile(f"{where} has an impossible shape", hint=AGAIN)
    if math.prod(dim or 1 for dim in shape) > MAX_ELEMENTS:
        raise BadFile(f"{where} has a shape too large to address", hint=AGAIN)
    if not _whole_numbers(offsets, size) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - start:
        raise BadFile(f"{where} lies outside the file; its end is missing or the header is wrong", hint=AGAIN)
    nbytes = offsets[1] - offsets[0]
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype][0] != nbytes * 8:
        raise BadFile(f"{where} has {nbytes:,} bytes, which does not fit {dtype} {shape}", hint=AGAIN)
    return SafeTensorInfo(name, tuple(shape), dtype, start + offsets[0], nbytes)


@frozen
class Lazy:
    """A tensor made when it is written. Its shape and dtype are known before, so `load` is called only once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    def __call__(self) -> torch.Tensor:
        return self.load()


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a torch dtype."""
    name = _NAMES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise UsageError(f"safetensors files cannot hold {dtype}", hint="convert the tensor to another dtype first")
    return name


def announce(source: torch.Tensor | Callable[[], torch.Tensor]) -> torch.Tensor | Lazy:
    """A source whose shape and dtype are known. A plain callable is called for them once, and its tensor dropped."""
    if isinstance(source, Lazy) or not callable(source):
        return source
    tensor = source()
    return Lazy(tuple(tensor.shape), tensor.dtype, source)


def stored_bytes(source: torch.Tensor | Lazy) -> int:
    return math.prod(source.shape) * _DTYPES[dtype_name(source.dtype)][0] // 8


def header_of(
    path: Path | str, known: Mapping[str, torch.Tensor | Lazy], metadata: Mapping[str, str] | None = None
) -> tuple[list[str], bytes]:
    """The tensors in the order of the file, and its header. With the header's eight bytes of length they make the file's size
    known before anything is written."""
    if "__metadata__" in known:
        raise UsageError("a tensor cannot be named __metadata__", hint="rename it")
    if not all(isinstance(part, str) for pair in (metadata or {}).items() for part in pair):
        raise UsageError("safetensors metadata must map text to text", hint="turn the values into text first")
    dtypes = {name: dtype_name(source.dtype) for name, source in known.items()}
    order = sorted(known, key=lambda name: (-_DTYPES[dtypes[name]][0], name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    place = 0
    for name in order:
        end = place + stored_bytes(known[name])
        header[name] = {"dtype": dtypes[name], "shape": list(known[name].shape), "data_offsets": [place, end]}
        place = end
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{path}: a name is not valid text: {error}", hint="remove the broken characters") from error
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES or text.count(b",") > MAX_HEADER_VALUES:
        raise UsageError(
            f"{path}: the header would be {len(text):,} bytes", hint="split the tensors over several files"
        )
    return order, text


def write_safetensors(
    path: Path | str,
    tensors: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a whole file or none. The same content gives the same bytes, whatever the order of the mapping.

    Wider dtypes come first, then names in order, so that each tensor starts at a multiple of its value size.
    """
    known = {name: announce(source) for name, source in tensors.items()}
    order, text = header_of(path, known, metadata)
    with atomic_write(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(_tensor_bytes(name, known[name]))


def _tensor_bytes(name: str, source: torch.Tensor | Lazy) -> memoryview:
    import torch

    tensor = source() if isinstance(source, Lazy) else source
    if tensor.dtype != source.dtype or tuple(tensor.shape) != tuple(source.shape):
        raise UsageError(
            f"tensor {name!r} was announced as {source.dtype} {list(source.shape)} "
            f"and came as {tensor.dtype} {list(tensor.shape)}",
            hint="a tensor function must give the same shape and dtype each time",
        )
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
