"""Weights in the layout of GPU kernels stand for the same numbers as in the layout of the CPU, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import UnsupportedPair
from orchard.ops.kernels import packing
from orchard.ops.kernels.triton.rows import tiles_of
from orchard.ops.kernels.triton.weights import alike, bring, joined, rounded
from orchard.ops.plan.steps import Matrix

CPU = torch.device("cpu")


def packed(kind: str, rows: int, cols: int, group: int, minimum: bool, seed: int = 0) -> tuple[Matrix, np.ndarray]:
    """A random matrix in the layout of the CPU."""
    random = np.random.default_rng(seed)
    matrix = Matrix("w", kind, rows, cols, group=group if kind in packing.BITS else 1, minimum=minimum)
    if kind not in packing.BITS:
        return matrix, packing.pack_plain(random.normal(size=(rows, cols)).astype(np.float32), kind)
    bits, groups = packing.BITS[kind], -(-cols // group)
    codes = random.integers(0, 2**bits, (rows, cols), np.uint8)
    scales, minima = (random.normal(size=(rows, groups)).astype(np.float16) for _ in range(2))
    data = packing.pack_codes(codes, scales, minima if minimum else None, bits=bits, group=group)
    return matrix, data


@given(
    kind=st.sampled_from(["f32", "bf16", "q8", "q4", "q2"]),
    rows=st.integers(1, 70),
    cols=st.integers(1, 200),
    group=st.sampled_from([32, 64, 128]),
    minimum=st.booleans(),
)
def test_the_same_numbers(kind: str, rows: int, cols: int, group: int, minimum: bool) -> None:
    matrix, data = packed(kind, rows, cols, group, minimum and kind in packing.BITS)
    weight = bring(matrix, data, CPU)
    wanted = packing.values(data, kind, rows, cols, matrix.group, matrix.minimum)
    assert np.array_equal(weight.dense().numpy(), wanted)
    some = torch.tensor([rows - 1, 0])
    assert np.array_equal(weight.at(some).numpy(), wanted[[rows - 1, 0]])


def test_joined_is_one_above_the_other() -> None:
    one, two = (bring(*packed("q4", rows, 96, 32, True, seed=rows), CPU) for rows in (5, 40))
    assert alike([one, two])
    both = joined([one, two])
    assert both.rows == 45
    assert torch.equal(both.dense(), torch.cat([one.dense(), two.dense()]))
    assert not alike([one, bring(*packed("q4", 5, 96, 32, False), CPU)])


@pytest.mark.parametrize(("kind", "most"), [("q8", 0.01), ("q4", 0.11), ("q2", 0.6)])
def test_rounding_stays_near(kind: str, most: float) -> None:
    values = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    assert (rounded(values, kind, 32).dense() - values).abs().max() < most * values.abs().max()


def test_experts_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedPair, match=r"stack\.experts"):
        bring(Matrix("stack.experts", "q4", 32, 32, group=32, count=4), np.zeros(4, np.uint8), CPU)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([1, 4, 16]))
def test_tiles_cover_every_row_once(counts: list[int], tile: int) -> None:
    slots = np.repeat(np.arange(len(counts))[::-1], counts)
    firsts, sizes = tiles_of(slots, tile)
    rows = [row for first, size in zip(firsts, sizes) for row in range(first, first + size)]
    assert rows == list(range(len(slots)))
    assert sizes.max() <= tile
    assert all(len(set(slots[first : first + size])) == 1 for first, size in zip(firsts, sizes))
