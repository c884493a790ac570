"""Event files: byte for byte what the format asks for, read back by a small reader of our own.

The same files were read with TensorBoard 2.21 itself (both of its loaders) when this was written.
"""

from __future__ import annotations

import errno
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.train.tensorboard import TensorBoard, crc32c, event, masked, record, summary


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: (number, value)."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 0:
            yield number, varint()
        elif kind == 2:
            size = varint()
            yield number, data[at : at + size]
            at += size
        else:
            size, form = {1: (8, "<d"), 5: (4, "<f")}[kind]
            yield number, struct.unpack(form, data[at : at + size])[0]
            at += size
    assert at == len(data)


def records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size, check = struct.unpack("<QI", data[at : at + 12])
        body = data[at + 12 : at + 12 + size]
        assert check == masked(data[at : at + 8]) and len(body) == size
        assert struct.unpack("<I", data[at + 12 + size : at + 16 + size])[0] == masked(body)
        yield body
        at += 16 + size


def events(path: Path) -> list[dict[int, Any]]:
    return [dict(fields(body)) for body in records(path.read_bytes())]


def scalars(found: dict[int, Any]) -> dict[str, float]:
    values = [dict(fields(value)) for _, value in fields(found[5])]
    return {value[1].decode(): value[2] for value in values}


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),  # the check value of CRC-32C
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_checksums_are_those_of_the_standard(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


def test_the_bytes_of_a_record() -> None:
    made = record(event(3, 1.5, summary=summary({"loss": 0.5})))
    body = bytes.fromhex("09000000000000f83f10032a0d0a0b0a046c6f7373150000003f")
    assert made[12:-4] == body and made[:8] == struct.pack("<Q", len(body))
    assert (
        struct.unpack("<I", made[8:12])[0]
        == (((crc32c(made[:8]) >> 15) | (crc32c(made[:8]) << 17)) + 0xA282EAD8) % 2**32
    )


def test_a_run_is_written_as_it_goes(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "board")
    assert not (tmp_path / "board").exists(), "nothing is written before there is something to say"
    for step in range(1, 4):
        board(step, {"loss": 1 / step, "tokens/s": 1e5, "odd": math.nan, "huge": -1e300})
        (path,) = (tmp_path / "board").iterdir()
        assert "tfevents" in path.name and len(events(path)) == 2 + step, "each step is there at once"
    first, start, *steps = events(path)
    assert first[3] == b"brain.Event:2" and first[1] > 1e9
    assert start[2] == 1 and dict(fields(start[7])) == {1: 1}
    assert [one[2] for one in steps] == [1, 2, 3]
    found = scalars(steps[1])
    assert (
        found["loss"] == 0.5
        and found["tokens per s"] == 1e5
        and math.isnan(found["odd"])
        and found["huge"] == -math.inf
    )
    board.close()
    board.close()


def test_a_run_that_goes_on_says_from_where(tmp_path: Path) -> None:
    killed = TensorBoard(tmp_path)
    for step in range(1, 9):
        killed(step, {"loss": 1.0})
    again = TensorBoard(tmp_path)
    again(5, {"loss": 2.0})
    old, new = sorted(tmp_path.iterdir())
    assert [one[2] for one in events(new)] == [0, 5, 5] and 7 in events(new)[1]
    assert len(events(old)) == 10, "what was there is not touched"
    killed.close(), again.close()


def test_a_disk_that_refuses_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    blocked = TensorBoard(tmp_path / "file" / "board")
    blocked(1, {"loss": 1.0})
    assert blocked.problem
    board = TensorBoard(tmp_path / "board")
    board(1, {"loss": 1.0})

    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "full")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "full")

    assert board._file is not None
    board._file.close()
    monkeypatch.setattr(board, "_file", Full())
    board(2, {"loss": 1.0})
    board(3, {"loss": 1.0})
    assert board.problem == "full" and board._file is None


@given(st.dictionaries(st.text(max_size=10), st.floats() | st.integers(), max_size=5), st.integers(0, 2**62))
def test_any_point_can_be_read_back(point: dict[str, float], step: int) -> None:
    (body,) = records(record(event(step, 2.0, summary=summary(point))))
    found = dict(fields(body))
    assert found[2] == step
    values = [dict(fields(value)) for _, value in fields(found[5])]
    assert len(values) == len(point)
    for value, wanted in zip(values, point.values(), strict=True):
        close = pytest.approx(float(wanted), rel=1e-6, abs=1e-44, nan_ok=True)
        assert value[2] == close or (math.isinf(value[2]) and abs(wanted) > 3e38)
