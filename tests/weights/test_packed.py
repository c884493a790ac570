"""Packed files: what is written is what is read, in its place, and a file that is not whole is never used."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import BadFile, DiskFull, OrchardError, UsageError
from orchard.weights import packed
from orchard.weights.packed import ALIGNMENT, FILLING, PackedFile, write_packed
from orchard.weights.safetensors import SafetensorsFile

HEADER = {"plan": {"steps": [1, 2.5, "é"]}, "source": {"path": "x", "size": 3}}


def arrays() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    return {
        "matrix": numbers.integers(0, 256, 4096, dtype=np.uint8),
        "odd": numbers.integers(0, 256, 77, dtype=np.uint8),
        "norm": numbers.normal(size=(3, 5)).astype(np.float32),
        "ids": np.arange(7, dtype=np.int32),
        "empty": np.zeros((0, 4), np.float32),
        "one": np.ones((), np.float32),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_packed(tmp_path / "model.orchard", HEADER, arrays())
    return tmp_path / "model.orchard"


def test_round_trip(file: Path) -> None:
    with PackedFile.open(file) as found:
        assert {key: found.header[key] for key in HEADER} == HEADER
        assert found.tensors.keys() == arrays().keys()
        for name, array in arrays().items():
            assert found.tensors[name].dtype == array.dtype
            np.testing.assert_array_equal(found.tensors[name], array)
        found.verify()


def test_arrays_lie_in_the_file_and_cannot_be_written(file: Path) -> None:
    found = PackedFile.open(file)
    matrix = found.tensors["matrix"]
    assert not matrix.flags.owndata and not matrix.flags.writeable
    found.close()
    file.unlink()
    np.testing.assert_array_equal(matrix, arrays()["matrix"])  # the mapping outlives the file and its reader


sizes = st.lists(st.tuples(st.sampled_from(["uint8", "float32", "int32"]), st.integers(0, 300)), max_size=12)


@given(sizes=sizes)
def test_every_tensor_is_aligned_and_nothing_is_lost(sizes: list[tuple[str, int]], tmp_path_factory: object) -> None:
    path = Path(tmp_path_factory.mktemp("packed") / "x.orchard")  # type: ignore[attr-defined]
    given_arrays = {f"t{i}": np.arange(size).astype(dtype) for i, (dtype, size) in enumerate(sizes)}
    write_packed(path, {}, given_arrays)
    with SafetensorsFile.open(path) as file:
        for name, info in file.tensors.items():
            assert name.startswith(FILLING) or info.offset % ALIGNMENT == 0
    with PackedFile.open(path) as found:
        for name, array in given_arrays.items():
            np.testing.assert_array_equal(found.tensors[name], array)
            assert found.tensors[name].size == 0 or found.tensors[name].ctypes.data % ALIGNMENT == 0


def test_other_programs_can_read_it(file: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    theirs = safetensors.load_file(file)
    for name, array in arrays().items():
        np.testing.assert_array_equal(theirs[name], array)


@pytest.mark.parametrize("name", [f"{FILLING}0", "__metadata__"])
def test_names_with_a_meaning_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        write_packed(tmp_path / "x.orchard", {}, {name: np.zeros(3, np.uint8)})
    with pytest.raises(UsageError, match="float64"):
        write_packed(tmp_path / "x.orchard", {}, {"x": np.zeros(3)})
    assert not any(tmp_path.iterdir())


def test_truncation_at_every_place(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    short = tmp_path / "short.orchard"
    for length in [*range(300), *range(300, len(data), 97), len(data) - 1]:
        short.write_bytes(data[:length])
        with pytest.raises(BadFile):
            PackedFile.open(short)
    short.write_bytes(data + b"\0")
    with pytest.raises(BadFile):
        PackedFile.open(short)


def test_damage_anywhere_is_told_or_harmless(file: Path, tmp_path: Path) -> None:
    """Hundreds of changed bytes: the file is refused, or what it says is still what was written."""
    data, changes = file.read_bytes(), random.Random(0)
    start = 8 + int.from_bytes(data[:8], "little")
    other = tmp_path / "other.orchard"
    for round_ in range(600):
        bad = bytearray(data)
        for _ in range(changes.choice([1, 1, 1, 4, 30])):
            bad[changes.randrange(len(data) if round_ % 3 else start)] = changes.randrange(256)
        other.write_bytes(bad)
        try:
            with PackedFile.open(other) as found:
                assert {key: found.header[key] for key in HEADER} == HEADER
                found.verify()
                for name, array in arrays().items():
                    np.testing.assert_array_equal(found.tensors[name].reshape(-1), array.reshape(-1))
        except BadFile:
            continue


def test_a_changed_byte_of_a_tensor_is_found_by_verify(file: Path) -> None:
    data = bytearray(file.read_bytes())
    with SafetensorsFile.open(file) as plain:
        data[plain.tensors["matrix"].offset + 100] ^= 1
    file.write_bytes(data)
    with PackedFile.open(file) as found:  # opening reads no tensors
        found.verify("norm", "ids")
        with pytest.raises(BadFile, match="matrix"):
            found.verify()


@pytest.mark.parametrize("version", ["FORMAT", "LAYOUT"])
def test_another_version_is_refused(version: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, version, 99)
    with pytest.raises(BadFile, match=r"not 99"):
        PackedFile.open(file)


def rewritten(file: Path, change: object) -> None:
    """The file with its description changed and its checksum right: what a hostile writer would make."""
    import zlib

    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    inner = json.loads(header["__metadata__"]["orchard"])
    change(header, inner)  # type: ignore[operator]
    text = json.dumps(inner)
    header["__metadata__"] = {"orchard": text, "orchard.crc32": f"{zlib.crc32(text.encode()):08x}"}
    out = json.dumps(header).encode()
    out += b" " * (-(8 + len(out)) % ALIGNMENT)
    file.write_bytes(len(out).to_bytes(8, "little") + out + data[8 + length :])


def test_a_description_that_does_not_fit_is_refused(file: Path) -> None:
    original = file.read_bytes()
    changes = [
        lambda header, inner: inner.pop("crc32"),
        lambda header, inner: inner["crc32"].pop("norm"),
        lambda header, inner: inner["crc32"].update(more=1),
        lambda header, inner: inner.update(crc32=[1]),
        lambda header, inner: inner.update(format="1"),
        lambda header, inner: inner.update(layout=None),
        lambda header, inner: header["norm"].update(dtype="F64", shape=[15, 1]),
        lambda header, inner: header["norm"].update(dtype="BF16", shape=[30]),
        lambda header, inner: header["norm"].update(shape=[15, 2]),
        lambda header, inner: header["empty"].update(shape=[0, 2**62]),
        lambda header, inner: header["ids"].update(data_offsets=[0, 28]),
    ]
    for change in changes:
        file.write_bytes(original)
        rewritten(file, change)
        try:
            with PackedFile.open(file) as found:
                assert found.tensors["empty"].size == 0  # a strange shape of nothing may pass
        except OrchardError as error:
            assert isinstance(error, BadFile)


def test_a_misplaced_tensor_is_refused(tmp_path: Path) -> None:
    """Sound as safetensors, but a kernel could not read it: no padding before the second tensor."""
    from orchard.weights.safetensors import write_safetensors

    torch = pytest.importorskip("torch")
    write_packed(tmp_path / "a.orchard", {}, {"x": np.zeros(3, np.float32), "y": np.zeros(3, np.float32)})
    with SafetensorsFile.open(tmp_path / "a.orchard") as file:
        metadata = file.metadata
    tensors = {name: torch.zeros(3) for name in "xy"}
    write_safetensors(tmp_path / "b.orchard", tensors, metadata)
    with pytest.raises(BadFile, match="place"):
        PackedFile.open(tmp_path / "b.orchard")


def test_things_that_are_no_packed_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello there, this is not a file of weights")
    for name in ("empty", "text", "missing", "."):
        with pytest.raises(BadFile):
            PackedFile.open(tmp_path / name)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull):
        write_packed(tmp_path / "x.orchard", {}, arrays())
    assert not any(tmp_path.iterdir())
