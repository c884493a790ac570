"""Preference losses against formulas written out by hand, and where their gradients go."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.batch import IGNORED, Batch, PairBatch
from orchard.core.errors import ConfigError, UsageError
from orchard.objectives import Preference
from orchard.objectives.logprobs import row_log_probs
from orchard.objectives.preference import LOSSES
from tests.objectives.toys import Toy, assert_adds_up, assert_slope, packed, part, plain_scores


def pairs(chosen: list[int], rejected: list[int], *, reference: bool = True) -> PairBatch:
    """Answers of the given lengths; the first token of each is its prompt."""
    sides = [packed([[length] for length in side], seed=seed) for seed, side in ((1, chosen), (2, rejected))]
    for side in sides:
        side.targets[:, 0] = IGNORED
    values = [torch.linspace(-9, -3, len(side), dtype=torch.float64) for side in (chosen, rejected)]
    return PairBatch(sides[0], sides[1], (values[0], values[1].flip(0)) if reference else None)


def log_prob(model: Toy, batch: Batch, row: int) -> tuple[float, int]:
    scores, total, count = plain_scores(model, batch), 0.0, 0
    for t, target in enumerate(batch.targets[row].tolist()):
        if target != IGNORED:
            total += float(scores[row, t].log_softmax(0)[target].detach())
            count += 1
    return total, count


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(p: float) -> float:
    return math.log(p / (1 - p))


def by_hand(kind: str, c: float, r: float, c0: float, r0: float, nc: int, nr: int, cfg: dict[str, Any]) -> float:
    beta, eps = cfg["beta"], cfg["smoothing"]
    h = beta * ((c - c0) - (r - r0))
    if kind == "dpo":
        return -(1 - eps) * math.log(sigma(h)) - eps * math.log(sigma(-h))
    if kind == "ipo":
        return ((c - c0) - (r - r0) - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return max(0.0, 1 - h)
    if kind == "simpo":
        s = beta * (c / nc - r / nr) - cfg["gamma"]
        return -(1 - eps) * math.log(sigma(s)) - eps * math.log(sigma(-s))
    return -c / nc - beta * math.log(sigma(odds(math.exp(c / nc)) - odds(math.exp(r / nr))))


@pytest.mark.parametrize("kind", LOSSES)
@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.integers(2, 6), st.integers(2, 6)), min_size=1, max_size=3),
    st.sampled_from([0.1, 0.7, 2.0]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([None, 2]),
)
def test_losses_are_the_formulas(
    kind: str, sizes: list[tuple[int, int]], beta: float, smoothing: float, chunk: int | None
) -> None:
    model, batch = Toy(), pairs([a for a, _ in sizes], [b for _, b in sizes])
    fields: dict[str, Any] = {"beta": beta, "smoothing": smoothing, "gamma": 0.3}
    loss = Preference.Config(loss=kind, chunk=chunk, **fields).build()(model, batch)
    want, assert_reference = 0.0, batch.reference
    assert assert_reference is not None
    for row in range(len(sizes)):
        (c, nc), (r, nr) = log_prob(model, batch.chosen, row), log_prob(model, batch.rejected, row)
        c0, r0 = (float(side[row]) for side in assert_reference)
        want += by_hand(kind, c, r, c0, r0, nc, nr, fields)
    assert loss.value.item() == pytest.approx(want, rel=1e-9)
    assert float(loss.weight) == len(sizes)
    margin = loss.parts["chosen"] - loss.parts["rejected"]
    torch.testing.assert_close(margin, loss.parts["margin"])


@pytest.mark.parametrize("kind", LOSSES)
def test_finite_differences_and_sums(kind: str) -> None:
    model, batch = Toy(), pairs([5, 3, 4], [2, 6, 4])
    objective = Preference.Config(loss=kind, beta=0.5, chunk=3).build()
    assert_slope(model, lambda: objective(model, batch).value)
    assert batch.reference is not None

    def some(rows: list[int]) -> PairBatch:
        assert batch.reference is not None
        a, b = batch.reference
        return PairBatch(part(batch.chosen, rows), part(batch.rejected, rows), (a[rows], b[rows]))

    pieces = [objective(model, some(rows)) for rows in ([0, 2], [1])]
    assert_adds_up(model, objective(model, batch), pieces)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_small_step_prefers_the_chosen_more(kind: str) -> None:
    model, reference, batch = Toy(), Toy(3), pairs([5, 3, 4], [2, 6, 4], reference=False)
    objective = Preference.Config(loss=kind, beta=0.3).build(reference=reference)
    loss = objective(model, batch)
    loss.value.backward()
    assert all(p.grad is None for p in reference.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p -= 1e-3 * p.grad  # type: ignore[operator]
    after = objective(model, batch)
    assert after.value.item() < loss.value.item()
    if kind in ("dpo", "simpo"):
        assert float(after.parts["margin"]) > float(loss.parts["margin"])


def test_stored_and_live_references_agree() -> None:
    model, reference, live = Toy(), Toy(3), pairs([5, 3], [2, 6], reference=False)
    with torch.no_grad():
        stored = (row_log_probs(reference, live.chosen), row_log_probs(reference, live.rejected))
    objective = Preference.Config().build(reference=reference)
    both = [objective(model, b) for b in (live, PairBatch(live.chosen, live.rejected, stored))]
    assert both[0].value.item() == both[1].value.item()
    assert objective(reference, live).value.item() == pytest.approx(2 * math.log(2))  # no margin yet


def test_empty_pairs_count_for_nothing_even_in_averages() -> None:
    model, batch = Toy(), pairs([5, 1, 4], [2, 1, 1])
    for kind in LOSSES:
        loss = Preference.Config(loss=kind).build()(model, batch)
        loss.value.backward()
        assert float(loss.weight) == 2 and loss.value.isfinite()
        assert all(total.isfinite() for total in loss.parts.values())
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_what_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(UsageError, match="reference") as caught:
        Preference.Config().build()(Toy(), pairs([3], [3], reference=False))
    assert "simpo" in caught.value.hint
    with pytest.raises(ConfigError, match="kto"):
        Preference.Config(loss="kto").build()
    with pytest.raises(ConfigError, match="beta"):
        Preference.Config(beta=0).build()
    with pytest.raises(ConfigError, match="smoothing"):
        Preference.Config(smoothing=0.6).build()
