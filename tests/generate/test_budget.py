"""Thinking budgets: thoughts are counted and ended, whatever is written and however often it is taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.generate.budget import Afterwards, Budget, Thinking
from orchard.generate.constraint import Constraint
from orchard.generate.engine import Engine
from orchard.generate.grammar import grammar_for
from orchard.generate.protocol import State, Tokens
from orchard.generate.request import Request, Sampling
from orchard.generate.speculative.options import Speculation
from orchard.models.language.decoder import Decoder
from orchard.session.model import Model, load
from orchard.text.tokenizer import Tokenizer

SCORES = np.linspace(-1, 3, 12, dtype=np.float32)
few = st.integers(0, 3)
marks = st.lists(few, min_size=1, max_size=3).map(tuple)


def allowed(rule: Any, output: list[int] | Tokens) -> list[int]:
    before = SCORES.copy()
    scores = rule(SCORES, State((1,), output))
    assert np.array_equal(SCORES, before)  # what is handed in stays as it is
    left = np.flatnonzero(np.isfinite(scores))
    assert np.array_equal(scores[left], SCORES[left])
    return left.tolist()


def plain(tokens: int, begin: tuple[int, ...] | None, end: tuple[int, ...], output: list[int]) -> int | None:
    """The rule as one would say it: what must come next, or nothing."""
    begun: int | None = 0
    if begin is not None:
        places = range(len(begin), len(output) + 1)
        begun = next((place for place in places if tuple(output[place - len(begin) : place]) == begin), None)
    if begun is None:
        return None
    thoughts = output[begun:]
    if any(tuple(thoughts[place : place + len(end)]) == end for place in range(len(thoughts))):
        return None
    if len(thoughts) < tokens:
        return None
    matched = next(
        n for n in range(len(end), -1, -1) if n <= len(thoughts) and tuple(thoughts[len(thoughts) - n :]) == end[:n]
    )
    return end[matched]


# The rule -------------------------------------------------------------------------------------------------------------


def test_thoughts_end_when_they_are_spent() -> None:
    rule = Budget(3, (7,), (8, 9))
    for free in (
        [],
        [1],
        [7],
        [7, 1, 2],
        [1, 2, 3, 4, 5],
        [7, 1, 8],
        [7, 1, 8, 9],
        [7, 8, 9, 1, 1, 1, 1],
        [7, 8, 9, 7, 1, 2, 3, 4],
    ):
        assert len(allowed(rule, free)) == len(SCORES), free
    assert allowed(rule, [7, 1, 2, 3]) == [8] and allowed(rule, [7, 1, 2, 3, 8]) == [9]
    assert allowed(rule, [7, 1, 2, 8]) == [9]  # a mark that was begun is finished, not begun again
    assert allowed(rule, [1, 2, 7, 1, 2, 3, 4]) == [8]
    assert len(allowed(rule, [7, 1, 2, 3, 8, 9])) == len(SCORES)


def test_no_budget_ends_thoughts_at_once() -> None:
    assert allowed(Budget(0, None, (8, 9)), []) == [8] and allowed(Budget(0, None, (8, 9)), [8]) == [9]
    assert allowed(Budget(0, (7,), (8,)), [7]) == [8] and len(allowed(Budget(0, (7,), (8,)), [1])) == len(SCORES)


def test_an_answer_can_be_made_to_think() -> None:
    rule = Budget(2, (6, 7), (8,), opens=True)
    assert [allowed(rule, written) for written in ([], [6], [6, 7, 1, 1])] == [[6], [7], [8]]
    assert rule.forced(State((1,))) == (6, 7) and rule.forced(State((1,), [6, 7])) == ()
    assert len(allowed(rule, [5])) == len(SCORES)  # tokens that a caller put there are left alone


def test_thoughts_are_counted() -> None:
    rule = Budget(9, (7,), (8, 9))
    spent = {(): 0, (1,): 0, (7,): 0, (7, 1, 2): 2, (7, 1, 2, 8): 3, (7, 1, 2, 8, 9): 2, (7, 1, 8, 9, 1, 1): 1}
    assert {written: rule.spent(State((1,), written)) for written in spent} == spent


@given(st.integers(0, 6), st.none() | marks, marks, st.lists(few, max_size=14))
def test_the_rule_is_what_one_would_say(
    tokens: int, begin: tuple[int, ...] | None, end: tuple[int, ...], output: list[int]
) -> None:
    wanted = plain(tokens, begin, end, output)
    assert allowed(Budget(tokens, begin, end), output) == (list(range(12)) if wanted is None else [wanted])


@given(st.integers(0, 5), st.none() | marks, marks, st.lists(st.tuples(few, st.integers(0, 4)), max_size=20))
def test_taking_tokens_back_changes_nothing(
    tokens: int, begin: tuple[int, ...] | None, end: tuple[int, ...], moves: list[tuple[int, int]]
) -> None:
    """Forwards by a token, then back by some, as drafts do: one rule for all of it, and a fresh one at each place."""
    rule, states = Budget(tokens, begin, end), [State((1,))]
    for token, back in moves:
        states.append(states[-1].plus(token))
        assert allowed(rule, states[-1].output) == allowed(Budget(tokens, begin, end), list(states[-1].output))
        del states[max(1, len(states) - back) :]
        assert allowed(rule, states[-1].output) == allowed(Budget(tokens, begin, end), list(states[-1].output))


@given(st.integers(0, 8), st.none() | marks, marks, st.integers(0, 2**31))
def test_thoughts_never_outgrow_their_budget(
    tokens: int, begin: tuple[int, ...] | None, end: tuple[int, ...], seed: int
) -> None:
    rule, chance, state = Budget(tokens, begin, end, opens=begin is not None), np.random.default_rng(seed), State((1,))
    for _ in range(30):
        scores = rule(chance.normal(size=4).astype(np.float32), state)
        state = state.plus(int(scores.argmax()))
    assert rule.spent(state) <= tokens and rule.forced(state) == ()


def test_a_step_looks_at_new_tokens_only() -> None:
    """A hundred thousand steps of one answer: quadratic work would take minutes."""
    rule, state, scores = Budget(10**6, None, (3, 3)), State((1,)), np.zeros(4, np.float32)
    for _ in range(100_000):
        state = state.plus(1)
        rule(scores, state)
    assert rule.spent(state) == 100_000


def test_one_rule_may_serve_two_answers() -> None:
    rule, one, other = Budget(2, None, (8,)), State((1,)), State((2,))
    for token in (1, 2, 3):
        one, other = one.plus(token), other.plus(8)
        assert allowed(rule, one.output) == ([8] if len(one.output) >= 2 else list(range(12)))
        assert len(allowed(rule, other.output)) == 12


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Budget(-1, None, (1,)),
        lambda: Budget(True, None, (1,)),
        lambda: Budget(1.5, None, (1,)),  # type: ignore[arg-type]
        lambda: Budget(1, (), (1,)),
        lambda: Budget(1, None, ()),
        lambda: Budget(1, None, ("a",)),  # type: ignore[arg-type]
        lambda: Budget(1, None, (-1,)),
        lambda: Budget(1, None, (1,), opens=True),
        lambda: Budget(0, None, (99,))(SCORES, State((1,))),
        lambda: Budget(9, (1, 99), (2,))(SCORES, State((1,))),
        lambda: Budget(9, None, (2, 99))(SCORES, State((1,))),
        lambda: Thinking(end=()),
        lambda: Thinking(end=(1,), most=-1),
        lambda: Thinking(end=(1,), begin=()),
        lambda: Thinking(end=(1,), skip=()),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as caught:
        wrong()
    assert caught.value.hint


# With other rules and the engine --------------------------------------------------------------------------------------


class Seen:
    """A rule that notes the answers it is asked about, and forces one token."""

    def __init__(self) -> None:
        self.outputs: list[tuple[int, ...]] = []

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        self.outputs.append(tuple(state.output))
        return scores

    def forced(self, state: State) -> tuple[int, ...]:
        return (5,)

    def complete(self, state: State) -> bool:
        return len(state.output) >= 2


def test_a_rule_for_the_answer_proper_never_sees_thoughts() -> None:
    inner = Seen()
    rule, state = Afterwards(inner, (7,), (8, 9)), State((1,))
    for token in (7, 1, 8, 9, 4, 5):
        assert rule(SCORES, state) is SCORES
        assert rule.forced(state) == ((5,) if inner.outputs else ()) and rule.complete(state) is False
        state = state.plus(token)
    rule(SCORES, state)
    assert inner.outputs == [(), (4,), (4, 5)] and rule.complete(state)
    other = State((1,), [7, 8, 9, 2])
    rule(SCORES, other)
    assert inner.outputs[-1] == (2,)  # another answer, or the same one taken back


def test_a_grammar_after_thoughts(tokenizer: Tokenizer) -> None:
    think, close = tokenizer.encode("<")[0], tokenizer.encode(">")[0]
    grammar = grammar_for(tokenizer, Constraint.choices(["ab", "and"])).rule()
    rules = (Budget(3, (think,), (close,), opens=True), Afterwards(grammar, (think,), (close,)))
    state, chance = State((1,)), np.random.default_rng(0)
    for _ in range(20):
        scores = chance.normal(size=tokenizer.vocab_size).astype(np.float32)
        for rule in rules:
            scores = rule(scores, state)
        state = state.plus(int(scores.argmax()))
        if rules[1].complete(state):
            break
    text = tokenizer.decode(state.output, skip_special=False)
    assert text[0] == "<" and text.rpartition(">")[2] in ("ab", "and")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budgets_in_the_engine(decoder: Callable[..., Decoder], tokenizer: Tokenizer, temperature: float) -> None:
    engine, prompt = Engine(decoder(), tokenizer), tuple(tokenizer.encode("the band"))
    begin, end = tuple(tokenizer.encode("<")), tuple(tokenizer.encode("/>"))
    requests = [
        Request(
            prompt,
            max_tokens=16,
            seed=tokens,
            sampling=Sampling(temperature=temperature, top_p=0.9, repetition_penalty=1.2),
            rules=(Budget(tokens, begin, end, opens=True),),
        )
        for tokens in (0, 1, 5)
    ]
    together = [answer.ids for answer in engine.answer(requests)]
    for request, ids in zip(requests, together, strict=True):
        budget = request.rules[0]
        assert isinstance(budget, Budget) and ids[: len(begin)] == begin
        assert budget.spent(State(prompt, ids)) <= budget.tokens and budget.forced(State(prompt, ids)) == ()
        assert engine.answer([request])[0].ids == ids
    free = [
        engine.answer([Request(prompt, max_tokens=16, seed=1, rules=rules)])[0].ids
        for rules in ((), (Budget(99, begin, end),))
    ]
    assert free[0] == free[1]  # a budget that is not needed is not felt


# With the default model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return load("smollm2")


def asked(model: Model, text: str, **more: Any) -> Request:
    return Request(tuple(model.prompt_ids(text)), **{"max_tokens": 24, "seed": 1, **more})


@pytest.mark.real
def test_requests_that_think(model: Model) -> None:
    begin, end = (tuple(model.tokenizer.encode(mark)) for mark in ("<think>", "</think>"))
    requests = [asked(model, "What is 2+2?", thinking=Thinking(end=end, begin=begin, most=most)) for most in (0, 4)]
    found = model.engine.answer(requests)
    for answer, most in zip(found, (0, 4), strict=True):
        thoughts, _, rest = answer.text.removeprefix("<think>").partition("</think>")
        assert answer.text.startswith("<think>") and rest and len(model.tokenizer.encode(thoughts)) <= most
        assert answer.usage.calls < answer.usage.output  # marks that must come cost no run of the model
    alone = [model.engine.answer([request])[0] for request in requests]
    assert [one.ids for one in alone] == [one.ids for one in found]
    bound = asked(model, "What is 2+2?", thinking=requests[1].thinking, constraint=Constraint.choices(["four", "five"]))
    answer = model.engine.answer([bound])[0]
    assert answer.finish == "stop" and answer.text.partition("</think>")[2] in ("four", "five")


@pytest.mark.real
def test_guessed_tokens_keep_to_the_budget(model: Model) -> None:
    begin, end = (tuple(model.tokenizer.encode(mark)) for mark in ("<think>", "</think>"))
    for most in (0, 5, 20):
        thinking = Thinking(end=end, begin=begin, most=most)
        plain = asked(model, "Repeat: one two three one two three one two three", thinking=thinking, max_tokens=32)
        one, other = (
            model.engine.answer([x])[0] for x in (plain, replace(plain, speculation=Speculation(kind="lookup")))
        )
        assert one.ids == other.ids and other.usage.calls < one.usage.calls
