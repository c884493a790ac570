"""Distillation against the formulas, in chunks and whole, with all of the teacher's scores and with some."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.core.batch import IGNORED, Batch
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.objectives import Distill, TopScores
from orchard.objectives.distill import merged
from orchard.objectives.divergence import DIVERGENCES
from tests.objectives.toys import VOCAB, Toy, assert_adds_up, assert_same, assert_slope, packed, part, plain_scores

WAYS = [{"chunk": None}, {"chunk": 3, "recompute": True}, {"chunk": 3, "recompute": False}]


def by_hand(name: str, p: Tensor, q: Tensor, mix: float) -> Tensor:
    """The divergence of probabilities p and q [V]."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum()

    return {
        "forward": lambda: kl(p, q),
        "reverse": lambda: kl(q, p),
        "mixed": lambda: mix * kl(p, q) + (1 - mix) * kl(q, p),
        "skew": lambda: kl(p, mix * p + (1 - mix) * q),
        "skew_reverse": lambda: kl(q, mix * q + (1 - mix) * p),
        "jensen_shannon": lambda: mix * kl(p, mix * p + (1 - mix) * q) + (1 - mix) * kl(q, mix * p + (1 - mix) * q),
    }[name]()


def coarse(p: Tensor, tokens: Tensor) -> Tensor:
    return torch.cat([p[tokens], (p.sum() - p[tokens].sum())[None]])


def reference(student: Toy, teacher: Toy, batch: Batch, cfg: Distill.Config) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    told, asked = plain_scores(teacher, batch).detach(), plain_scores(student, batch)
    for b, t in (batch.targets != IGNORED).nonzero().tolist():
        p, q = (x[b, t] / cfg.temperature for x in (told, asked))
        p, q = p.exp() / p.exp().sum(), q.exp() / q.exp().sum()
        if cfg.top_k is not None and cfg.top_k < VOCAB:
            best = p.argsort(descending=True)[: cfg.top_k]
            p, q = coarse(p, best), coarse(q, best)
        soft = cfg.temperature**2 * by_hand(cfg.divergence, p, q, cfg.mix)
        hard = asked[b, t].logsumexp(0) - asked[b, t, batch.targets[b, t]]
        share = 1.0 if batch.weights is None else float(batch.weights[b, t])
        total = total + share * ((1 - cfg.hard) * soft + cfg.hard * hard)
    return total


@pytest.mark.parametrize("name", DIVERGENCES)
@settings(max_examples=10)
@given(
    st.sampled_from(WAYS),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.sampled_from([1.0, 2.5]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, 1, 4, 10, 50]),
    st.booleans(),
)
def test_value_and_gradient_are_the_formulas(
    name: str, way: dict[str, Any], mix: float, temperature: float, hard: float, top_k: int | None, weighted: bool
) -> None:
    student, teacher, batch = Toy(1), Toy(2), packed([[4, 3], [5]], masked=0.2, weighted=weighted)
    cfg = Distill.Config(divergence=name, mix=mix, temperature=temperature, hard=hard, top_k=top_k, **way)
    loss = cfg.build(teacher=teacher)(student, batch)
    assert_same(student, loss.value, reference(student, teacher, batch, cfg), tolerance=1e-8)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_finite_differences(name: str) -> None:
    student, batch = Toy(1), packed([[6, 2]])
    objective = Distill.Config(divergence=name, hard=0.2, top_k=3, chunk=3).build(teacher=Toy(2))
    assert_slope(student, lambda: objective(student, batch).value)


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_teacher_stays_as_it_is_and_is_the_goal(name: str, way: int) -> None:
    student, teacher, batch = Toy(1), Toy(2), packed([[6], [5]])
    before = [p.detach().clone() for p in teacher.parameters()]
    objective = Distill.Config(divergence=name, **WAYS[way]).build(teacher=teacher)
    objective(student, batch).value.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert any(p.grad is not None and p.grad.any() for p in student.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters()))
    perfect = objective(teacher, batch)  # the student is its own teacher
    assert perfect.value.item() == pytest.approx(0, abs=1e-12)
    slopes = torch.autograd.grad(perfect.value, list(teacher.parameters()))
    assert all(slope.abs().max() < 1e-12 for slope in slopes)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_more_of_the_teacher_never_makes_it_less(name: str) -> None:
    student, batch = Toy(1), packed([[8]])
    found = [
        Distill.Config(divergence=name, top_k=k).build(teacher=Toy(2))(student, batch).value.item()
        for k in (1, 2, 4, 8, VOCAB - 1, None)
    ]
    assert all(more >= less * (1 - 1e-12) for less, more in pairwise(found))
    assert found[-2] == pytest.approx(found[-1], rel=1e-9)  # a rest of one token is no loss


@pytest.mark.parametrize("skip", [True, False])
def test_functions_and_stored_scores_teach_the_same(skip: bool) -> None:
    student, teacher, batch = Toy(1), Toy(2), packed([[4, 3], [5]], masked=0.4)
    cfg = Distill.Config(top_k=4, temperature=2.0, hard=0.5, chunk=3, skip=skip)

    def stored(ids: Tensor, context: Context) -> TopScores:
        p = (teacher(ids, context) / 2.0).log_softmax(-1)
        tokens = p.topk(4).indices
        both = merged(p.flatten(0, 1), tokens.flatten(0, 1)).view(*ids.shape, 5)
        return TopScores(log_probs=both[..., :4], tokens=tokens, rest=both[..., 4])

    want = cfg.build(teacher=teacher)(student, batch)
    for other in (lambda ids, context: teacher(ids, context), stored):
        loss = cfg.build(teacher=other)(student, batch)
        assert_same(student, loss.value, want.value)
        cfg.set("chunk", None).build(teacher=other)(student, batch).value.backward()
        assert all(p.grad is None for p in teacher.parameters())


def test_two_micro_batches_are_one_batch() -> None:
    student, batch = Toy(1), packed([[4, 2], [6], [1, 1]], weighted=True, masked=0.2)
    objective = Distill.Config(chunk=2, hard=0.3).build(teacher=Toy(2))
    pieces = [objective(student, part(batch, rows)) for rows in ([0], [1, 2])]
    assert_adds_up(student, objective(student, batch), pieces)


def test_all_hard_is_the_next_token() -> None:
    from orchard.objectives import NextToken

    student, batch = Toy(1), packed([[4, 2], [6]])
    soft, plain = Distill.Config(hard=1.0).build(teacher=Toy(2)), NextToken.Config().build()
    assert_same(student, soft(student, batch).value, plain(student, batch).value)


def test_bad_settings_and_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="sideways"):
        Distill.Config(divergence="sideways").build(teacher=Toy())
    with pytest.raises(ConfigError, match="temperature"):
        Distill.Config(temperature=0.0).build(teacher=Toy())
    with pytest.raises(ConfigError, match="teacher"):
        Distill.Config().build(teacher=3)
    with pytest.raises(UnsupportedPair, match="12"):
        Distill.Config().build(teacher=Toy(vocab=VOCAB + 1))(Toy(), packed([[3]]))
    assert math.isfinite(Distill.Config().build(teacher=Toy())(Toy(1), packed([[3]])).value.item())
