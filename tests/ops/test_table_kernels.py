"""Weights that look values up: palettes at their limits, and blocks that are those of the format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from orchard.nn.formats import blocks, blocks_search
from orchard.ops.kernels import linear_twin, packing
from orchard.ops.kernels.blocks import LEVELS, SCALES, pack_blocks
from orchard.ops.kernels.native import why_not
from tests.ops.test_linear_kernels import ENGINE, LINEAR_LEVELS, Packed, pointer, quantised_rows


@pytest.mark.skipif(ENGINE is None, reason=why_not())
@pytest.mark.parametrize("level", LINEAR_LEVELS)
@pytest.mark.parametrize("kind", packing.PALETTES)
def test_palettes_at_their_limits(level: int, kind: str) -> None:
    """The largest sums there can be do not overflow; entries from 1/16 of the largest on are exact; faults show."""
    assert ENGINE is not None
    bits, rows, cols = packing.PALETTES[kind], 48, 96
    tables = np.full((3, 2**bits), 65504, np.float16)
    tables[1] = np.linspace(1 / 16, 1, 2**bits)
    tables[2] = [0, np.nan, *[1] * (2**bits - 2)]
    codes = np.full((rows, cols), 2**bits - 1, np.uint8)
    weight = Packed(kind, rows, cols, 32, False, packing.pack_palette(codes, tables, bits=bits))
    assert np.array_equal(linear_twin.whole_tables(torch.from_numpy(tables[:2])).numpy(), tables[:2].astype(np.float32))
    x = np.ones((1, cols), np.float32)
    digits, scale, sums = quantised_rows(level, x, 32)
    y = np.zeros((1, rows), np.float32)
    pointers = [pointer(digits), pointer(scale), pointer(sums), digits.shape[1], scale.shape[1]]
    ENGINE.orchard_linear_q(level, *weight.arguments, 0, 2, *pointers, 1, pointer(y), rows, 0)
    assert np.allclose(y[0, :16], 65504.0 * cols, rtol=1e-6) and np.allclose(y[0, 16:32], cols, rtol=1e-6)
    assert np.isnan(y[0, 32:]).all()


def test_blocks_are_those_of_the_format() -> None:
    assert (LEVELS, SCALES[:-1]) == (blocks_search.LEVELS, blocks_search.SCALES[:-1])
    random = np.random.default_rng(0)
    for rows, cols in ((6, 6), (70, 50), (33, 7), (100, 96)):
        made = torch.from_numpy(random.integers(0, 256, (-(-rows // 6), -(-cols // 6), 16), dtype=np.uint8))
        packed = {"blocks": made, "extent": torch.empty(rows, cols, 0, dtype=torch.uint8)}
        wanted = blocks.Blocks.Config().build().unpack(packed, torch.float32).numpy()
        data = pack_blocks(made.numpy(), rows, cols)
        assert np.array_equal(packing.values(data, "blocks", rows, cols, packing.BLOCKS_GROUP), wanted, equal_nan=True)
        assert data.size == packing.matrix_bytes("blocks", rows, cols, packing.BLOCKS_GROUP)
