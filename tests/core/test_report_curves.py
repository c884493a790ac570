"""Curves of a Report: which stand together, that no spike is lost, and that odd numbers harm nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.report_page_curves import Chart, charts, numbers, restless, smoothed, thin

odd = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400)
points = st.lists(odd, max_size=30) | st.lists(st.lists(odd, max_size=4), max_size=30)


def titles(series: dict[str, list[Any]]) -> list[str]:
    return [chart.title for chart in charts(series).charts]


def noisy(count: int, *, low: float = 2.0, high: float = 10.0) -> list[float]:
    dice = np.random.default_rng(0)
    return (low + (high - low) * np.exp(-np.arange(count) / count * 30) + dice.normal(0, 0.05, count)).tolist()


def test_losses_stand_together_and_speeds_come_last() -> None:
    run = {
        "step": [1, 2, 3],
        "tokens/s": [1.0, 2.0, 3.0],
        "loss": [3.0, 2.0, 1.0],
        "rate": [0.1, 0.5, 1.0],
        "held out, books": [[2, 2.5], [3, 2.0]],
        "correct": [0.1, 0.2, 0.3],
        "mfu": [0.4, 0.4, 0.4],
    }
    drawn = charts(run)
    assert [chart.title for chart in drawn.charts] == [
        *("loss", "correct", "learning rate, factor", "tokens/s", "MFU, share of the peak"),
    ]
    main = drawn.charts[0]
    assert main.main and [line.name for line in main.lines] == ["loss", "held out, books"]
    assert main.lines[0].xs.tolist() == [1, 2, 3] and main.lines[1].xs.tolist() == [2, 3]
    assert all(chart.x_name == "step" for chart in drawn.charts)
    assert drawn.names == run.keys()


def test_other_reports_have_their_own_x() -> None:
    drawn = charts({"memory": [[0.5, 3], [0.0, 1], [1.0, 2]], "plain": [5, 6], "by size: a, b": [[1, 2, 3], [2, 3, 4]]})
    memory, plain, both = drawn.charts
    assert memory.lines[0].xs.tolist() == [0.0, 0.5, 1.0] and memory.lines[0].ys.tolist() == [1, 3, 2]
    assert plain.lines[0].xs.tolist() == [0, 1] and not any(chart.main for chart in drawn.charts)
    assert both.title == "by size" and [line.name for line in both.lines] == ["a", "b"]


def test_what_is_no_curve_is_left_to_others() -> None:
    series: dict[str, list[Any]] = {"words": ["a"], "rows": [["x", 1], ["y", 2]], "wide": [[1, 2, 3]], "empty": []}
    assert charts(series).charts == [] and charts(series).names == set()


def test_the_later_half_is_drawn_again_where_the_beginning_hides_it() -> None:
    falling, even = noisy(400), noisy(400, high=2.0)
    assert titles({"loss": falling}) == ["loss", "loss, the later half"]
    later = charts({"loss": falling}).charts[1]
    assert later.x.low == 200 and later.y.high < 3
    assert titles({"loss": even}) == ["loss"]


def test_too_many_charts_are_named() -> None:
    drawn = charts({f"c{i}": [1.0, 2.0] for i in range(10)}, most=4)
    assert len(drawn.charts) == 4 and drawn.left == [f"c{i}" for i in range(4, 10)]


def test_a_restless_curve_gets_its_mean_and_a_smooth_one_none() -> None:
    wave = np.cos(np.linspace(0, 3, 500))
    assert not restless(wave) and restless(np.array(noisy(500))) and not restless(np.ones(500))
    mean = smoothed(np.array(noisy(1000, low=2.0, high=2.0)))
    assert abs(mean - 2).max() < 0.05, "also at both ends"
    assert smoothed(np.full(50, 1e300)).tolist() == [1e300] * 50
    steep = np.array(noisy(1000))
    assert smoothed(steep)[0] > 9, "a beginning is not flattened"


def test_a_spike_is_never_lost() -> None:
    ys = np.zeros(100_000)
    ys[54_321], ys[77_777] = 9.0, -9.0
    kept_x, kept_y = thin(np.arange(100_000.0), ys, 300)
    assert len(kept_x) <= 602 and 54_321 in kept_x and 77_777 in kept_x
    assert kept_x[0] == 0 and kept_x[-1] == 99_999 and (np.diff(kept_x) > 0).all()
    assert kept_y.max() == 9 and kept_y.min() == -9


def test_numbers_that_cannot_be_drawn_leave_no_trace() -> None:
    found = numbers([1.0, None, math.nan, math.inf, 1e301, 10**400, "3", 4, True])
    assert np.isnan(found).tolist() == [False, True, True, True, True, True, True, False, False]
    (chart,) = charts({"loss": [None, 1.0, None, 2.0]}).charts
    assert chart.lines[0].xs.tolist() == [1, 3]
    assert charts({"loss": [None, None]}).charts == []


@given(st.dictionaries(st.sampled_from(["step", "loss", "held out, x", "other: a, b", "norm"]), points, max_size=5))
def test_any_series_gives_charts_that_can_be_drawn(series: dict[str, list[Any]]) -> None:
    for chart in charts(series).charts:
        assert chart.lines and sound(chart)


def sound(chart: Chart) -> bool:
    return all(
        len(line.xs) == len(line.ys) >= 1
        and all(-0.06 <= chart.x.place(x) <= 1.06 for x in line.xs.tolist())
        and all(-0.06 <= chart.y.place(y) <= 1.06 for y in line.ys.tolist())
        for line in chart.lines
    )
