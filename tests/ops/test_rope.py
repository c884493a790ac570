"""Rotary positions against complex numbers."""

from __future__ import annotations

import cmath

import pytest
import torch

from orchard.ops import rope


@pytest.mark.parametrize(("theta", "dim"), [(10_000.0, 8), (500_000.0, 2), (10.0, 16)])
def test_frequencies(theta: float, dim: int) -> None:
    want = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    torch.testing.assert_close(rope.frequencies(theta, dim), torch.tensor(want), rtol=1e-6, atol=0)
    assert rope.frequencies(theta, dim).dtype == torch.float32


@pytest.mark.parametrize("rotated", [8, 4, 0])
@pytest.mark.parametrize("gain", [1.0, 1.25])
def test_rotation_is_multiplication_by_a_complex_number(rotated: int, gain: float) -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(2, 3, 4, 8), torch.tensor([[[0, 1, 5, 100]], [[7, -1, 2, 31]]])
    frequencies = rope.frequencies(100.0, rotated) if rotated else torch.zeros(0)
    y = rope.rotate(x, *rope.tables(positions, frequencies, gain))
    assert y[..., rotated:].equal(x[..., rotated:])
    half = rotated // 2
    for b in range(2):
        for h in range(3):
            for t in range(4):
                for i in range(half):
                    turn = cmath.exp(1j * int(positions[b, 0, t]) * float(frequencies[i])) * gain
                    want = complex(x[b, h, t, i], x[b, h, t, i + half]) * turn
                    assert abs(complex(y[b, h, t, i], y[b, h, t, i + half]) - want) < 1e-5


def test_scores_depend_on_the_distance_only() -> None:
    torch.manual_seed(1)
    q, k, frequencies = torch.randn(8), torch.randn(8), rope.frequencies(1000.0, 8)

    def score(i: int, j: int) -> float:
        at = [rope.tables(torch.tensor([p]), frequencies) for p in (i, j)]
        return float(
            rope.rotate(q[None, None, None], *at[0]).flatten() @ rope.rotate(k[None, None, None], *at[1]).flatten()
        )

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4) != pytest.approx(score(9, 5), abs=1e-3)
    assert score(0, 0) == pytest.approx(float(q @ k), abs=1e-5)


def test_tables_are_float32_and_the_result_keeps_its_dtype() -> None:
    cos, sin = rope.tables(torch.tensor([[3]]), rope.frequencies(10.0, 4))
    assert cos.dtype == sin.dtype == torch.float32
    assert rope.rotate(torch.ones(1, 1, 1, 4, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16
