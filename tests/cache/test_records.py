"""A file of records: what was written comes back, and what is damaged is refused by name."""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.experts import OtherModel, Records, RecordsUnreadable, Source, room, write_records
from orchard.cache.experts.layout import KINDS, PAGE
from orchard.core.errors import BadFile, UsageError


def unit(layer: int, number: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(layer * 100 + number)
    return {
        "gate": torch.randn(6, 5, generator=made).to(torch.bfloat16),
        "scales": torch.randn(7, generator=made),
        "codes": torch.randint(0, 255, (3, 11 + layer), dtype=torch.uint8, generator=made),
    }


def write(path: Path, layers: int = 3, units: int = 4) -> Path:
    sources = [Source(f"layers.{i}", units, lambda number, i=i: unit(i, number)) for i in range(layers)]
    write_records(path, sources, {"model": "tiny", "experts": units})
    return path


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    with Records.open(write(tmp_path / "r"), expect={"model": "tiny"}) as records:
        for layer in range(3):
            for number in (3, 0, 2):
                for name, value in records.get(layer, number).items():
                    assert torch.equal(value, unit(layer, number)[name])
        assert records.reads == 9
        assert records.bytes == 9 * PAGE
        assert records.nbytes == 12 * PAGE == (tmp_path / "r").stat().st_size - PAGE


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(KINDS)), st.lists(st.integers(1, 9), max_size=3)), min_size=1, max_size=5
    ),
    st.integers(1, 4),
)
def test_any_arrays(tmp_path_factory: pytest.TempPathFactory, arrays: list[tuple[str, list[int]]], units: int) -> None:
    path = tmp_path_factory.mktemp("r") / "records"

    def one(number: int) -> dict[str, torch.Tensor]:
        return {
            str(i): torch.full(tuple(shape), number * 10 + i, dtype=getattr(torch, KINDS[kind][0]))
            for i, (kind, shape) in enumerate(arrays)
        }

    write_records(path, [Source("only", units, one)])
    with Records.open(path) as records:
        for number in range(units):
            found = records.get(0, number)
            assert list(found) == sorted(found)
            assert all(torch.equal(found[name], value) for name, value in one(number).items())


def test_direct_reads_need_aligned_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "r")
    try:
        records = Records.open(path, direct=True)
    except UsageError:
        pytest.skip("this file system has no direct reads")
    with records:
        assert torch.equal(records.get(1, 2)["scales"], unit(1, 2)["scales"])
        with pytest.raises(UsageError, match="directly"):
            records.read(0, 0, room(PAGE * 2)[8:])


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    wrong: list[object] = []
    with Records.open(write(tmp_path / "r", units=8)) as records:

        def work(seed: int) -> None:
            for number in np.random.default_rng(seed).integers(0, 8, 40).tolist():
                if not torch.equal(records.get(seed % 3, number)["gate"], unit(seed % 3, number)["gate"]):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert records.reads == 160
    assert not wrong


def test_truncated_and_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "r").read_bytes()
    for size in (0, 7, 15, 40, PAGE, len(whole) - 1, len(whole) - PAGE):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(BadFile):
            Records.open(tmp_path / "cut")
    (tmp_path / "long").write_bytes(whole + b"x")
    with pytest.raises(BadFile, match="longer"):
        Records.open(tmp_path / "long")
    damaged = bytearray(whole)
    damaged[30] ^= 1
    (tmp_path / "bad").write_bytes(damaged)
    with pytest.raises(BadFile, match="header"):
        Records.open(tmp_path / "bad")
    with pytest.raises(BadFile, match="opened"):
        Records.open(tmp_path / "missing")
    with pytest.raises(BadFile):
        Records.open(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"units": -1},
        {"units": 10**9},
        {"units": True},
        {"arrays": {}},
        {"arrays": {"a": {"dtype": "F32", "shape": [2, -3], "at": 0}}},
        {"arrays": {"a": {"dtype": "F32", "shape": [2], "at": 3}}},
        {"arrays": {"a": {"dtype": "pickle", "shape": [2], "at": 0}}},
        {"arrays": {"a": {"dtype": "F32", "shape": [64], "at": 0}, "b": {"dtype": "F32", "shape": [1], "at": 64}}},
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    whole = write(tmp_path / "r", layers=1).read_bytes()
    length = struct.unpack("<I", whole[8:12])[0]
    header = json.loads(whole[16 : 16 + length])
    header["layers"][0].update(change)
    text = json.dumps(header).encode()
    front = b"ORCHREC1" + struct.pack("<II", len(text), zlib.crc32(text)) + text
    (tmp_path / "bad").write_bytes(front.ljust(PAGE, b"\0") + whole[PAGE:])
    with pytest.raises(BadFile):
        Records.open(tmp_path / "bad")


