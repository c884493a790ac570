"""The divergence from a teacher with its gradient, made in the place of the scores, against autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from orchard.ops.forward_kl import forward_kl_with_slope


@given(
    st.integers(1, 6), st.integers(2, 40), st.sampled_from([(1.0, 0.0), (1.0, 0.3), (2.5, 0.0)]), st.integers(0, 10**6)
)
def test_values_and_gradient_are_those_of_autograd(rows: int, vocab: int, how: tuple[float, float], seed: int) -> None:
    torch.manual_seed(seed)
    (tau, hard), (scores, teacher) = how, torch.randn(2, rows, vocab, dtype=torch.float64) * 4
    targets = torch.randint(0, vocab, (rows,))
    weights = torch.rand(rows, dtype=torch.float64).where(torch.rand(rows) > 0.2, torch.zeros(()).double())
    leaf = scores.clone().requires_grad_()
    p, q = (teacher / tau).log_softmax(-1), (leaf / tau).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    nll = functional.cross_entropy(leaf, targets, reduction="none")
    (weights * ((1 - hard) * tau**2 * kl + hard * nll)).sum().backward()
    found = forward_kl_with_slope(scores.clone(), teacher, targets, weights, temperature=tau, hard=hard)
    torch.testing.assert_close(found.kl, kl.detach())
    torch.testing.assert_close(found.slope, leaf.grad)
    assert torch.equal(found.best, scores.argmax(-1))
    if tau == 1:
        torch.testing.assert_close(found.nll, nll.detach())


def test_what_the_teacher_holds_impossible_counts_for_nothing() -> None:
    teacher = torch.tensor([[1.0, float("-inf"), 0.5]])
    found = forward_kl_with_slope(torch.tensor([[0.2, 3.0, 0.1]]), teacher, torch.tensor([0]), torch.ones(1))
    assert torch.isfinite(found.kl).all() and torch.isfinite(found.slope).all() and found.slope[0, 1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_has_the_dtype_of_the_scores(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scores, teacher = torch.randn(2, 5, 33).to(dtype)
    found = forward_kl_with_slope(scores.clone(), teacher, torch.zeros(5, dtype=torch.long), torch.ones(5))
    assert found.slope.dtype == dtype and found.kl.dtype == torch.float32
    wanted = scores.float().softmax(-1) - teacher.float().softmax(-1)
    torch.testing.assert_close(found.slope.float(), wanted, atol=4e-3, rtol=1e-2)
