"""Medians, ratios and lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.bench.stats import line, ratio, spread
from orchard.core.errors import UsageError

POSITIVE = st.floats(min_value=1e-3, max_value=1e6)


@given(st.lists(POSITIVE, min_size=1))
def test_a_median_lies_between_its_quartiles_and_those_within_the_values(values: list[float]) -> None:
    found = spread(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_quartiles_of_a_known_row() -> None:
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)


def test_no_values_have_no_median() -> None:
    with pytest.raises(UsageError):
        spread([])


def test_a_ratio_is_of_medians_and_its_spread_is_of_rounds() -> None:
    found = ratio([10.0, 20.0, 30.0], [5.0, 5.0, 10.0])
    assert found.median == 4.0  # 20 / 5, though the ratios of the rounds are 2, 4, 3
    assert (found.low, found.high) == (2.5, 4.0)


@given(st.lists(POSITIVE, min_size=1), POSITIVE)
def test_a_ratio_with_a_constant_scales(values: list[float], by: float) -> None:
    assert ratio(values, [by] * len(values)).median == pytest.approx(spread(values).median / by)


@given(st.floats(-100, 100), st.floats(0.01, 100), st.lists(st.integers(0, 10_000), min_size=3, unique=True))
def test_a_line_is_found_again(start: float, slope: float, xs: list[int]) -> None:
    found = line(xs, [start + slope * x for x in xs])
    assert found.slope == pytest.approx(slope, rel=1e-6, abs=1e-9) and found.r2 == pytest.approx(1, abs=1e-6)


def test_what_is_no_line_has_a_low_r2() -> None:
    assert line([1, 2, 3, 4], [1, 4, 1, 4]).r2 < 0.5
    assert line([1, 2, 3, 4], [1, 2, 4, 16]).r2 < 0.9
    with pytest.raises(UsageError):
        line([1, 1], [1, 2])