def test_records_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OtherModel, match=r"tiny.*huge"):
        Records.open(write(tmp_path / "r"), expect={"model": "huge"})


def test_a_file_that_is_cut_while_in_use_and_comes_back(tmp_path: Path) -> None:
    path = write(tmp_path / "r")
    whole = path.read_bytes()
    with Records.open(path) as records:
        os.truncate(path, PAGE * 2)
        with pytest.raises(RecordsUnreadable, match="cut"):
            records.get(2, 3)
        with pytest.raises(RecordsUnreadable):  # looked at anew, still cut
            records.get(0, 0)
        path.unlink()
        with pytest.raises(RecordsUnreadable):
            records.get(0, 0)
        path.write_bytes(whole)
        assert torch.equal(records.get(2, 3)["gate"], unit(2, 3)["gate"])
        write_records(path, [Source("another", 1, lambda _: {"x": torch.zeros(3)})])
        records._lost = True
        with pytest.raises(RecordsUnreadable, match="another"):
            records.get(0, 0)


def test_bad_calls(tmp_path: Path) -> None:
    with Records.open(write(tmp_path / "r")) as records:
        with pytest.raises(UsageError, match="units 0 to 3"):
            records.get(0, 4)
        with pytest.raises(UsageError, match="bytes"):
            records.read(0, 0, np.empty(100, np.uint8))
    with pytest.raises(UsageError, match="closed"):
        records.get(0, 0)
    with pytest.raises(UsageError, match="other arrays"):
        write_records(tmp_path / "x", [Source("a", 2, lambda number: {"x": torch.zeros(number + 1)})])
    with pytest.raises(UsageError, match="nothing"):
        write_records(tmp_path / "x", [])
    with pytest.raises(BadFile, match="complex"):
        write_records(tmp_path / "x", [Source("a", 2, lambda _: {"x": torch.zeros(1, dtype=torch.complex64)})])
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_small_units_lie_close_and_neighbours_are_read_at_once(tmp_path: Path) -> None:
    rows = torch.arange(6 * 100, dtype=torch.float32).view(6, 100)
    write_records(tmp_path / "r", [Source("small", 6, lambda unit: {"x": rows[unit]}, page=512)] * 2)
    with Records.open(tmp_path / "r") as records:
        assert [layer.stride for layer in records.layers] == [512, 512]
        assert all(layer.offset % PAGE == 0 for layer in records.layers)
        stage = room(512, 3)
        records.read(1, 2, stage.view(-1), 3)
        assert torch.equal(records.arrays(1, stage)["x"], rows[2:5])
        assert (records.reads, records.bytes) == (1, 3 * 512)
        for unit, count in ((4, 3), (0, 0), (-1, 1)):
            with pytest.raises(UsageError):
                records.read(1, unit, stage.view(-1), count)
        with pytest.raises(UsageError):
            records.read(1, 0, stage.view(-1), 4)
    with pytest.raises(UsageError):
        write_records(tmp_path / "s", [Source("small", 6, lambda unit: {"x": rows[unit]}, page=100)])
