"""How many guesses are made: the best number for what calls cost and what is kept, found from measurements with noise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.generate.speculative.adapt import FEW, WIDEST, WORTH, CallTimes, Rate, best_lengths, nearby

COSTS: dict[str, Callable[[int], float]] = {
    "nearly free": lambda tokens: 1 + 0.02 * tokens,
    "steps of four": lambda tokens: 1 + 0.6 * ((tokens - 1) // 4) + 0.01 * tokens,
    "dear": lambda tokens: 0.2 + 0.8 * tokens,
    "a cliff after eight": lambda tokens: 1.0 + 0.05 * tokens + 4.0 * (tokens > 8),
}


def expected(rate: float, length: int) -> float:
    """Tokens of one call."""
    return sum(rate**k for k in range(length + 1))


def measured(*widths: int, base: float = 1.0, slope: float = 0.0) -> CallTimes:
    """Times that have seen calls of these widths."""
    times = CallTimes()
    for width in widths:
        for _ in range(FEW):
            times.add(width, base + slope * width)
    return times


def reached(cost: Callable[[int], float], rate: float, seed: int) -> float:
    """Tokens per second of the last calls of many, by the best that there could be."""
    random = np.random.default_rng(seed)
    times, known, tokens, spent = CallTimes(), Rate(0.6), 0.0, 0.0
    for call in range(600):
        length = best_lengths([known.value], [16], [0.0], times, 1, nearby(call))[0]
        if not length and call % 32 == 0:
            length = 2
        drift = 2.0 if call > 300 else 1.0  # the machine is slower from here on: that changes nothing
        times.add(1 + length, 0.003 * drift * cost(1 + length) * random.lognormal(0, 0.1))
        kept = next((k for k in range(length) if random.random() >= rate), length)
        if length:
            known.add(kept, kept < length)
        if call >= 400:
            tokens, spent = tokens + expected(rate, length), spent + cost(1 + length)
    return tokens / spent / max(expected(rate, length) / cost(1 + length) for length in range(17))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.95])
def test_lengths_settle_near_the_best(cost: str, rate: float) -> None:
    assert np.mean([reached(COSTS[cost], rate, seed) for seed in range(4)]) > 0.88


@given(
    rates=st.lists(st.floats(0.02, 0.98), min_size=1, max_size=3),
    most=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    steps=st.lists(st.floats(0, 1), min_size=12, max_size=12),
)
@settings(max_examples=60)
def test_no_other_lengths_are_better(rates: list[float], most: list[int], steps: list[float]) -> None:
    most = most[: len(rates)]
    times = CallTimes()
    for width, seconds in enumerate(1 + np.cumsum(steps), 1):
        for _ in range(3):
            times.add(width, float(seconds))
    known = times.seconds(len(rates), 12)

    def speed(lengths: tuple[int, ...]) -> float:
        tokens = sum(expected(rate, length) for rate, length in zip(rates, lengths, strict=True))
        return tokens / float(known[sum(lengths)])

    found = best_lengths(rates, most, [0.0] * len(rates), times, len(rates))
    assert all(length <= bound for length, bound in zip(found, most, strict=True))
    every = product(*(range(bound + 1) for bound in most))
    best = max(map(speed, every))
    assert speed(tuple(found)) == pytest.approx(
        best if best > WORTH * speed((0,) * len(rates)) else float(len(rates) / known[0])
    )


def test_guesses_that_take_long_to_make_are_fewer() -> None:
    times = measured(*range(1, 20), slope=0.05)
    lengths = [best_lengths([0.8], [16], [cost], times, 1)[0] for cost in (0.0, 0.1, 0.3, 2.0)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[2] and lengths[-1] == 0


def test_the_better_row_gets_the_guesses() -> None:
    times = measured(*range(1, 20), slope=0.3)
    good, bad = best_lengths([0.95, 0.1], [16, 16], [0.0, 0.0], times, 2)
    assert good >= 2 and bad == 0


def test_times_of_unknown_widths_follow_from_those_that_are_known() -> None:
    times = measured(1, 9, base=0.009, slope=0.001)
    assert [tokens for tokens in range(1, 25) if times.known(tokens)] == [1, 2, *range(5, 19)]
    assert times.seconds(5, 1)[0] == pytest.approx(0.014)
    assert times.seconds(17, 1)[0] == pytest.approx(0.026)
    times.add(4, -1.0)  # a clock that went backwards
    assert (np.diff(times.seconds(1, 30)) >= 0).all()
    assert len(times.seconds(WIDEST - 1, 5)) == 5


def test_nothing_is_guessed_before_it_is_known_what_a_call_takes() -> None:
    times = CallTimes()
    for _ in range(FEW):
        assert best_lengths([0.9], [8], [0.0], times, 2) == [0]
        times.add(2, 0.01)
    assert best_lengths([0.9], [8], [0.0], times, 2)[0] > 0
    assert best_lengths([0.9], [8], [0.0], times, 5) == [0]


def test_one_slow_call_is_forgotten() -> None:
    times = CallTimes()
    for _ in range(20):
        times.add(1, 0.01)
    times.add(1, 10.0)
    for _ in range(20):
        times.add(1, 0.01)
    assert times.seconds(1, 1)[0] == pytest.approx(0.01, rel=0.25)


def test_a_rate_follows_what_happens() -> None:
    rate = Rate(0.6)
    for _ in range(60):
        rate.add(4, refused=False)
    assert rate.value > 0.95
    for _ in range(90):
        rate.add(0, refused=True)
    assert rate.value < 0.1


def test_a_cold_start_is_not_taken_for_the_price_of_a_call() -> None:
    times = CallTimes()
    times.add(1, 0.1)
    for _ in range(2):
        times.add(1, 0.003)
    for _ in range(3):
        times.add(4, 0.009)
    one, _, _, four = times.seconds(1, 4)
    assert one == pytest.approx(0.003) and four == pytest.approx(0.009)
