"""Going round in circles: what counts as one, and what happens then."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.generate.loops import LONGEST, ROUNDS, SPAN, NoLoops
from orchard.generate.protocol import State

SCORES = np.linspace(-1, 3, 300, dtype=np.float32)


def ruled(tokens: list[int], ends: tuple[int, ...] = ()) -> np.ndarray:
    before = SCORES.copy()
    after = NoLoops(ends)(SCORES, State((1,), tokens))
    assert np.array_equal(SCORES, before)  # what is handed in stays as it is
    return after


@given(
    st.lists(st.integers(10, 299), min_size=1, max_size=LONGEST, unique=True), st.lists(st.integers(0, 9), max_size=30)
)
def test_one_more_round_is_unlikely(stretch: list[int], before: list[int]) -> None:
    rounds = max(ROUNDS, -(-SPAN // len(stretch)))
    looping = ruled(before + stretch * rounds)
    assert looping[stretch[0]] < SCORES[stretch[0]] - 30 and (looping != SCORES).sum() == 1
    assert ruled(before + stretch * rounds, ends=(7,)).argmax() == 7


@given(st.lists(st.integers(10, 299), min_size=12, max_size=LONGEST, unique=True))
def test_fewer_rounds_are_no_circle(stretch: list[int]) -> None:
    assert np.array_equal(ruled(stretch * (ROUNDS - 1), ends=(7,)), SCORES)


@pytest.mark.parametrize("tokens", [[], [5], [5] * (SPAN - 1), list(range(300)), [5, 6] * 15 + [7]])
def test_what_is_no_circle(tokens: list[int]) -> None:
    assert np.array_equal(ruled(tokens, ends=(7,)), SCORES)
