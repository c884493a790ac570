"""Axes: round numbers in order, inside, and never equal words for different places, whatever the values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.report_page_axis import Axis, log_ticks, ticks, value_axis, x_axis

drawable = st.floats(-1e300, 1e300)


def labels(axis: Axis) -> list[str]:
    return [words for _, words in axis.ticks]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (1, 100_000, ["20k", "40k", "60k", "80k", "100k"]),
        (0, 1_300_000, ["0", "0.2M", "0.4M", "0.6M", "0.8M", "1.0M", "1.2M"]),
        (2.3, 10.9, ["4", "6", "8", "10"]),
        (-5, 5, ["−4", "−2", "0", "2", "4"]),
        (123_456, 123_460, ["123,456", "123,457", "123,458", "123,459", "123,460"]),
        (1e-7, 9e-7, ["2·10⁻⁷", "4·10⁻⁷", "6·10⁻⁷", "8·10⁻⁷"]),
        (0, 7_000, ["0", "1,000", "2,000", "3,000", "4,000", "5,000", "6,000", "7,000"]),
    ],
)
def test_numbers_are_round_and_written_alike(low: float, high: float, words: list[str]) -> None:
    assert [text for _, text in ticks(low, high)] == words


def test_steps_are_whole() -> None:
    assert labels(x_axis(0, 1, whole=True)) == ["0", "1"]
    assert labels(x_axis(0, 4, whole=True)) == ["0", "1", "2", "3", "4"]
    assert "0.5" in labels(x_axis(0, 2, whole=False))
    assert "7" in labels(x_axis(7, 7, whole=True)), "one point"


def test_a_logarithmic_axis_has_powers_of_ten() -> None:
    assert [text for _, text in log_ticks(0.02, 3e6)] == ["1", "100", "10,000", "10⁶"]
    assert [text for _, text in log_ticks(0.02, 300)] == ["0.1", "1", "10", "100"]
    assert all(0.001 <= number <= 1e200 for number, _ in log_ticks(0.001, 1e200))
    assert len(log_ticks(1e-250, 1e299)) <= 7


def test_where_an_axis_begins() -> None:
    assert value_axis(np.array([1.0, 10.0]), np.array([5.0])).low == 0.0
    high_up = value_axis(np.array([90.0, 100.0]), np.array([95.0]))
    assert 85 < high_up.low < 90 and 100 < high_up.high < 105
    wide = value_axis(np.array([1.0, 1.0, 1.0, 1e4]), np.array([1.0]))
    assert wide.log and wide.place(1.0) < 0.2 and wide.place(1e4) > 0.8
    assert not value_axis(np.array([0.0, 1.0, 1.0, 1e4]), np.array([1.0])).log, "zero has no logarithm"


def test_a_few_far_points_do_not_flatten_the_others() -> None:
    values = np.concatenate([np.linspace(2, 3, 1000), [-500.0, 500.0]])
    axis = value_axis(values, np.linspace(2, 3, 50))
    assert 1 < axis.low < 2 and 3 < axis.high < 4
    kept = value_axis(values, np.array([2.0, 400.0]))
    assert kept.high > 400, "but what is drawn as the mean is seen"


@given(drawable, drawable)
def test_ticks_lie_inside_in_order_with_different_words(one: float, other: float) -> None:
    low, high = sorted((one, other))
    for axis in (x_axis(low, high, whole=False), x_axis(low, high, whole=one == round(one) and other == round(other))):
        numbers = [number for number, _ in axis.ticks]
        assert axis.low < axis.high and len(numbers) <= 15
        assert numbers == sorted(set(numbers)) and len(set(labels(axis))) == len(numbers)
        assert all(-0.001 <= axis.place(number) <= 1.001 for number in numbers)


@given(st.lists(drawable, min_size=1, max_size=300))
def test_every_value_has_a_place(values: list[float]) -> None:
    found = np.array(values)
    axis = value_axis(found, found)
    places = [axis.place(value) for value in values]
    assert all(-0.06 <= place <= 1.06 for place in places)
    order = np.argsort(found, kind="stable")
    assert (np.diff(np.array(places)[order]) >= 0).all()
