"""The sampling head against its numpy twin: the same token, except where a sum lies on the very border of a choice."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.ops.kernels import native, sampling
from orchard.ops.kernels.sampling import Choice, choose, greedy, mask, plain_choose, plain_greedy, plain_mask

BORDER = 1e-12
needs_library = pytest.mark.skipif(
    sampling._library() is None, reason=native.why_not() or "the library is an older one"
)

temperatures = st.one_of(st.sampled_from([1.0, 1e-30, 1e-10, 1e-3, 0.7, 2.0, 1e30]), st.floats(0.01, 10))
choices = st.builds(
    Choice,
    temperature=temperatures,
    top_k=st.one_of(st.just(0), st.integers(1, 5), st.integers(1, 5000)),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0), st.sampled_from([0.5, 0.25, 1 - 1e-12])),
    distance=st.one_of(st.just(-math.inf), st.floats(1e-6, 1).map(math.log)),
)
uniforms = st.one_of(
    st.sampled_from([0.0, 2.0**-53, 1 - 2.0**-53, 0.5]),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1e-9),
    st.floats(1e-16, 1e-9).map(lambda rest: 1 - rest),
)


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Of many lengths and spreads; rounded ones have many equal scores, and some are far below the rest."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.one_of(st.integers(1, 40), st.integers(200, 300), st.integers(1, 6000)))
    spread = draw(st.sampled_from([0.0, 1e-20, 0.01, 1.0, 4.0, 30.0, 1e4]))
    row = rng.standard_normal(count) * spread + draw(st.sampled_from([0.0, -50.0, 1e4]))
    if draw(st.booleans()):
        row = np.round(row)
    if draw(st.booleans()):
        row[rng.random(count) < 0.5] = -3e38
    return row.astype(np.float32)


def on_a_border(scores: np.ndarray, choice: Choice, uniform: float, one: int, other: int) -> bool:
    """Whether rounding may decide between two tokens: the sums between them are the uniform number, or a sum is top_p."""
    if choice.temperature != 1:
        scores = sampling.scaled(scores, choice.temperature)
    if choice.top_k:
        scores = sampling.k_best(scores, choice.top_k)
    if choice.top_p < 1:
        mass = np.sort(sampling._mass(scores))[::-1]
        if np.abs(mass.cumsum() / mass.sum() - choice.top_p).min() < BORDER:
            return True
        scores = sampling.nucleus(scores, choice.top_p)
    if choice.distance > -math.inf:
        scores = sampling.near_best(scores, choice.distance)
    sums = sampling._mass(scores).cumsum()
    low, high = sorted((one, other))
    return (
        bool(np.abs(sums[low:high] / sums[-1] - uniform).max() < BORDER) and min(scores[one], scores[other]) > -math.inf
    )


@needs_library
@settings(max_examples=600)
@given(rows(), choices, uniforms)
def test_both_choose_the_same_token(scores: np.ndarray, choice: Choice, uniform: float) -> None:
    before = scores.copy()
    fast, plain = choose(scores, choice, uniform), plain_choose(scores, choice, uniform)
    assert fast == plain or on_a_border(scores, choice, uniform, fast, plain)
    assert np.array_equal(scores, before)


@needs_library
@given(rows())
def test_greedy(scores: np.ndarray) -> None:
    assert greedy(scores) == plain_greedy(scores) == int(np.argmax(scores))


@needs_library
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 255, 256, 257, 511, 512, 49_152, 50_001])
def test_the_lowest_id_among_equals_wherever_they_are(count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(20):
        scores = -rng.random(count).astype(np.float32) - 1
        places = rng.integers(0, count, 3)
        scores[places] = rng.choice(np.array([0.0, -0.0], np.float32), 3)  # equal, as numbers go
        assert greedy(scores) == plain_greedy(scores) == places.min()
        assert choose(scores, Choice(top_k=1), 0.99) == places.min()


@needs_library
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 5, 256, 300, 4096])
def test_broken_scores_are_seen_wherever_they_are(bad: float, count: int) -> None:
    for place in {0, count // 2, count - 1}:
        scores = np.zeros(count, np.float32)
        scores[place] = bad
        scores[count // 3] = bad if place == count // 3 else 1.0
        for head in (greedy, plain_greedy):
            assert head(scores) == -1
        for draw in (choose, plain_choose):
            assert draw(scores, Choice(), 0.5) == draw(scores, Choice(0.5, 2, 0.5, -1.0), 0.5) == -1


@needs_library
def test_a_vocabulary_of_a_real_model() -> None:
    rng = np.random.default_rng(3)
    scores = (rng.standard_normal(49_152) * 3).astype(np.float32)
    for choice in (
        Choice(),
        Choice(0.7, 40),
        Choice(0.7, 0, 0.9),
        Choice(1.3, 1000, 0.95, math.log(0.01)),
        Choice(2.0, 40_000),
    ):
        for uniform in rng.random(40):
            fast, plain = choose(scores, choice, uniform), plain_choose(scores, choice, uniform)
            assert fast == plain or on_a_border(scores, choice, uniform, fast, plain)


@needs_library
def test_the_head_draws_in_proportion() -> None:
    scores = np.log(np.array([1, 2, 4, 1], np.float32))
    counts = np.bincount([choose(scores, Choice(), (i + 0.5) / 800) for i in range(800)], minlength=4)
    assert counts.tolist() == [100, 200, 400, 100]


@needs_library
def test_rows_that_are_not_contiguous_or_not_float32() -> None:
    table = np.zeros((6, 300), np.float32)
    table[4, 2] = 1
    assert greedy(table[:, 2]) == 4 and choose(table[:, 2], Choice(1e-30), 0.5) == 4
    assert greedy(table[:, 2].astype(np.float64)) == 4 and greedy(table[::-1, 2]) == 1


def test_without_the_library_the_twin_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_library", lambda: None)
    scores = np.array([0, 3, 1], np.float32)
    assert greedy(scores) == 1 and choose(scores, Choice(top_k=1), 0.5) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_a_mask_lets_through_what_its_bits_say(vocab: int, bytes_: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    scores = random.normal(size=vocab).astype(np.float32)
    scores[random.integers(0, vocab)] = np.inf
    bits = random.choice(np.array([0, 255, 7, 129, 90], np.uint8), bytes_)
    fast, plain = (one(scores, bits, np.full(vocab, 7, np.float32)) for one in (mask, plain_mask))
    stays = [place < 8 * bytes_ and bool(bits[place // 8] >> place % 8 & 1) for place in range(vocab)]
    assert np.array_equal(fast, plain)
    assert np.array_equal(fast, np.where(stays, scores, -np.inf))
