"""A load is fixed before it is sent: prompts, arrivals and bodies come from the seed alone."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.bench.load.plan import WORDS, Load
from orchard.core.errors import UsageError


@given(st.integers(0, 2**40), st.integers(3, 200), st.integers(0, 10**6))
def test_a_prompt_has_as_many_words_as_asked_and_depends_on_seed_and_number_only(
    seed: int, tokens: int, number: int
) -> None:
    prompt = Load(seed=seed, prompt_tokens=tokens).prompt(number)
    assert len(prompt.split()) == tokens and set(prompt.split()) <= set(WORDS)
    assert prompt == Load(seed=seed, prompt_tokens=tokens).prompt(number)


def test_no_two_prompts_begin_alike() -> None:
    load = Load(prompt_tokens=16)
    beginnings = {tuple(load.prompt(number).split()[:3]) for number in range(3000)}
    assert len(beginnings) == 3000


@pytest.mark.parametrize("shared", [1, 10, 97])
def test_a_shared_prefix_is_shared_and_the_rest_is_not(shared: int) -> None:
    load = Load(prompt_tokens=100, shared_prefix=shared)
    first, second = load.prompt(0).split(), load.prompt(1).split()
    assert len(first) == len(second) == 100
    assert first[:shared] == second[:shared] and first[shared : shared + 3] != second[shared : shared + 3]


def test_arrivals_are_poisson_and_repeat() -> None:
    load = Load(rate=50.0, requests=4000)
    due = list(load.arrivals())
    gaps = [after - before for before, after in pairwise(due)]
    assert due == list(load.arrivals()) and due != list(Load(rate=50.0, requests=4000, seed=1).arrivals())
    assert len(due) == 4000 and due[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)  # of an exponential: as large as its mean


def test_a_time_ends_arrivals() -> None:
    due = list(Load(rate=100.0, seconds=2.0).arrivals())
    assert due[-1] < 2.0 and 120 < len(due) < 290
    assert len(list(Load(rate=100.0, seconds=2.0, requests=10).arrivals())) == 10


def test_bodies() -> None:
    chat = json.loads(Load(model="m", prompt_tokens=5, max_tokens=7).body(3))
    assert chat["messages"][0]["content"] == Load(prompt_tokens=5).prompt(3)
    assert (chat["model"], chat["max_tokens"], chat["temperature"], chat["stream"]) == ("m", 7, 0.0, True)
    assert chat["stream_options"] == {"include_usage": True}
    text = json.loads(Load(endpoint="completions", usage=False, extra={"top_k": 1, "stream": False}).body(0))
    assert "prompt" in text and "stream_options" not in text and text["top_k"] == 1 and text["stream"] is False


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rate": 1.0, "clients": 2}, "rate"),
        ({"rate": 0.0}, "--rate"),
        ({"rate": float("nan")}, "--rate"),
        ({"clients": 0}, "--clients"),
        ({"prompt_tokens": 0}, "--prompt-tokens"),
        ({"max_tokens": -1}, "--max-tokens"),
        ({"endpoint": "responses"}, "responses"),
        ({"prompt_tokens": 10, "shared_prefix": 8}, "shared"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says) as raised:
        Load(**wrong)  # type: ignore[arg-type]
    assert raised.value.hint
