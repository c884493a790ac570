"""Every block format equals the reference (`gguf.quants`) bit for bit, in both directions where Orchard writes it."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import quants as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import BadFile, UnsupportedFormat, UsageError
from orchard.weights.gguf.quants import CHUNK_VALUES, READABLE, WRITABLE, dequantize, quantize
from orchard.weights.gguf.types import GGMLType

# Where the half-precision scales lie in a block, so that random bytes can be given finite ones.
SCALES_AT = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
EXPECTED = {"F32", "F16", "BF16", *SCALES_AT}


def random_blocks(kind: GGMLType, blocks: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind.block_size == 1:
        values = rng.normal(size=blocks).astype(np.float32)
        return quantize(values, kind) if kind is not GGMLType.F32 else values.view(np.uint8)
    raw = rng.integers(0, 256, (blocks, kind.type_size), dtype=np.uint8)
    for at in SCALES_AT[kind.name]:
        scales = (rng.normal(size=blocks) * 10.0 ** rng.integers(-6, 3, blocks)).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.reshape(-1)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)


def test_the_readable_types_are_the_promised_ones() -> None:
    assert {kind.name for kind in READABLE} == EXPECTED
    assert {kind.name for kind in WRITABLE} == {"F32", "F16", "BF16", "Q8_0", "Q4_0"}


def test_ids_and_sizes_equal_the_reference() -> None:
    assert {kind.name: int(kind) for kind in GGMLType} == {
        kind.name: int(kind) for kind in gguf.GGMLQuantizationType if kind.name in GGMLType.__members__
    }
    for kind in GGMLType:
        if kind is GGMLType.Q8_1:  # never stored in files; ggml itself has 36 bytes since its scales became halves
            continue
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind))]
        assert (kind.block_size, kind.type_size) == sizes, kind.name


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_dequantize_is_bit_exact(name: str) -> None:
    kind = GGMLType[name]
    for seed in range(3):
        raw = random_blocks(kind, 96 * 7, seed)
        shape = (7, 96 * kind.block_size)
        ours = dequantize(raw, kind, shape)
        theirs = reference.dequantize(
            raw.view(np.float32 if name == "F32" else np.float16 if name == "F16" else np.uint8),
            gguf.GGMLQuantizationType(int(kind)),
        )
        assert ours.shape == shape and ours.dtype == np.float32
        assert np.array_equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_chunks_meet_without_a_seam(name: str) -> None:
    kind = GGMLType[name]
    blocks = 2 * CHUNK_VALUES // kind.block_size + 5
    raw = random_blocks(kind, blocks, 4)
    theirs = reference.dequantize(raw, gguf.GGMLQuantizationType(int(kind)))
    assert np.array_equal(bits(dequantize(raw, kind, (blocks * kind.block_size,))), bits(theirs))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.integers(-6, 4), grain=st.sampled_from([0.0, 0.5, 1.0]))
def test_quantize_is_bit_exact(name: str, seed: int, spread: int, grain: float) -> None:
    """`grain` puts values on a coarse grid, so that ties in rounding and equal extremes come up often."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(3, 256)).astype(np.float32) * np.float32(10.0**spread)
    if grain:
        values = (np.round(values / grain) * grain).astype(np.float32)
    values[0, :32] = 0
    kind = GGMLType[name]
    ours = quantize(values, kind)
    with np.errstate(over="ignore"):
        theirs = reference.quantize(values, gguf.GGMLQuantizationType(int(kind)))
    assert ours.dtype == np.uint8
    assert ours.shape == (3, 256 // kind.block_size * kind.type_size)
    assert ours.tobytes() == theirs.tobytes()


def test_bf16_rounds_special_values_as_the_reference() -> None:
    patterns = np.array(
        [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x80000001],
        np.uint32,
    )
    values = patterns.view(np.float32)
    theirs = reference.quantize(values, gguf.GGMLQuantizationType.BF16)
    assert quantize(values, GGMLType.BF16).tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("name", "steps"), [("Q8_0", 254), ("Q4_0", 16)])
def test_quantize_then_dequantize_stays_within_one_step(name: str, steps: int) -> None:
    values = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    back = dequantize(quantize(values, GGMLType[name]), GGMLType[name], values.shape)
    step = 2 * np.abs(values).max(axis=1, keepdims=True) / steps
    assert (np.abs(back - values) <= step * 1.01).all()


def test_extra_memory_stays_small() -> None:
    kind = GGMLType.Q5_K
    raw = np.zeros(kind.nbytes((1 << 23,)), np.uint8)  # 32 MiB of float32
    dequantize(raw[: kind.type_size], kind, (256,))
    tracemalloc.start()
    try:
        values = dequantize(raw, kind, (1 << 23,))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - values.nbytes < 8 << 20


def test_wrong_sizes_and_types_are_typed_errors() -> None:
    with pytest.raises(BadFile, match="cannot be a Q8_0"):
        dequantize(np.zeros(33, np.uint8), GGMLType.Q8_0, (32,))
    with pytest.raises(BadFile):
        dequantize(np.zeros(34, np.uint8), GGMLType.Q8_0, (2, 16))
    with pytest.raises(UnsupportedFormat, match="IQ2_XS") as caught:
        dequantize(np.zeros(74, np.uint8), GGMLType.IQ2_XS, (256,))
    assert "Q4_K" in caught.value.hint
    with pytest.raises(UnsupportedFormat, match="Q4_K"):
        quantize(np.zeros(256, np.float32), GGMLType.Q4_K)
    with pytest.raises(UsageError, match="multiple of 32"):
        quantize(np.zeros((4, 33), np.float32), GGMLType.Q8_0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_values_that_have_no_scale_are_refused(name: str, value: float) -> None:
    values = np.ones(32, np.float32)
    values[5] = value
    with pytest.raises(UsageError, match="not finite"):
        quantize(values, GGMLType[name])
