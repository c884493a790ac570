"""Sharing a budget between weights: within it, never worse with more of it, best among all where all can be tried."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import ConfigError, UsageError
from orchard.nn.formats import Int2, Int4, Int8, Plain
from orchard.transforms import mixed
from orchard.transforms.gptq import Gptq
from orchard.transforms.mixed import BudgetImpossible, Mixed, allocate
from orchard.transforms.sensitivity import Option, Sensitivity, sensitivity
from tests.transforms.ptq_models import rows, trained

FORMATS = (Int2.Config(), Int4.Config(), Int8.Config(half=True))


def record(table: list[list[tuple[int, float]]], rest: int = 10, weights: int = 1000) -> Sensitivity:
    options = {
        f"stack.layers.{i}.mixer.q": tuple(
            Option(format, nbytes, cost) for format, (nbytes, cost) in zip(FORMATS, found, strict=False)
        )
        for i, found in enumerate(table)
    }
    return Sensitivity(options, weights=weights, rest=rest, tokens=1)


tables = st.lists(
    st.lists(st.tuples(st.integers(1, 400), st.floats(0, 10)), min_size=1, max_size=3), min_size=1, max_size=5
)


def smallest(found: Sensitivity) -> int:
    return found.rest + sum(min(option.nbytes for option in options) for options in found.options.values())


@given(tables, st.integers(0, 900))
@settings(max_examples=150, deadline=None)
def test_best_of_all(table: list[list[tuple[int, float]]], room: int) -> None:
    found = record(table)
    budget = smallest(found) + room
    nbytes, cost = found.total(allocate(found, budget_bytes=budget))
    assert nbytes + found.rest <= budget
    fits = [
        sum(size_cost[1] for size_cost in picked)
        for picked in product(*(row[:3] for row in table))
        if sum(size_cost[0] for size_cost in picked) + found.rest <= budget
    ]
    assert cost == pytest.approx(min(fits), abs=1e-9)


@given(tables, st.lists(st.integers(0, 1500), min_size=2, max_size=6), st.sampled_from([1 << 16, 40, 7]))
@settings(max_examples=150, deadline=None)
def test_more_budget_never_costs_more(table: list[list[tuple[int, float]]], rooms: list[int], steps: int) -> None:
    """Also where bytes are told apart coarsely, and still never more than the budget."""
    found = record(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed, "STEPS", steps)
        costs = []
        for room in sorted(rooms):
            nbytes, cost = found.total(allocate(found, budget_bytes=smallest(found) + room))
            assert nbytes + found.rest <= smallest(found) + room
            costs.append(cost)
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(costs))


def test_an_impossible_budget_names_the_smallest() -> None:
    found = record([[(100, 3.0), (200, 1.0)], [(50, 2.0)]], rest=25, weights=700)
    with pytest.raises(BudgetImpossible, match=r"the smallest is 2.000 bits per weight") as caught:
        allocate(found, budget_bits_per_weight=1.99)
    assert isinstance(caught.value, UsageError) and caught.value.exit_code == 2
    assert caught.value.smallest_bytes == 175 and caught.value.smallest_bits == 2.0 and "175 bytes" in caught.value.hint
    assert found.total(allocate(found, budget_bits_per_weight=2.0)) == (150, 5.0)
    assert found.total(allocate(found, budget_bytes=275)) == (250, 3.0)
    with pytest.raises(BudgetImpossible):
        allocate(found, budget_bytes=275, fixed=126)
    assert found.total(allocate(found, budget_bytes=275, fixed=25)) == (250, 3.0)
    assert found.total(allocate(found, budget_bits_per_weight=2.0, weights=1100)) == (250, 3.0)


def test_nonsense_is_refused() -> None:
    found = record([[(100, 3.0)]])
    for budget in ({}, {"budget_bytes": 500, "budget_bits_per_weight": 3.0}, {"budget_bits_per_weight": float("nan")}):
        with pytest.raises(UsageError) as caught:
            allocate(found, **budget)
        assert caught.value.hint
    with pytest.raises(UsageError, match="no weights"):
        allocate(record([]), budget_bytes=100)
    with pytest.raises(ConfigError, match=r"no weight lies at stack.layers.9.mixer.q"):
        Mixed({"stack.layers.9.mixer.q": Int4.Config()}).apply(trained())


def test_a_model_within_its_budget() -> None:
    model, texts = trained(), tuple(rows(32, 16, seed=seed) for seed in range(3))
    choices = (Int2.Config(group=64), Int4.Config(group=64), Int8.Config(group=64, half=True))
    found = sensitivity(model, texts, choices, targets=("all-linear", "head", "embedding"))
    formats = allocate(found, budget_bits_per_weight=3.6)
    made = Mixed(formats).apply(model)
    held = sum(part.nbytes for part in (*made.parameters(), *made.buffers()))
    assert held == found.total(formats)[0] + found.rest <= 3.6 * found.weights / 8
    assert {type(format) for format in formats.values()} > {Int2.Config}
    even = Mixed(dict.fromkeys(formats, Int2.Config(group=64))).apply(model)
    ids = rows(32, seed=70).to("cpu").ids

    def off(other: torch.nn.Module) -> float:
        one, two = model(ids).log_softmax(-1), other(ids).log_softmax(-1)
        return float((one.exp() * (one - two)).sum(-1).mean())

    assert off(made) < off(even)
    fed = Gptq(formats=formats, targets=()).apply(model, texts)
    assert fed.config.complete() == made.config.complete()
    assert off(fed) < off(made)


def test_only_what_is_named_changes() -> None:
    model = trained()
    made = Mixed({"stack.layers[0].mixer.q": Int4.Config(), "stack.layers.1.mlp.up": Int2.Config(group=48)})
    new = made.apply(model)
    assert isinstance(new.stack.layers[0].mixer.q.format, Int4) and isinstance(
        new.stack.layers[0].mixer.k.format, Plain
    )
    assert made.notes == [
        "stack.layers.1.mlp.up: Int2 groups of 48 do not divide a width of 64; Int2(group=32) instead"
    ]
    assert torch.equal(new.stack.layers[0].mixer.k.weight, model.stack.layers[0].mixer.k.weight)
    assert made(model.config) == new.config.complete()
