"""Rotary parts and every way to stretch them, against formulas written out in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.attention import Rotary
from orchard.nn.attention.scaling import Factors, Linear, Llama3, Ntk, Yarn
from orchard.ops import rope
from tests.matrix import axes

DIM, THETA = 16, 1000.0
PAIRS = DIM // 2
PLAIN = [THETA ** (-2 * i / DIM) for i in range(PAIRS)]


def frequencies(scaling: Any = None, **fields: Any) -> list[float]:
    rotary = Rotary.Config(**{"dim": DIM, "theta": THETA, "scaling": scaling, **fields}).build()
    return rotary.frequencies(torch.device("cpu")).tolist()


def llama3(f: float, factor: float, low: float, high: float, original: int) -> float:
    wavelength = 2 * math.pi / f
    if wavelength < original / high:
        return f
    if wavelength > original / low:
        return f / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * f / factor + smooth * f


def yarn(i: int, factor: float, original: int, fast: float, slow: float) -> float:
    def pair(turns: float) -> float:  # the (fractional) pair that turns so often within the trained length
        return DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), DIM - 1)
    ramp = min(max((i - low) / (high - low), 0.0), 1.0)
    return PLAIN[i] * (1 - ramp) + PLAIN[i] / factor * ramp


CASES: dict[str, tuple[Any, list[float]]] = {
    "none": (None, PLAIN),
    "linear": (Linear.Config(factor=4.0), [f / 4 for f in PLAIN]),
    # A base of theta · factor^(d / (d - 2)): the slowest pair is stretched by the factor, the fastest not at all.
    "ntk": (Ntk.Config(factor=4.0), [(THETA * 4 ** (DIM / (DIM - 2))) ** (-2 * i / DIM) for i in range(PAIRS)]),
    "llama3": (Llama3.Config(factor=8.0, original=512), [llama3(f, 8.0, 1.0, 4.0, 512) for f in PLAIN]),
    "yarn": (Yarn.Config(factor=4.0, original=2048), [yarn(i, 4.0, 2048, 32.0, 1.0) for i in range(PAIRS)]),
    "factors": (Factors.Config(factors=tuple(range(1, 9))), [f / (i + 1) for i, f in enumerate(PLAIN)]),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_of_every_scaling(name: str) -> None:
    scaling, want = CASES[name]
    assert frequencies(scaling) == pytest.approx(want, rel=1e-5)


def test_every_scaling_is_tested_here() -> None:
    tested = {type(scaling).builds.__name__ for scaling, _ in CASES.values() if scaling is not None}
    assert tested == {kind.__name__ for kind in axes.parts()["scaling"]}


def test_the_llama3_case_reaches_all_three_ranges() -> None:
    ratios = [f / g for f, g in zip(PLAIN, CASES["llama3"][1])]
    assert ratios[0] == 1 and ratios[-1] == pytest.approx(8) and any(1.01 < ratio < 7.9 for ratio in ratios)


def test_yarn_gain() -> None:
    make = lambda **fields: Yarn.Config(original=64, **fields).build().gain  # noqa: E731
    assert make(factor=4.0) == pytest.approx(0.1 * math.log(4) + 1)
    assert make(factor=1.0) == make(factor=0.5) == 1.0 and make(factor=4.0, gain=1.5) == 1.5


@pytest.mark.parametrize(("fraction", "rotated"), [(1.0, 16), (0.5, 8), (0.25, 4), (0.2, 2), (0.0, 0)])
def test_a_fraction_turns_that_many_channels(fraction: float, rotated: int) -> None:
    assert len(frequencies(fraction=fraction)) == rotated // 2
    rotary = Rotary.Config(dim=DIM, fraction=fraction).build()
    x, context = torch.randn(1, 2, 3, DIM), Context(torch.tensor([[1, 2, 3]]))
    y = rotary(x, context.places, context)
    assert y[..., rotated:].equal(x[..., rotated:]) and (rotated == 0 or not y[..., :rotated].equal(x[..., :rotated]))


def test_the_module_rotates_by_the_tables_and_the_gain() -> None:
    scaling = Yarn.Config(factor=4.0, original=64)
    rotary = Rotary.Config(dim=DIM, theta=THETA, scaling=scaling).build()
    x, context = torch.randn(2, 2, 3, DIM), Context(torch.tensor([[0, 1, 2], [5, 6, -1]]))
    tables = rope.tables(context.places, torch.tensor(frequencies(scaling)), 0.1 * math.log(4) + 1)
    torch.testing.assert_close(rotary(x, context.places, context), rope.rotate(x, *tables))


def test_wrong_factors_are_refused_when_the_part_is_built() -> None:
    with pytest.raises(ConfigError, match="3 rotary factors for 8"):
        Rotary.Config(dim=DIM, scaling=Factors.Config(factors=(1.0, 2.0, 3.0))).build()


def test_equal_parts_share_one_step_of_tables_and_others_do_not() -> None:
    one, same, other = (Rotary.Config(dim=DIM, theta=theta).build() for theta in (10.0, 10.0, 20.0))
    x, context = torch.randn(1, 1, 2, DIM), Context(torch.tensor([[3, 4]]))
    y = one(x, context.places, context)
    size = len(context.memo)
    assert same(x, context.places, context).equal(y) and len(context.memo) == size
    assert not other(x, context.places, context).equal(y) and len(context.memo) == size + 1
    elsewhere = context.places + 1
    assert not one(x, elsewhere, context).equal(y)


def test_on_meta_the_frequencies_are_still_real() -> None:
    with torch.device("meta"):
        rotary = Rotary.Config(dim=DIM, theta=THETA).build()
    assert rotary.frequencies(torch.device("cpu")).tolist() == pytest.approx(PLAIN)
    x, context = torch.empty(1, 1, 2, DIM, device="meta"), Context(torch.empty(1, 2, dtype=torch.long, device="meta"))
    assert rotary(x, context.places, context).is_meta
