"""The loss with its gradient, made in the place of the scores, against autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.ops.cross_entropy import cross_entropy_with_slope


@given(st.integers(1, 6), st.integers(2, 40), st.sampled_from([0.0, 1e-2]), st.integers(0, 10**6))
def test_values_and_gradient_are_those_of_autograd(rows: int, vocab: int, z: float, seed: int) -> None:
    torch.manual_seed(seed)
    scores = torch.randn(rows, vocab, dtype=torch.float64) * 4
    targets = torch.randint(0, vocab, (rows,))
    weights = torch.rand(rows, dtype=torch.float64).where(torch.rand(rows) > 0.2, torch.zeros(()).double())
    leaf = scores.clone().requires_grad_()
    nll = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
    spread = leaf.logsumexp(-1)
    (weights * (nll + z * spread.square())).sum().backward()
    told = cross_entropy_with_slope(scores.clone(), targets, weights, z)
    torch.testing.assert_close(told.nll, nll.detach())
    torch.testing.assert_close(told.spread, spread.detach())
    torch.testing.assert_close(told.slope, leaf.grad)
    assert torch.equal(told.best, scores.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_has_the_dtype_of_the_scores(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scores, targets, weights = torch.randn(5, 33).to(dtype), torch.randint(0, 33, (5,)), torch.ones(5)
    told = cross_entropy_with_slope(scores.clone(), targets, weights)
    wanted = scores.float().softmax(-1) - torch.nn.functional.one_hot(targets, 33)
    assert told.slope.dtype == dtype and told.nll.dtype == torch.float32
    torch.testing.assert_close(told.slope.float(), wanted, atol=4e-3, rtol=1e-2)
    assert torch.allclose(told.slope.float().sum(-1), torch.zeros(5), atol=2e-2), "a row pushes as much up as down"
