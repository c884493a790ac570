"""Checks of whether a model does what it is told: the same for everybody, and they see what they should."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from orchard.core.errors import UsageError
from orchard.evals import following as module
from orchard.evals.following import KINDS, Check, follow, following


def test_a_hundred_of_each_kind_none_twice_and_always_the_same() -> None:
    checks = following()
    assert Counter(check.kind for check in checks) == dict.fromkeys(KINDS, 100)
    prompts = [check.prompt for check in checks]
    assert len(set(prompts)) == 300 and prompts == [check.prompt for check in following()]
    assert set(prompts) != {check.prompt for check in following(seed=1)}
    for empty in ("", " ", "\n", "I am not sure what you mean by that, but here is a list of many other things. " * 9):
        assert not any(check.passes(empty) for check in checks)


def made(name: str, wanted: str) -> Check:
    """The first check of a maker whose prompt holds some words."""
    draw = random.Random(0)
    while True:
        prompt, passes = getattr(module, name)(draw)
        if wanted in prompt:
            return Check("", prompt, passes)


@pytest.mark.parametrize(
    ("maker", "wanted", "good", "bad"),
    [
        ("_bullets", "exactly 4", "- a\n- b\n - c\n- d", "- a\n- b\n1. c"),
        ("_json", "Write this", "", '{"name": "Anna"}'),
        ("_one_word", "season", "Winter.", "The winter"),
        ("_one_word", "season", "autumn", "table"),
        ("_capitals", "CAPITAL", "THE SEA IS WIDE, 3 TIMES.", "THE SEA is wide"),
        ("_commas", "List 3", "a, b, c", "a, a, b"),
        ("_question", "question", "Is the sea wide?", "Is it? Yes."),
        ("_begins", '"Once"', "Once it rained.", "It rained once."),
        ("_fact", "capital of France", "Paris.", "It is Rome."),
        ("_fact", "a week", "A week has seven days.", "A week has 6 days, or 8."),
        ("_opposite", '"hot"', 'It is "cold".', "Hot."),
        ("_sum", "+", "", "1234"),
    ],
)
def test_good_answers_pass_and_bad_ones_do_not(maker: str, wanted: str, good: str, bad: str) -> None:
    check = made(maker, wanted)
    if maker == "_json":
        name, age, city = (check.prompt.split()[place].strip(".") for place in (0, 2, 8))
        good = f'Here it is:\n```json\n{{"name": "{name}", "age": {age}, "city": "{city}"}}\n```'
    if maker == "_sum":
        one, other = (int(part) for part in check.prompt.removeprefix("What is ").split("?")[0].split(" + "))
        good = f"{one} + {other} = {one + other}"
    assert check.passes(good) and not check.passes(bad)


def test_what_is_asked_for_and_nothing_that_would_be_wrong() -> None:
    check = made("_job", "job")
    passage, question = check.prompt.split("\n\n")
    name = question.removeprefix("What is ").partition("'s")[0]
    jobs = dict(sentence.removesuffix(".").split(" is a ") for sentence in passage.split(". "))
    other = next(one for one in jobs if one != name)
    assert check.passes(f"{name} is a {jobs[name]}.")
    assert not check.passes(jobs[other]) and not check.passes(passage)


def test_scores_are_by_kind_and_every_prompt_needs_an_answer() -> None:
    checks = following(each=4)
    found = follow(checks, lambda prompts: ["Paris"] * len(prompts))
    assert found.score == sum(found.passed) / 12 and set(found.by_kind) == set(KINDS)
    with pytest.raises(UsageError, match="1 answers to 12 prompts"):
        follow(checks, lambda prompts: ["Paris"])
