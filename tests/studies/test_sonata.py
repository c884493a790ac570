"""The sonata study: its problems are right, its measures are right, its policies do what they say, and it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.generate.request import Answer, Usage
from orchard.studies import _sonata_answers as answers
from orchard.studies import _sonata_model as models
from orchard.studies import _sonata_policy as policy
from orchard.studies import _sonata_tasks as tasks
from orchard.studies import sonata, study

SIZES = {"places": 3, "sum": 3, "product": 3, "chain": 3, "difference": 3}


def text(ids: Any) -> str:
    return "".join(tasks.WORDS[int(i)] for i in ids)


def solved(prompt: str) -> str:
    """The answer by Python's own arithmetic."""
    if prompt[0] == "c":
        values = [int(prompt[1])]
        for sign, digit in zip(prompt[2:-1:2], map(int, prompt[3:-1:2]), strict=True):
            if sign == ";":
                values.append(digit)
            else:
                values[-1] = {"+": values[-1] + digit, "-": values[-1] - digit, "*": values[-1] * digit}[sign] % 10
        return "".join(map(str, values))
    sign = next(sign for sign in "^+-*" if sign in prompt)
    left, right = prompt[:-1].split(sign)
    if sign == "^":
        return "".join(str((int(a) + int(b)) % 10) for a, b in zip(left, right, strict=True))
    number = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]
    return f"{number:0{len(left) + (sign != '-')}d}"


# Problems -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tasks.kinds(SIZES), ids=str)
def test_answers_are_right_and_steps_lead_to_them(kind: tasks.Kind) -> None:
    made = tasks.make(kind, 40, torch.Generator().manual_seed(kind.size))
    for prompt, steps, answer in zip(made.prompt, made.steps, made.answer, strict=True):
        assert text(answer) == solved(text(prompt)) and prompt[-1] == tasks.EQUALS
        if kind.family in ("sum", "difference"):
            assert text(steps[2::4].flip(0)) == text(answer)[-kind.size :]
        if kind.family == "chain":
            again = next(place for place, token in enumerate(steps.tolist()) if token == tasks.ANEW)
            before = steps[again - 1] if again else prompt[1]
            assert [before, steps[-1]] == answer.tolist()


def test_a_batch_scores_what_is_written_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    made = [tasks.make(kind, 2, generator) for kind in tasks.kinds(SIZES)]
    for think in (False, True):
        ids, targets = tasks.batch(made, think=think)
        row = 0
        for each in made:
            for prompt, written in zip(each.prompt, each.written(think=think), strict=True):
                whole, start = torch.cat([prompt, written]), len(prompt) - 1
                assert torch.equal(ids[row, : len(whole) - 1], whole[:-1])
                assert torch.equal(targets[row, start : start + len(written)], written)
                assert (targets[row, :start] == tasks.IGNORED).all()
                assert (targets[row, start + len(written) :] == tasks.IGNORED).all()
                row += 1
        assert row == len(ids)


def test_no_prompt_is_drawn_twice() -> None:
    seen: set[tuple[int, ...]] = set()
    drawn = [sonata.draw(tasks.kinds(SIZES), 200, seed, seen) for seed in (1, 2)]
    prompts = [tuple(ids) for part in drawn for each in part for ids in each.prompt.tolist()]
    assert len(prompts) == len(set(prompts)) == len(seen)
    assert [each.kind for each in drawn[0]] == tasks.kinds(SIZES)


# Answers --------------------------------------------------------------------------------------------------------------


def test_one_token_for_each_word() -> None:
    tokenizer = answers.tokenizer()
    assert tokenizer.encode("12+34=") == [1, 2, tasks.PLUS, 3, 4, tasks.EQUALS]
    assert tokenizer.decode([tasks.THINK, 5, tasks.CLOSE], skip_special=False) == "<think>5</think>"
    assert tokenizer.eos_ids == {tasks.END} and tokenizer.vocab_size == len(tasks.WORDS)


@pytest.mark.parametrize(
    ("ids", "finish", "right"),
    [
        ((tasks.DIRECT, 1, 2), "stop", True),
        ((tasks.DIRECT, 1, 2), "length", False),
        ((tasks.DIRECT, 1, 2, 3), "stop", False),
        ((tasks.DIRECT, 2, 1), "stop", False),
        ((tasks.THINK, 7, tasks.CLOSE, 1, 2), "stop", True),
        ((tasks.THINK, 1, 2, tasks.CLOSE), "stop", False),
        ((tasks.THINK, 1, 2), "stop", False),
        ((1, 2), "stop", False),
    ],
)
def test_what_counts_as_right(ids: tuple[int, ...], finish: Any, right: bool) -> None:
    answer = Answer(text="", ids=ids, finish=finish, usage=Usage(1, len(ids)), seed=0)
    assert answers._right(answer, (1, 2)) is right


