"""The tensor files of checkpoints: safetensors, written with a SHA-256 of every byte, read in place.

The format is eight bytes of header length, a JSON header with each tensor's dtype, shape and place, then the bytes without gaps
(https://github.com/huggingface/safetensors). Wider dtypes come first, so that each tensor begins at a multiple of its value's
size. `orchard.weights` has a reader of its own for files from anywhere; training may not import it, and needs flushing,
digests and parts of tensors instead of names of models.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchard.core.errors import BadFile, UsageError
from orchard.train import checkpoint_disk as disk

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BITE = 1 << 24
DAMAGED = "load an earlier step, or copy the checkpoint again if it came from elsewhere"


@dataclass(frozen=True)
class Piece:
    """One tensor of a file, made when it is written: at most one of them needs memory of its own."""

    key: str
    dtype: torch.dtype
    shape: Sequence[int]
    tensor: Callable[[], Tensor]


def dtype_name(dtype: torch.dtype, what: str) -> str:
    if dtype not in NAMES:
        raise UsageError(f"{what} is {dtype}, which safetensors cannot hold", hint="keep it in another dtype")
    return NAMES[dtype]


def write_tensors(path: Path, pieces: Sequence[Piece]) -> tuple[int, str]:
    """Write and flush a new file; its size and its SHA-256."""
    ordered = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.key))
    header: dict[str, Any] = {}
    place = 0
    for piece in ordered:
        end = place + math.prod(piece.shape) * piece.dtype.itemsize
        name = dtype_name(piece.dtype, piece.key)
        header[piece.key] = {"dtype": name, "shape": list(piece.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    descriptor = disk.create(path)
    try:
        for view in _everything(text, ordered):
            size += len(view)
            for start in range(0, len(view), BITE):
                digest.update(view[start : start + BITE])
                disk.put(descriptor, view[start : start + BITE])
        disk.flush(descriptor)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


def _everything(header: bytes, pieces: Sequence[Piece]) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for piece in pieces:
        tensor = piece.tensor().detach().cpu().contiguous()
        assert tensor.dtype == piece.dtype and list(tensor.shape) == list(piece.shape), piece.key
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TensorFile:
    """An open file: `read(key)` gives a tensor that lies in the mapped file, so copy what is to stay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise self._bad("it is too short")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory it could write to
        length = int.from_bytes(self._data[:8], "little")
        if length > size - 8:
            raise self._bad("it ends inside its header")
        try:
            self._header = json.loads(self._data[8 : 8 + length])
            self._start, self._room = 8 + length, size - 8 - length
            self._header.pop("__metadata__", None)
        except (ValueError, AttributeError, RecursionError) as error:
            raise self._bad("its header is no JSON object") from error

    def read(self, key: str) -> Tensor:
        entry = self._header.get(key)
        if entry is None:
            raise self._bad(f"it has no tensor {key}")
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            count = math.prod(shape)
            sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        except (KeyError, TypeError, ValueError) as error:
            raise self._bad(f"tensor {key} has no usable dtype, shape and place") from error
        if not sound or not begin <= end <= self._room or end - begin != count * dtype.itemsize:
            raise self._bad(f"tensor {key} lies outside of it")
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if dtype is torch.bool:  # a byte above 1 is no bool
            return self._values(torch.uint8, count, begin).ne(0).reshape(shape)
        return self._values(dtype, count, begin).reshape(shape)

    def _values(self, dtype: torch.dtype, count: int, begin: int) -> Tensor:
        return torch.frombuffer(self._data, dtype=dtype, count=count, offset=self._start + begin)

    def _bad(self, why: str) -> BadFile:
        return BadFile(f"{self.path} is damaged: {why}", hint=DAMAGED)
