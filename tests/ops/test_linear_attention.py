"""Linear attention behind a window: three forms that give the same, documents apart, padding that counts for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.core.context import KVView
from orchard.ops.linear_attention import beyond, chunked, features, gathered, naive, read, recurrent

CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


def made(rows: int, heads: int, groups: int, tokens: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads * groups, tokens, dim, generator=make) * 2
    k = torch.randn(rows, heads, tokens, dim, generator=make) * 2
    return q, k, torch.randn(rows, heads, tokens, dim, generator=make)


def by_hand(q: Tensor, k: Tensor, v: Tensor, shift: int, documents: Tensor | None = None) -> Tensor:
    """The definition, by loops in float64."""
    groups = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                a = q[b, h, t].double()
                phi = torch.cat([a.softmax(0), (-a).softmax(0)])
                for i in range(t - shift + 1):
                    if documents is None or documents[b, i] == documents[b, t]:
                        c = k[b, h // groups, i].double()
                        weight = phi @ torch.cat([c.softmax(0), (-c).softmax(0)])
                        out[b, h, t] += weight * v[b, h // groups, i].double()
    return out.float()


def view_of(k: Tensor, v: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> KVView:
    places = torch.arange(k.shape[2]).expand(k.shape[0], -1) if positions is None else positions
    own = None if documents is None else documents[:, None]
    return KVView(k, v, places[:, None], places[:, None] >= 0, documents=own, raw=k)


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 12),
    shift=st.integers(1, 6),
    chunk=st.integers(1, 9),
    groups=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_three_forms_give_what_the_definition_says(tokens: int, shift: int, chunk: int, groups: int, seed: int) -> None:
    q, k, v = made(1, 2, groups, tokens, 4, seed)
    want = by_hand(q, k, v, shift)
    mask = beyond(torch.arange(tokens)[None], view_of(k, v), shift)
    for got in (naive(q, k, v, mask), chunked(q, k, v, shift=shift, chunk=chunk), recurrent(q, k, v, shift=shift)):
        torch.testing.assert_close(got, want, **CLOSE)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    shift=st.integers(1, 4),
    chunk=st.integers(1, 6),
    padding=st.integers(0, 3),
)
def test_documents_of_a_row_do_not_see_each_other(lengths: list[int], shift: int, chunk: int, padding: int) -> None:
    tokens = sum(lengths) + padding
    q, k, v = made(1, 2, 2, tokens, 4, len(lengths))
    parts = [torch.full((length,), number) for number, length in enumerate(lengths)] + [torch.full((padding,), -1)]
    documents = torch.cat(parts)[None]
    places = torch.cat([*(torch.arange(length) for length in lengths), torch.full((padding,), -1)])[None]
    view = view_of(k, v, documents, places)
    real = tokens - padding
    want = by_hand(q, k, v, shift, documents)[:, :, :real]
    got = chunked(q, k, v, shift=shift, chunk=chunk, valid=view.valid, documents=view.documents)
    torch.testing.assert_close(got[:, :, :real], want, **CLOSE)
    got = naive(q, k, v, beyond(places, view, shift))
    torch.testing.assert_close(got[:, :, :real], want, **CLOSE)


@settings(max_examples=20, deadline=None)
@given(slots=st.integers(2, 16), tokens=st.integers(1, 9), shift=st.integers(1, 5), gone=st.integers(0, 8))
def test_a_sequence_goes_on_from_its_sum(slots: int, tokens: int, shift: int, gone: int) -> None:
    """The first tokens only as a sum, some more as slots, the last ones as queries too."""
    slots = max(slots, tokens)
    q, k, v = made(2, 1, 2, gone + slots, 4, slots)
    want = recurrent(q, k, v, shift=shift)[:, :, gone + slots - tokens :]
    if gone:
        # A sum may only hold what every query sees: that is so when as many slots as the window are still there.
        slots, gone = (slots, gone) if slots - tokens >= shift - 1 else (slots + gone, 0)
    state = gathered(k[:, :, :gone], v[:, :, :gone])
    got = chunked(
        q[:, :, -tokens:], k[:, :, gone:], v[:, :, gone:], shift=shift, chunk=4, state=state if gone else None
    )
    torch.testing.assert_close(got, want, **CLOSE)


def test_what_is_no_token_counts_for_nothing() -> None:
    q, k, v = made(2, 2, 1, 12, 4, 0)
    valid = torch.ones(2, 1, 12, dtype=torch.bool)
    valid[0, 0, :4] = False
    loud_k, loud_v = (torch.where(valid[..., None], x, 1e4) for x in (k, v))
    want = chunked(q[:1, :, 4:], k[:1, :, 4:], v[:1, :, 4:], shift=2, chunk=5)
    got = chunked(q, loud_k, loud_v, shift=2, chunk=5, valid=valid)
    torch.testing.assert_close(got[:1, :, 4:], want, **CLOSE)
    torch.testing.assert_close(got[1:], chunked(q[1:], k[1:], v[1:], shift=2, chunk=5), **CLOSE)


def test_gradients_of_the_two_parallel_forms_agree() -> None:
    inputs = [x.double().requires_grad_() for x in made(1, 2, 2, 11, 4, 3)]
    mask = beyond(torch.arange(11)[None], view_of(inputs[1], inputs[2]), 3)
    weights = torch.randn(1, 4, 11, 4, dtype=torch.float64)
    found = [
        torch.autograd.grad((y * weights).sum(), inputs)
        for y in (naive(*inputs, mask), chunked(*inputs, shift=3, chunk=4))
    ]
    for one, other in zip(*found, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, other)


def test_features_are_two_softmaxes_over_channels_and_sums_stay_wide() -> None:
    x = torch.randn(3, 5)
    assert torch.allclose(features(x).sum(-1), torch.full((3,), 2.0)) and features(x).shape == (3, 10)
    assert features(x.bfloat16()).dtype == features(x).dtype == torch.float32
    assert features(x.double()).dtype == torch.float64
    q, k, v = (part.bfloat16() for part in made(1, 1, 1, 6, 4, 0))
    with torch.autocast("cpu", torch.bfloat16):
        assert gathered(k, v).dtype == read(q, gathered(k, v)).dtype == torch.float32
        wide = chunked(q, k, v, shift=1, chunk=2)
    torch.testing.assert_close(wide, recurrent(q.float(), k.float(), v.float(), shift=1), **CLOSE)


def test_the_window_is_not_counted_twice() -> None:
    """With shift = w + 1 the oldest token of the window is not in the sum: shifting by w would put it there."""
    q, k, v = made(1, 1, 1, 8, 4, 1)
    seen = chunked(q, k, v, shift=5, chunk=3)
    assert not seen[:, :, :5].any() and seen[:, :, 5:].abs().min() > 0
    other = v.clone()
    other[:, :, 3] += 1  # inside the window of 5 of token 7, and no longer in that of token 8, which is not there
    assert torch.equal(chunked(q, k, other, shift=5, chunk=3), seen)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(chunked(q, k, other, shift=4, chunk=3), chunked(q, k, v, shift=4, chunk=3), **CLOSE)
