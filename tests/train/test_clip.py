"""Clipping against torch's own, and gradients that are not finite found by name."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import ConfigError
from orchard.train.clip import Clip


def parameters(*gradients: list[float] | None, dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    made = {}
    for number, values in enumerate(gradients):
        size = 1 if values is None else len(values)
        made[f"p{number}"] = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
        made[f"p{number}"].grad = None if values is None else torch.tensor(values, dtype=dtype)
    return made


NUMBERS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5)


@given(st.lists(NUMBERS, min_size=1, max_size=4), st.sampled_from([0.5, 1.0, 30.0]))
def test_the_norm_is_reported_and_bounded_as_torch_does(gradients: list[list[float]], limit: float) -> None:
    mine, theirs = parameters(*gradients), parameters(*gradients)
    norm = Clip.Config(limit=limit).build()(mine.items())
    want = float(torch.nn.utils.clip_grad_norm_(theirs.values(), limit))
    assert norm.value == pytest.approx(want, rel=1e-6) and norm.bad == ()
    assert norm.clipped == (norm.value > limit)
    for name in mine:
        torch.testing.assert_close(mine[name].grad, theirs[name].grad, atol=1e-6, rtol=1e-5)
        if not norm.clipped:
            assert mine[name].grad.tolist() == gradients[int(name[1:])]  # type: ignore[union-attr]


def test_scaling_comes_first() -> None:
    made = parameters([6.0, 8.0], None)
    norm = Clip.Config(limit=2.0).build()(made.items(), scale=0.5)
    assert norm.value == pytest.approx(5) and norm.clipped
    torch.testing.assert_close(made["p0"].grad, torch.tensor([1.2, 1.6]))
    norm = Clip.Config(limit=None).build()(made.items(), scale=10)
    assert norm.value == pytest.approx(20) and not norm.clipped
    torch.testing.assert_close(made["p0"].grad, torch.tensor([12.0, 16.0]))
    assert Clip.Config().build()([]).value == 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_are_named_and_left_alone(wrong: float) -> None:
    made = parameters([1.0], [2.0, wrong], None, [3.0])
    norm = Clip.Config(limit=0.1).build()(made.items(), scale=0.5)
    assert norm.bad == ("p1",) and not norm.clipped and not math.isfinite(norm.value)
    assert made["p0"].grad.tolist() == [1.0] and made["p3"].grad.tolist() == [3.0]  # type: ignore[union-attr]


def test_huge_but_finite_gradients_are_clipped_and_not_called_wrong() -> None:
    made = parameters([3e30], [4e30])
    norm = Clip.Config().build()(made.items())
    assert norm.bad == () and norm.value == pytest.approx(5e30, rel=1e-5)
    assert made["p1"].grad.item() == pytest.approx(0.8, rel=1e-5)  # type: ignore[union-attr]


def test_narrow_gradients_are_added_up_in_float32() -> None:
    made = parameters(*([1.0] * 50 for _ in range(40)), dtype=torch.bfloat16)
    assert Clip.Config(limit=None).build()(made.items()).value == pytest.approx(math.sqrt(2000), rel=1e-6)


def test_a_limit_has_to_be_above_zero() -> None:
    with pytest.raises(ConfigError, match="limit"):
        Clip.Config(limit=0.0).build()
