"""Safetensors files: what is written is read back, by Orchard and by the reference package, and damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import BadFile, ModelNotFound, UnsupportedFormat, UsageError
from orchard.weights.safetensors import MAX_HEADER_BYTES, Lazy, SafetensorsFile, write_safetensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def random_tensor(shape: list[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10
    return noise > 0 if dtype == torch.bool else noise.to(dtype)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal bit for bit, in dtype and shape too."""
    return (
        one.dtype == two.dtype
        and one.shape == two.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))
    )


tensor_maps = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(DTYPES)),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(plan=tensor_maps, metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_any_tensors_round_trip(
    tmp_path_factory: pytest.TempPathFactory, plan: dict[str, Any], metadata: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    tensors = {name: random_tensor(*what, seed=number) for number, (name, what) in enumerate(plan.items())}
    write_safetensors(path, tensors, metadata)
    first = path.read_bytes()
    with SafetensorsFile.open(path) as file:
        assert file.metadata == metadata
        assert set(file.tensors) == set(tensors)
        for name, tensor in tensors.items():
            assert same(file.read(name), tensor)
    theirs = reference.load(first)
    assert all(same(theirs[name], tensor) for name, tensor in tensors.items())
    write_safetensors(path, dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert path.read_bytes() == first  # order does not matter


def test_the_reference_writes_and_orchard_reads(tmp_path: Path) -> None:
    tensors = {str(dtype): random_tensor([3, 5], dtype) for dtype in DTYPES}
    reference.save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    with SafetensorsFile.open(tmp_path / "x.safetensors") as file:
        assert file.metadata == {"format": "pt"}
        assert all(same(file.read(name), tensor) for name, tensor in tensors.items())
        info = file.tensors["torch.bfloat16"]
        assert (info.dtype, info.shape, info.nbytes) == ("BF16", (3, 5), 30)


def test_views_and_functions_are_written_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    calls: list[str] = []

    def make() -> torch.Tensor:
        calls.append("load")
        return base + 1

    tensors = {"turned": base.T, "part": base[:, 1], "plain": make, "lazy": Lazy((3, 4), torch.float32, make)}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    assert len(calls) == 3  # a plain function is asked for its shape first, a Lazy is not
    found = reference.load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["turned"], base.T) and torch.equal(found["part"], base[:, 1])
    assert torch.equal(found["plain"], base + 1) and torch.equal(found["lazy"], base + 1)


def test_a_read_tensor_has_its_own_memory(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(4)})
    file = SafetensorsFile.open(tmp_path / "x.safetensors")
    tensor = file.read("a")
    tensor += 1
    assert file.read("a").tolist() == [1.0] * 4
    file.close()
    assert tensor.tolist() == [2.0] * 4
    with pytest.raises(UsageError, match="closed"):
        file.read("a")


def build(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


TWO = {
    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
}
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "short": (b"\0" * 7, "too short"),
    "huge header": (build({}, length=2**63), "claims a header"),
    "above the cap": (build({}, length=MAX_HEADER_BYTES + 1), "claims a header"),
    "cut header": (build({}, length=50), "ends inside its header"),
    "not json": (build(b"{'a':1}"), "not valid JSON"),
    "not utf8": (build(b'{"\xff":1}'), "not valid JSON"),
    "a list": (build([]), "JSON list, not an object"),
    "deep": (build(b"[" * 3000 + b"]" * 3000), "nested too deeply"),
    "deeper": (build(b'{"a":' * 200_000), "made of brackets"),
    "many values": (build(b'{"a":[' + b"1," * 1_000_001 + b"1]}"), "more than 1,000,000 values"),
    "huge number": (build(b'{"a":' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "twice": (build(b'{"a":1,"a":1}'), "appears twice"),
    "metadata": (build({"__metadata__": {"a": 1}}), "map text to text"),
    "entry": (build({"a": 1}), "must have a dtype"),
    "extra field": (build({"a": {**one()["a"], "x": 1}}, bytes(8)), "nothing else"),
    "dtype": (build(one(dtype=3), bytes(8)), "not text"),
    "negative": (build(one(shape=[-2])), "impossible shape"),
    "bool": (build(one(shape=[True, 2]), bytes(8)), "impossible shape"),
    "float": (build(one(shape=[2.0]), bytes(8)), "impossible shape"),
    "overflow": (build(one(shape=[2**62, 4], offsets=[0, 0])), "too large to address"),
    "hidden overflow": (build(one(shape=[0, 2**62, 2**62], offsets=[0, 0])), "too large to address"),
    "many dims": (build(one(shape=[1] * 33, offsets=[0, 4]), bytes(4)), "impossible shape"),
    "size": (build(one(shape=[3]), bytes(8)), "does not fit F32"),
    "outside": (build(one(), bytes(7)), "outside the file"),
    "backwards": (build(one(offsets=[8, 0]), bytes(8)), "outside the file"),
    "three offsets": (build(one(offsets=[0, 4, 8]), bytes(8)), "outside the file"),
    "tail": (build(one(), bytes(9)), "1 bytes at the end"),
    "gap": (build({**TWO, "b": {**TWO["b"], "data_offsets": [5, 9]}}, bytes(9)), "'b' leaves a gap"),
    "overlap": (build({**TWO, "b": {**TWO["b"], "data_offsets": [3, 7]}}, bytes(7)), "'b' overlaps"),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named(case: str, tmp_path: Path) -> None:
    data, message = CASES[case]
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(BadFile, match=message) as caught:
        SafetensorsFile.open(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in caught.value.message and caught.value.hint


def test_unknown_dtypes_are_listed_but_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for dtype, shape, size in (("F4", [4], 2), ("FUTURE", [7], 5)):
        path.write_bytes(build(one(dtype, shape, [0, size]), bytes(size)))
        with SafetensorsFile.open(path) as file:
            assert file.tensors["a"].nbytes == size
            with pytest.raises(UnsupportedFormat, match=dtype):
                file.read("a")


def test_a_bool_byte_above_one_is_true(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(build(one("BOOL", [3], [0, 3]), b"\x00\x01\xff"))
    assert SafetensorsFile.open(tmp_path / "x.safetensors").read("a").int().tolist() == [0, 1, 1]


def test_missing_files_and_tensors(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        SafetensorsFile.open(tmp_path / "none.safetensors")
    with pytest.raises(BadFile, match="is a folder"):
        SafetensorsFile.open(tmp_path)
    write_safetensors(tmp_path / "x.safetensors", {})
    with pytest.raises(BadFile, match="no tensor 'a'"):
        SafetensorsFile.open(tmp_path / "x.safetensors").read("a")


changing = iter([torch.ones(2), torch.ones(3)])
BAD_WRITES: dict[str, Callable[[Path], None]] = {
    "dtype": lambda p: write_safetensors(p, {"a": torch.zeros(2, dtype=torch.complex64)}),
    "reserved": lambda p: write_safetensors(p, {"__metadata__": torch.zeros(2)}),
    "surrogate": lambda p: write_safetensors(p, {"\ud800": torch.zeros(2)}),
    "metadata": lambda p: write_safetensors(p, {}, {"a": 1}),  # type: ignore[dict-item]
    "changed": lambda p: write_safetensors(p, {"a": lambda: next(changing)}),
    "lazy lied": lambda p: write_safetensors(p, {"a": Lazy((3,), torch.float32, lambda: torch.zeros(2))}),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_wrong_writes_leave_nothing_behind(case: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"before")
    with pytest.raises(UsageError) as caught:
        BAD_WRITES[case](tmp_path / "kept")
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_bytes() == b"before"
