"""The relaxed top-k: it sums to k whatever the scores, its gradient is right, and smaller sets lie in larger ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import ConfigError
from orchard.transforms.ifprune_topk import chosen, soft_top_k, top_k
from orchard.transforms.prune_masks import relaxed_top_k


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(2, 40),
    share=st.floats(0.01, 1.0),
    temperature=st.sampled_from([0.01, 0.1, 1.0, 7.0]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
)
@settings(max_examples=60, deadline=None)
def test_every_row_sums_to_its_k(seed: int, n: int, share: float, temperature: float, spread: float) -> None:
    scores = spread * torch.randn(3, 2, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    k = max(1, round(share * n))
    soft = soft_top_k(scores, k, temperature)
    assert torch.allclose(soft.sum(-1), torch.full((3, 2), float(k), dtype=torch.float64), atol=1e-5)
    assert (soft >= 0).all() and (soft <= 1).all()
    kept = chosen(scores, k, temperature)
    assert ((kept > 0).sum(-1) <= k).all()
    assert torch.equal(top_k(scores, k).sum(-1), torch.full((3, 2), float(k), dtype=torch.float64))
    # What is kept is worth at least as much as what is not.
    hard = top_k(scores, k).bool()
    if k < n:
        assert (scores.masked_fill(~hard, torch.inf).amin(-1) >= scores.masked_fill(hard, -torch.inf).amax(-1)).all()


def test_gradient_is_the_implicit_one() -> None:
    scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([1, 3, 5, 8])
    assert torch.autograd.gradcheck(lambda z: soft_top_k(z, counts, 0.7), (scores,), eps=1e-6, atol=1e-5)


def test_whatever_one_gains_others_lose() -> None:
    scores = torch.randn(5, 12, requires_grad=True)
    (soft_top_k(scores, 4, 0.5) * torch.randn(5, 12)).sum().backward()
    assert scores.grad is not None
    assert scores.grad.abs().max() > 0
    assert torch.allclose(scores.grad.sum(-1), torch.zeros(5), atol=1e-5)


def test_one_row_is_what_learned_masks_have() -> None:
    scores = torch.randn(30, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(soft_top_k(scores[None], 7, 0.3)[0], relaxed_top_k(scores, 7, 0.3), atol=1e-5)


def test_rows_may_keep_different_numbers() -> None:
    scores = torch.randn(3, 6)
    both = soft_top_k(scores, torch.tensor([1, 3, 6]), 0.4)
    for row, k in enumerate((1, 3, 6)):
        assert torch.allclose(both[row], soft_top_k(scores[row : row + 1], k, 0.4)[0], atol=1e-6)
    assert torch.equal(both[2], torch.ones(6))


def test_cold_is_hard() -> None:
    scores = torch.tensor([[0.3, 0.9, -1.0, 0.5]])
    assert torch.allclose(soft_top_k(scores, 2, 1e-3), top_k(scores, 2), atol=1e-6)
    assert top_k(scores, 2).tolist() == [[0, 1, 0, 1]]


def test_of_equals_the_first_are_taken() -> None:
    assert top_k(torch.zeros(1, 5), 2).tolist() == [[1, 1, 0, 0, 0]]


@pytest.mark.parametrize(("k", "temperature"), [(0, 1.0), (7, 1.0), (2, 0.0), (2, -1.0)])
def test_nonsense_is_refused(k: int, temperature: float) -> None:
    with pytest.raises(ConfigError):
        soft_top_k(torch.zeros(2, 6), k, temperature)
    with pytest.raises(ConfigError):
        top_k(torch.zeros(2, 6), torch.tensor([0, 7]))
