"""Packed files: a model as the native engine reads it, brought into memory in one go and used where it lies.

A packed file is a safetensors file. Its tensors are those of a plan (and of a packed tokenizer), each at a multiple of 64
bytes so that kernels may load whole cache lines; the format allows no gaps, so what fills up to such a place is a tensor too.
One metadata entry, `orchard`, is a JSON object: what the file was made from, the plan, checksums. The file is a copy in
another order and can always be made again from its source, so a reader never mends: whatever is wrong is `BadFile`.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from orchard.core.errors import BadFile, ModelNotFound, UsageError
from orchard.core.files import atomic_write
from orchard.core.progress import progress
from orchard.weights.mapped import json_object, map_file
from orchard.weights.safetensors import MAX_HEADER_BYTES, MAX_HEADER_VALUES, SafetensorsFile

FORMAT = 2
"""The version of what this module writes."""
LAYOUT = 1
"""The version of the packed matrices (ops/kernels/native/kernels.h). Change it when they change."""
ALIGNMENT = 64
FILLING = ".filling."
"""Tensors of this name, and a number, mean nothing."""
_PIECE = 1 << 22

_NAMES = {
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "int64": "I64",
    "float32": "F32",
}
_DTYPES = {name: np.dtype(dtype) for dtype, name in _NAMES.items()}
_AGAIN = "it is made again from the model it came from; `orchard pull` does so too"


def write_packed(path: Path | str, header: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Write a whole file or none. `header` is what `PackedFile.header` gives back: anything that JSON can say."""
    path = Path(path)
    for name, array in tensors.items():
        if array.dtype.name not in _NAMES or name.startswith(FILLING) or name == "__metadata__":
            raise UsageError(f"a packed file cannot hold {name!r} of {array.dtype}", hint="use uint8 or float32")
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    entries, fillings, total = _places(arrays)
    sums = {name: zlib.crc32(_bytes(array)) for name, array in arrays.items()}
    inner = json.dumps({**header, "format": FORMAT, "layout": LAYOUT, "crc32": sums}, separators=(",", ":"))
    metadata = {"orchard": inner, "orchard.crc32": f"{zlib.crc32(inner.encode()):08x}"}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES or text.count(b",") > MAX_HEADER_VALUES:
        raise UsageError(f"{path.name}: the header would be {len(text):,} bytes", hint="this model has too many parts")
    with progress(f"writing {path.name}", total=total, unit="bytes") as advance, atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in entries:
            if name in fillings:
                file.write(bytes(fillings[name]))
                continue
            data = _bytes(arrays[name])
            for start in range(0, len(data), _PIECE):
                file.write(data[start : start + _PIECE])
                advance(len(data[start : start + _PIECE]))


def _places(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, int], int]:
    """The header's entries in the order of the file; the fillings among them with their sizes; and the size of all."""
    # Large before small keeps the many small ones, which a start touches, on few pages together.
    order = sorted(arrays, key=lambda name: -arrays[name].nbytes)
    entries: dict[str, Any] = {}
    fillings: dict[str, int] = {}
    place = 0
    for name in order:
        array = arrays[name]
        gap = -place % ALIGNMENT
        if gap:
            filling = f"{FILLING}{len(fillings)}"
            entries[filling] = {"dtype": "U8", "shape": [gap], "data_offsets": [place, place + gap]}
            fillings[filling] = gap
            place += gap
        end = place + array.nbytes
        entries[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [place, end]}
        place = end
    return entries, fillings, place


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


class PackedFile:
    """An open packed file: `header`, and `tensors` as read-only arrays that lie in the file's memory.

    Every token reads every weight, and finding the small pages of a mapped file takes a part of its time that can be
    measured (docs/log.md). So a file that fits well is read into memory with large pages; one that does not is mapped.
    """

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        with SafetensorsFile(path, data) as file:
            self.header = _header(path, file.metadata)
            self.tensors: dict[str, np.ndarray] = dict(_arrays(path, file))
        self._sums = _sums(path, self.header, self.tensors)

    @classmethod
    def open(cls, path: Path | str) -> PackedFile:
        """Bring a file into memory and check its header. `BadFile` where anything is wrong with it."""
        path = Path(path)
        try:
            data = _read(path) or map_file(path)
        except ModelNotFound as error:
            raise BadFile(f"there is no file {path}", hint=_AGAIN) from error
        if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED"):
            data.madvise(mmap.MADV_WILLNEED)  # begins to read what is not in memory, and does not wait for it
        return cls(path, data)

    def verify(self, *names: str) -> None:
        """Read these tensors (none named: all) and compare them with their checksums."""
        for name in names or self.tensors:
            if zlib.crc32(_bytes(self.tensors[name])) != self._sums[name]:
                raise BadFile(f"{self.path}: tensor {name[:80]!r} is damaged", hint=_AGAIN)

    def close(self) -> None:
        """Let go of the tensors. The mapping lives until the last array taken from here is gone."""
        self.tensors = {}

    def __enter__(self) -> PackedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(path: Path) -> mmap.mmap | None:
    """The file in memory with large pages; None where there are none, or the file is a large part of the memory left."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if not size or 3 * size > _memory_left():
                return None
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            at, view = 0, memoryview(memory)
            while at < size and (count := file.readinto(view[at : at + _PIECE])):
                at += count
            return memory if at == size else None  # shorter than it was: somebody else is at work on it
    except OSError:  # what cannot be opened is told by who maps it
        return None


def _memory_left() -> int:
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0


def _header(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    inner = metadata.get("orchard", "").encode("utf-8", "replace")
    if not inner:
        raise BadFile(f"{path} is not a packed file of Orchard's", hint=_AGAIN)
    if metadata.get("orchard.crc32") != f"{zlib.crc32(inner):08x}":
        raise BadFile(f"{path}: its description is damaged", hint=_AGAIN)
    header = json_object(inner, f"{path}: its description")
    for name, known in (("format", FORMAT), ("layout", LAYOUT)):
        if header.get(name) != known:
            raise BadFile(f"{path} has {name} {str(header.get(name))[:20]}, not {known}", hint=_AGAIN)
    return header


def _arrays(path: Path, file: SafetensorsFile) -> Iterator[tuple[str, np.ndarray]]:
    for name, info in file.tensors.items():
        if name.startswith(FILLING):
            continue
        dtype = _DTYPES.get(info.dtype)
        if dtype is None or (info.offset % ALIGNMENT and info.nbytes):
            raise BadFile(f"{path}: tensor {name[:80]!r} is of another kind, or not in its place", hint=_AGAIN)
        try:
            array = file.raw(name).view(dtype).reshape(info.shape)
        except ValueError as error:  # a shape with a zero and a number that no array can have
            raise BadFile(f"{path}: tensor {name[:80]!r} has an impossible shape", hint=_AGAIN) from error
        array.flags.writeable = False
        yield name, array


def _sums(path: Path, header: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, int]:
    sums = header.pop("crc32", None)
    if not isinstance(sums, dict) or sums.keys() != tensors.keys():
        raise BadFile(f"{path}: its checksums are not those of its tensors", hint=_AGAIN)
    return sums
