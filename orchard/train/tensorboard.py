"""Curves for TensorBoard, written without it: its event files are short records of protocol buffers.

    trainer.run(told=[TensorBoard(folder)])

A record is a length, its checksum, the bytes, their checksum (TFRecord; CRC-32C, rotated and shifted so that a checksum of data
with checksums in it means something). The bytes are an `Event` message with a time, a step and a `Summary` of named numbers. Each
start writes a file of its own, which begins by saying at which step it goes on: what an interrupted run had written from there
on is dropped by the reader, so no step is shown twice.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_MASK = 0xA282EAD8
_VERSION = b"brain.Event:2"
_START = 1
_LARGEST = 3.4028234663852886e38  # of 32-bit floats


class TensorBoard:
    """Told of every step. Trouble with the disk ends the writing and not the run; `problem` says what it was."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.problem: str | None = None
        self._file: IO[bytes] | None = None

    def __call__(self, step: int, point: Mapping[str, float]) -> None:
        if self.problem is not None:
            return
        try:
            if self._file is None:
                self._file = self._begin(step)
            self._file.write(record(event(step, time.time(), summary=summary(point))))
            self._file.flush()  # whoever watches sees the step now
        except OSError as error:
            self.problem = error.strerror or str(error)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.problem = self.problem or error.strerror or str(error)

    def _begin(self, step: int) -> IO[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Readers take files by name, so a later start must have a later name. The machine's name is nobody's business.
        path = self.folder / f"events.out.tfevents.{time.time_ns():020d}.orchard.{os.getpid()}"
        file = path.open("xb")
        now = time.time()
        file.write(record(event(0, now, version=_VERSION)))
        file.write(record(event(step, now, session=_START)))
        return file


# Messages ---------------------------------------------------------------------------------------------------------------------


def event(
    step: int, seconds: float, *, summary: bytes | None = None, version: bytes | None = None, session: int | None = None
) -> bytes:
    """An `Event`: wall_time = 1 (double), step = 2, file_version = 3, summary = 5, session_log = 7 { status = 1 }."""
    parts = [_key(1, 1), struct.pack("<d", seconds), _key(2, 0), _varint(step)]
    if version is not None:
        parts.append(_bytes(3, version))
    if summary is not None:
        parts.append(_bytes(5, summary))
    if session is not None:
        parts.append(_bytes(7, _key(1, 0) + _varint(session)))
    return b"".join(parts)


def summary(point: Mapping[str, float]) -> bytes:
    """A `Summary`: value = 1 { tag = 1, simple_value = 2 (float) }, once for each number."""
    return b"".join(_bytes(1, _bytes(1, tag(name)) + _key(2, 5) + _float(value)) for name, value in point.items())


def tag(name: str) -> bytes:
    """A slash in a tag makes a group of it, and tokens/s are no group."""
    return name.replace("/", " per ").encode("utf-8", "replace")


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join([length, struct.pack("<I", masked(length)), data, struct.pack("<I", masked(data))])


# Bytes ------------------------------------------------------------------------------------------------------------------------


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


def _row(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = tuple(_row(value) for value in range(256))


def _float(value: float) -> bytes:
    """What 32 bits cannot hold is infinite."""
    if abs(value) > _LARGEST:
        value = math.inf if value > 0 else -math.inf
    return struct.pack("<f", value)


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _bytes(number: int, data: bytes) -> bytes:
    return _key(number, 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers as the format has them
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