# Measures -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=30))
def test_rank_correlation(pairs: list[tuple[int, int]]) -> None:
    one, other = (np.array(side, float) for side in zip(*pairs, strict=True))
    for values in (one, other):
        wanted = [np.mean([rank + 1 for rank, x in enumerate(sorted(values)) if x == value]) for value in values]
        assert np.allclose(policy.ranks(values), wanted)
    found = policy.spearman(one, other)
    assert -1 - 1e-9 <= found <= 1 + 1e-9 and found == pytest.approx(policy.spearman(one**3, 2 * other + 1))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_area_under_the_curve(rows: list[tuple[int, bool, bool]]) -> None:
    score, right = np.array([row[0] for row in rows], float), np.array([row[1:] for row in rows])
    good = [s for s, labels in zip(score, right, strict=True) for label in labels if label]
    bad = [s for s, labels in zip(score, right, strict=True) for label in labels if not label]
    wins = [(a > b) + 0.5 * (a == b) for a in good for b in bad]
    assert policy.auc(score, right) == pytest.approx(np.mean(wins) if wins else 0.5)


def record(seed: int, count: int = 50) -> policy.Record:
    chance = np.random.default_rng(seed)
    return policy.Record(
        chance.random(count), chance.random(count), chance.integers(2, 6, count), chance.integers(6, 30, count)
    )


@given(st.integers(0, 2**31))
def test_policies_between_never_and_always(seed: int) -> None:
    found, score = record(seed), np.random.default_rng(seed + 1).integers(0, 8, 50) / 8
    nobody, everybody = np.zeros(50, bool), np.ones(50, bool)
    assert found.tokens(nobody) == 1 and found.accuracy(nobody) == pytest.approx(100 * found.think.mean())
    assert found.accuracy(everybody) == pytest.approx(found.random(1.0)) and found.random(0) == found.accuracy(nobody)
    rows = policy.pareto(score, found, np.linspace(0, 1, 11).tolist())
    tokens = [row[2] for row in rows]
    assert tokens == sorted(tokens) and rows[-1][1] == 0


@given(st.integers(0, 2**31), st.floats(0.2, 1))
def test_a_cut_at_a_cost(seed: int, cost: float) -> None:
    found, score = record(seed), np.random.default_rng(seed + 1).random(50)
    tokens = found.tokens(score > policy.cut_at_cost(score, found, cost))
    every = [found.tokens(score > other) for other in [-1.0, *score]]
    below, above = [cost - one for one in every if one <= cost], [one - cost for one in every if one > cost]
    if tokens <= cost + 1e-9:
        assert abs(cost - tokens) <= min([*below, *(10 * one for one in above)]) + 1e-9
    else:
        assert 10 * (tokens - cost) <= min([*below, *(10 * one for one in above)]) + 1e-9


# The whole ------------------------------------------------------------------------------------------------------------


def test_training_learns_and_repeats() -> None:
    size = replace(sonata.SCALES["small"], dim=32, layers=1, steps=12, batch=8, sizes={"places": 1, "sum": 1})
    model, curve = models.train(size, 3, torch.device("cpu"))
    again, same = models.train(size, 3, torch.device("cpu"))
    assert curve == same and curve[-1][1] < curve[0][1] and curve[-1][2] < curve[0][2]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_features_are_those_of_the_prompt_alone() -> None:
    size = replace(sonata.SCALES["small"], dim=32, layers=2)
    model = models.config(size).build().eval()
    made = [tasks.make(kind, 3, torch.Generator().manual_seed(1)) for kind in tasks.kinds({"sum": 2})]
    first, entropy = models.features(model, made)
    last = torch.from_numpy(answers.hidden(answers.engine_of(model), made))
    assert last.shape == first.shape == (6, 32) and entropy.shape == (6,)
    with torch.inference_mode():
        assert torch.allclose(model.scores(last[:3]), model(made[0].prompt)[:, -1], atol=0.02)  # the engine rounds
    assert not torch.allclose(first, last) and (entropy > 0).all() and (entropy < np.log(len(tasks.WORDS))).all()


@pytest.mark.long
def test_the_study_runs_and_every_claim_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(
        sonata.SCALES["small"],
        dim=32,
        layers=2,
        steps=10,
        batch=10,
        sizes=dict.fromkeys(SIZES, 1),
        calibration=16,
        validation=16,
        test=16,
        samples=3,
        thoughts=1,
    )
    monkeypatch.setitem(sonata.SCALES, "small", tiny)
    report = study("sonata", seed=1)
    assert all(claim.value is not None for claim in report.claims)
    assert report["gate_mismatches"] == 0 and report["pareto_steps_down"] >= 0
    kinds = report.series["family, size, direct, think, predicted"]
    assert [row[0] for row in kinds] == ["places", "sum", "product", "chain", "difference"]
    assert len(report.series["tau, skipped, tokens, accuracy"]) == 101
