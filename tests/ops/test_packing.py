"""Packed weights come back bit for bit, and stand for the values that the layout says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import BadFile, UsageError
from orchard.ops.kernels import packing


def random_matrix(
    seed: int, rows: int, cols: int, bits: int, group: int, minimum: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (rows, cols), dtype=np.uint8)
    groups = -(-cols // group)
    # Every pattern of bits, not-a-number and subnormal numbers too: packing must not care what a scale means.
    scales = random.integers(0, 2**16, (rows, groups), dtype=np.uint16).view(np.float16)
    minima = random.integers(0, 2**16, (rows, groups), dtype=np.uint16).view(np.float16) if minimum else None
    return codes, scales, minima


shapes = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 130), st.integers(1, 200))


@settings(max_examples=80, deadline=None)
@given(shapes, st.sampled_from([8, 4, 2]), st.sampled_from([32, 64, 96, 128]), st.booleans())
def test_codes_come_back(shape: tuple[int, int, int], bits: int, group: int, minimum: bool) -> None:
    seed, rows, cols = shape
    codes, scales, minima = random_matrix(seed, rows, cols, bits, group, minimum)
    data = packing.pack_codes(codes, scales, minima, bits=bits, group=group)
    assert data.dtype == np.uint8 and data.ctypes.data % 64 == 0
    assert data.size == packing.matrix_bytes(f"q{bits}", rows, cols, group, minimum)
    again, scales_again, minima_again = packing.unpack_codes(data, rows, cols, bits=bits, group=group, minimum=minimum)
    assert np.array_equal(again, codes)
    assert np.array_equal(scales_again.view(np.uint16), scales.view(np.uint16))
    assert (minima_again is None) == (minima is None)
    if minima is not None and minima_again is not None:
        assert np.array_equal(minima_again.view(np.uint16), minima.view(np.uint16))


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from([8, 4, 2]), st.sampled_from([32, 64]), st.booleans())
def test_every_code_lies_where_the_layout_says(
    shape: tuple[int, int, int], bits: int, group: int, minimum: bool
) -> None:
    """Read by hand from the description in kernels.h, byte by byte."""
    seed, rows, cols = shape
    codes, scales, minima = random_matrix(seed, rows, cols, bits, group, minimum)
    data = packing.pack_codes(codes, scales, minima, bits=bits, group=group).tobytes()
    groups, header = -(-cols // group), 128 if minimum else 64
    group_bytes = header + 32 * group * bits // 8
    random = np.random.default_rng(seed)
    for r, c in zip(random.integers(0, rows, 20), random.integers(0, cols, 20), strict=True):
        start = ((r // 32) * groups + c // group) * group_bytes
        lane, within, per_chunk = r % 32, c % group, 4 * (8 // bits)
        chunk, j, byte = within // per_chunk, within % per_chunk // 4, within % 4
        found = data[start + header + chunk * 128 + (lane // 16) * 64 + (lane % 16) * 4 + byte]
        assert found >> (j * bits) & (2**bits - 1) == codes[r, c]
        assert data[start + 2 * lane : start + 2 * lane + 2] == scales[r, c // group].tobytes()
        if minima is not None:
            assert data[start + 64 + 2 * lane : start + 66 + 2 * lane] == minima[r, c // group].tobytes()


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from(["q8", "q4", "q2"]), st.booleans())
def test_values(shape: tuple[int, int, int], kind: str, minimum: bool) -> None:
    seed, rows, cols = shape
    bits = packing.BITS[kind]
    codes, _, _ = random_matrix(seed, rows, cols, bits, 32, minimum)
    random = np.random.default_rng(seed)
    scales = random.normal(size=(rows, -(-cols // 32))).astype(np.float16)
    minima = random.normal(size=scales.shape).astype(np.float16) if minimum else None
    data = packing.pack_codes(codes, scales, minima, bits=bits, group=32)
    which = np.arange(cols) // 32
    wanted = scales[:, which].astype(np.float32) * (codes - np.float32(packing.zero_code(kind, minimum)))
    if minima is not None:
        wanted = wanted + minima[:, which].astype(np.float32)
    assert np.array_equal(packing.values(data, kind, rows, cols, 32, minimum), wanted)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([4, 2]))
def test_palettes_come_back_and_lie_where_the_layout_says(shape: tuple[int, int, int], bits: int) -> None:
    seed, rows, cols = shape
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (rows, cols), dtype=np.uint8)
    tables = random.integers(0, 2**16, (-(-rows // 16), 2**bits), dtype=np.uint16).view(np.float16)
    data = packing.pack_palette(codes, tables, bits=bits)
    assert data.ctypes.data % 64 == 0 and data.size == packing.matrix_bytes(f"p{bits}", rows, cols, 32)
    again, tables_again = packing.unpack_palette(data, rows, cols, bits=bits)
    assert np.array_equal(again, codes) and np.array_equal(tables_again.view(np.uint16), tables.view(np.uint16))
    values = packing.values(data, f"p{bits}", rows, cols, 32)
    raw, block_bytes, per_chunk = data.tobytes(), 64 + -(-cols // 32) * 32 * 32 * bits // 8, 4 * (8 // bits)
    for r, c in zip(random.integers(0, rows, 20), random.integers(0, cols, 20), strict=True):
        start, lane = r // 32 * block_bytes, r % 32
        byte = raw[start + 64 + c // per_chunk * 128 + lane // 16 * 64 + lane % 16 * 4 + c % 4]
        code = byte >> (c % per_chunk // 4 * bits) & (2**bits - 1)
        assert code == codes[r, c]
        entry = raw[start + lane // 16 * 32 + 2 * code : start + lane // 16 * 32 + 2 * code + 2]
        assert entry == tables[r // 16, code].tobytes()
        assert np.array_equal(values[r, c], np.frombuffer(entry, np.float16)[0].astype(np.float32), equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(shapes)
def test_halves_come_back(shape: tuple[int, int, int]) -> None:
    seed, rows, cols = shape
    short = np.random.default_rng(seed).integers(0, 2**16, (rows, cols), dtype=np.uint16).view(np.float16)
    packed = packing.pack_plain(short.astype(np.float32), "f16")
    assert packed.size == packing.matrix_bytes("f16", rows, cols)
    assert np.array_equal(packing.unpack_plain(packed, "f16", rows, cols), short.astype(np.float32), equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_plain_weights_come_back(shape: tuple[int, int, int]) -> None:
    seed, rows, cols = shape
    bits = np.random.default_rng(seed).integers(0, 2**32, (rows, cols), dtype=np.uint32)
    packed = packing.pack_plain(bits.view(np.float32), "f32")
    assert packed.size == packing.matrix_bytes("f32", rows, cols)
    assert np.array_equal(packing.unpack_plain(packed, "f32", rows, cols).view(np.uint32), bits)
    short = (bits >> 16).astype(np.uint16)
    packed = packing.pack_plain(short, "bf16")
    assert packed.size == packing.matrix_bytes("bf16", rows, cols)
    again = packing.unpack_plain(packed, "bf16", rows, cols)
    assert np.array_equal(again.view(np.uint32), short.astype(np.uint32) << 16)
    pairs = packed.view(np.uint16).reshape(-1, -(-cols // 2), 32, 2)
    assert pairs[(rows - 1) // 32, (cols - 1) // 2, (rows - 1) % 32, (cols - 1) % 2] == short[-1, -1]


def test_rounding_to_bfloat_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(3)
    wide = random.integers(0, 2**32, 200_000, dtype=np.uint32)
    wide[:50_000] = wide[:50_000] & 0xFFFF0000 | 0x8000  # exactly half way: the even neighbour
    wide[-4:] = [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x80000000]
    values = wide.view(np.float32)
    ours, theirs = packing.to_bfloat(values), torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    number = ~np.isnan(values)
    assert np.array_equal(ours[number], theirs[number])
    assert np.isnan(packing.from_bfloat(ours[~number])).all()


def test_many_pieces_are_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales, minima = random_matrix(5, 300, 100, 4, 32, True)
    whole = packing.pack_codes(codes, scales, minima, bits=4, group=32)
    monkeypatch.setattr(packing, "_AT_A_TIME", 1)
    assert np.array_equal(packing.pack_codes(codes, scales, minima, bits=4, group=32), whole)
    assert np.array_equal(packing.unpack_codes(whole, 300, 100, bits=4, group=32, minimum=True)[0], codes)


def test_wrong_input_is_refused() -> None:
    codes, scales, _ = random_matrix(1, 40, 64, 4, 32, False)
    data = packing.pack_codes(codes, scales, None, bits=4, group=32)
    with pytest.raises(UsageError, match="needs more than 2 bits"):
        packing.pack_codes(codes, scales, None, bits=2, group=32)
    with pytest.raises(UsageError, match="scales are"):
        packing.pack_codes(codes, scales[:, :1], None, bits=4, group=32)
    with pytest.raises(UsageError, match="groups of 24"):
        packing.pack_codes(codes, scales, None, bits=4, group=24)
    with pytest.raises(UsageError, match="3 bits"):
        packing.pack_codes(codes, scales, None, bits=3, group=32)
    tables = np.zeros((3, 16), np.float16)
    with pytest.raises(UsageError, match="tables are 2 × 16, not 3 × 16"):
        packing.pack_palette(codes, tables[:2], bits=4)
    with pytest.raises(UsageError, match="needs more than 2 bits"):
        packing.pack_palette(codes, tables[:, :4], bits=2)
    with pytest.raises(UsageError, match="palettes of 8 bits"):
        packing.pack_palette(codes, tables, bits=8)
    with pytest.raises(UsageError, match="groups of 64"):
        packing.matrix_bytes("p4", 40, 64, 64)
    with pytest.raises(UsageError, match="nothing to pack"):
        packing.matrix_bytes("f32", 0, 5)
    with pytest.raises(UsageError, match="float64"):
        packing.pack_plain(np.zeros((2, 2)), "f32")
    with pytest.raises(BadFile, match="takes"):
        packing.unpack_codes(data[:-1], 40, 64, bits=4, group=32, minimum=False)
