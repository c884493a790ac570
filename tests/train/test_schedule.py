"""Schedules at their corners, and between them: bounded, without jumps, pure."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.config import Config
from orchard.core.errors import ConfigError
from orchard.train.schedule import WSD, Constant, Cosine, InverseSqrt, Linear, Schedule, set_rate


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, int, int, int, float]:
    """A schedule, its steps, its warm-up, how long its fall takes, and its floor."""
    steps = draw(st.integers(4, 300))
    warmup = draw(st.integers(0, steps // 2))
    floor = draw(st.sampled_from([0.0, 0.1, 1.0]))
    fall = steps - max(warmup, 1)
    kind = draw(st.sampled_from(["constant", "cosine", "linear", "wsd", "sqrt", "inverse"]))
    if kind == "constant":
        return Constant.Config(warmup=warmup).build(), steps, warmup, 10**9, 1.0
    if kind == "inverse":
        return InverseSqrt.Config(warmup=max(warmup, 1)).build(), steps, max(warmup, 1), max(warmup, 1), 0.0
    shared: dict[str, Any] = {"steps": steps, "warmup": warmup, "floor": floor}
    if kind in ("wsd", "sqrt"):
        decay = draw(st.integers(1, fall))  # without a warm-up, one step at full rate
        shape = "sqrt" if kind == "sqrt" else "linear"
        # A root is steepest at its beginning: a first step of 1 / √decay.
        length = math.isqrt(decay) if kind == "sqrt" else decay
        return WSD.Config(decay=decay, shape=shape, **shared).build(), steps, warmup, max(length, 1), floor
    made = (Cosine if kind == "cosine" else Linear).Config(**shared).build()
    return made, steps, warmup, fall, floor


@given(schedules())
def test_bounded_without_jumps_and_falling_after_the_warm_up(case: tuple[Schedule, int, int, int, float]) -> None:
    schedule, steps, warmup, fall, floor = case
    values = [schedule(step) for step in range(steps + 20)]
    assert all(0 <= value <= 1 for value in values)
    assert all(value >= floor - 1e-12 for value in values[warmup:])
    steepest = max(1 / warmup if warmup else 0, math.pi / 2 / fall) + 1e-9
    assert all(abs(b - a) <= steepest for a, b in itertools.pairwise(values))
    assert values[: max(warmup, 1)] == sorted(values[: max(warmup, 1)])
    tail = values[max(warmup - 1, 0) :]
    assert tail == sorted(tail, reverse=True)
    assert values[max(warmup - 1, 0)] == pytest.approx(1)
    if not isinstance(schedule, (Constant, InverseSqrt)):
        assert values[steps - 1] == pytest.approx(floor) and values[-1] == pytest.approx(floor)
    again = Config.from_dict(schedule.config.to_dict()).build()
    assert [again(step) for step in reversed(range(steps))] == values[:steps][::-1]


def test_corners() -> None:
    cosine = Cosine.Config(steps=101, warmup=1, floor=0.2).build()
    assert [cosine(s) for s in (0, 50, 100, 5000)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    linear = Linear.Config(steps=11, warmup=0).build()
    assert [linear(s) for s in (0, 3, 10)] == pytest.approx([1.0, 0.7, 0.0])
    wsd = WSD.Config(steps=100, warmup=10, decay=20).build()
    assert [wsd(s) for s in (0, 9, 10, 79, 89, 99)] == pytest.approx([0.1, 1, 1, 1, 0.5, 0])
    root = WSD.Config(steps=100, decay=16, shape="sqrt").build()
    assert root(87) == pytest.approx(1 - math.sqrt(4 / 16))
    inverse = InverseSqrt.Config(warmup=100).build()
    assert [inverse(s) for s in (49, 99, 399)] == pytest.approx([0.5, 1.0, 0.5])
    assert Constant.Config(warmup=4).build()(1) == 0.5


def test_a_rate_is_set_from_the_base_every_time() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [weight], "initial_lr": 0.5}], lr=0.5)
    for factor in (0.5, 0.1):
        set_rate(optimizer, factor)
        assert optimizer.param_groups[0]["lr"] == 0.5 * factor


@pytest.mark.parametrize(
    "cfg",
    [
        Cosine.Config(steps=5, warmup=6),
        Cosine.Config(steps=0),
        Linear.Config(steps=5, floor=1.5),
        WSD.Config(steps=10, warmup=5, decay=6),
        WSD.Config(steps=10, decay=2, shape="round"),
        InverseSqrt.Config(warmup=0),
        Constant.Config(warmup=-1),
    ],
)
def test_impossible_schedules_are_refused(cfg: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        cfg.build()
    assert caught.value.hint
