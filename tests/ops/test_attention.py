"""Who sees whom, and softmax attention, against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.context import KVView
from orchard.ops.attention import attend, visible


def view_of(positions: torch.Tensor, valid: torch.Tensor, window: int | None, sinks: int) -> KVView:
    empty = torch.zeros(1)
    return KVView(k=empty, v=empty, positions=positions, valid=valid, window=window, sinks=sinks)


@given(
    q=st.lists(st.integers(-1, 8), min_size=1, max_size=4),
    slots=st.lists(st.tuples(st.integers(-1, 8), st.booleans()), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 5),
    kept=st.none() | st.integers(1, 5),
    sinks=st.integers(0, 3),
)
def test_visibility_is_the_written_rule(
    q: list[int], slots: list[tuple[int, bool]], window: int | None, kept: int | None, sinks: int
) -> None:
    positions = torch.tensor([[[place for place, _ in slots]]])
    valid = torch.tensor([[[flag for _, flag in slots]]])
    mask = visible(torch.tensor([q]), view_of(positions, valid, kept, sinks), window)
    assert mask.shape == (1, 1, len(q), len(slots)) and mask.dtype == torch.bool
    for t, p in enumerate(q):
        for s, (place, flag) in enumerate(slots):
            seen = flag and place <= p
            seen = seen and (window is None or p - place < window)
            seen = seen and (kept is None or p - place < kept or place < sinks)
            assert mask[0, 0, t, s].item() == (seen or p < 0)


def test_rows_and_heads_keep_their_own_slots() -> None:
    positions = torch.tensor([[[0, 1], [1, 5]], [[2, 3], [0, 9]]])
    mask = visible(torch.tensor([[1], [3]]), view_of(positions, positions >= 0, None, 0), None)
    assert mask[:, :, 0].tolist() == [[[True, True], [True, False]], [[True, True], [True, False]]]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask_heads", [1, 2])
def test_attention_equals_loops(groups: int, softcap: float | None, mask_heads: int) -> None:
    torch.manual_seed(groups)
    batch, heads, queries, slots, dim, scale = 2, 2, 3, 5, 4, 0.6
    q = torch.randn(batch, heads * groups, queries, dim)
    k, v = torch.randn(2, batch, heads, slots, dim)
    mask = torch.rand(batch, mask_heads, queries, slots) < 0.5
    mask[..., 0] = True  # somebody is always seen
    y = attend(q, k, v, mask, scale=scale, softcap=softcap)
    for b in range(batch):
        for h in range(heads * groups):
            for t in range(queries):
                group = h // groups
                total, want = 0.0, torch.zeros(dim, dtype=torch.float64)
                for s in range(slots):
                    score = scale * float(q[b, h, t].double() @ k[b, group, s].double())
                    score = score if softcap is None else softcap * math.tanh(score / softcap)
                    if mask[b, group if mask_heads > 1 else 0, t, s]:
                        total += math.exp(score)
                        want += math.exp(score) * v[b, group, s].double()
                torch.testing.assert_close(y[b, h, t].double(), want / total, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_hidden_slots_do_not_count_and_padding_stays_finite(softcap: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 2, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    positions, valid = torch.tensor([[[0, 1, -1]]]), torch.tensor([[[True, True, False]]])
    mask = visible(torch.tensor([[1, -1]]), view_of(positions, valid, None, 0), None)
    y = attend(q, k, v, mask, scale=1.0, softcap=softcap)
    k[..., 2, :] = v[..., 2, :] = 1e6
    again = attend(q, k, v, mask, scale=1.0, softcap=softcap)
    assert again[:, :, 0].equal(y[:, :, 0]) and again.isfinite().all()


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_kept(dtype: torch.dtype, softcap: float | None) -> None:
    x = torch.ones(1, 1, 2, 4, dtype=dtype)
    assert attend(x, x, x, torch.ones(1, 1, 2, 2, dtype=torch.bool), scale=1.0, softcap=softcap).dtype == dtype
