"""Plans, budgets and rules of `compress`: what is read from words and files, and what is refused, with the nearest names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.recipes.base import about
from orchard.recipes.compressing.bounds import BadBudget, BadRule, Budget, Rule, count_of, rules
from orchard.recipes.compressing.plan import BadPlan, parameters, read_plan
from orchard.recipes.compressing.ready import READY
from orchard.recipes.compressing.step import Lessons, Step
from orchard.recipes.compressing.steps import UnknownStep, steps


def test_words_and_files_say_the_same(tmp_path: Path) -> None:
    plan = read_plan(["share-kv:last=2", "heal:lr=1e-4", 'rtn:bits=2,group=none,targets=["q", "v"]'])
    assert plan.words == ["share-kv:last=2", "heal:lr=0.0001", 'rtn:bits=2,group=none,targets=["q", "v"]']
    assert [step.name for step in plan.steps] == ["share-kv", "heal", "rtn"]
    assert plan.steps[2].transform == read_plan(plan.words).steps[2].transform, "words can be read again"
    lessons = plan.steps[1].lessons
    assert lessons is not None and lessons.lr == 1e-4
    path = tmp_path / "plan.json"
    items: list[Any] = ["share-kv:last=2", {"step": "heal", "lr": 1e-4}]
    items.append({"step": "rtn", "bits": 2, "group": None, "targets": ["q", "v"]})
    path.write_text(json.dumps(items))
    assert read_plan(str(path)).words == plan.words
    path.write_text(json.dumps({"steps": items, "budget": "58MB", "stop": "kl<0.3", "tokens": "1M"}))
    found = read_plan(str(path))
    assert (str(found.budget), str(found.stop[0]), found.tokens) == ("58 MB", "kl<0.3", 1_000_000)
    other = read_plan(str(path), budget="3bpw", stop="loss<1.1", tokens=5)
    assert (str(other.budget), str(other.stop[0]), other.tokens) == ("3 bits per weight", "loss<1.1", 5)


def test_ready_plans_are_plans_and_steps_explain_themselves() -> None:
    for name, ready in READY.items():
        plan = read_plan(name)
        assert len(plan.steps) == len(ready.steps) and (plan.budget is None) == (ready.budget is None)
    for name, function in steps().items():
        assert about(function).endswith("."), name
        assert all(words for _, words in parameters(function).values()), f"{name} does not explain all its settings"
    assert READY.keys().isdisjoint(steps()), "a word is a plan or a step"


@pytest.mark.parametrize(
    ("words", "kind", "says", "hint"),
    [
        ([], BadPlan, "without steps", "int4"),
        (["gtpq"], UnknownStep, "gtpq", "gptq"),
        (["int5"], UnknownStep, "int5", "int4"),
        (["rtn:bit=4"], BadPlan, "takes no 'bit'", "bits"),
        (["rtn:bits=four"], BadPlan, "bits is 'four'", "whole number"),
        (["rtn:bits=3"], BadPlan, "bits is 3", "8, 4 or 2"),
        (["rtn:bits=4,bits=2"], BadPlan, "twice", "once"),
        (["rtn:bits"], BadPlan, "no setting", "key=value"),
        (["kv8:bits=4"], BadPlan, "takes no 'bits'", "nothing"),
        (["share-kv:last=0"], BadPlan, "0", "from 1"),
        (["share-kv:last=1,share=0.5"], BadPlan, "both", "one of them"),
        ([" "], BadPlan, "no step", "name"),
        (["none.json"], BadPlan, "cannot be read", "JSON"),
    ],
)
def test_wrong_words(words: list[str], kind: type[UsageError], says: str, hint: str) -> None:
    with pytest.raises(kind) as caught:
        read_plan(words)
    assert says in caught.value.message and hint in caught.value.hint and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("{}", "no list of steps"),
        ("[]", "no list of steps"),
        ('{"steps": ["kv8"], "bugdet": "3MB"}', "no 'bugdet'"),
        ("[3]", "step 1: 3 is no step"),
        ('["kv8", {"step": "rnt"}]', "step 2: no step is called 'rnt'"),
        ('[{"step": "rtn", "bits": "x"}]', "step 1: rtn: bits"),
        ('["other.json"]', "no step"),
    ],
)
def test_wrong_files(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_plan(str(path))
    assert says in caught.value.message and caught.value.hint


def test_two_plans_with_budgets_of_their_own(tmp_path: Path) -> None:
    names = []
    for budget in ("3MB", "4MB"):
        names.append(str(tmp_path / f"{budget}.json"))
        Path(names[-1]).write_text(json.dumps({"steps": ["kv8"], "budget": budget}))
    with pytest.raises(BadPlan, match="two plans with a budget"):
        read_plan(names)
    assert str(read_plan([names[0], "kv8"]).budget) == "3 MB"


def test_tokens_are_shared_out_by_shares() -> None:
    plan = read_plan(["heal:share=1", "heal:tokens=7", "heal:share=3", "kv8"])
    assert plan.tokens_of(1000) == [250, 7, 750, 0]
    assert read_plan("kv8").tokens_of(1000) == [0] and not read_plan("kv8").learns


@given(low=st.floats(1, 3), more=st.floats(0, 3))
def test_guesses_stay_in_order(low: float, more: float) -> None:
    """A step never turns a range around, and mending never makes a model better than the original."""
    for step in (Step(costs=(1.1, 1.5)), Step(mends=(0.1, 0.5)), Step(lessons=Lessons(), costs=(1.0, 1.2))):
        a, b = step.guess((low, low + more))
        assert 1 <= a <= b


# Budgets and rules ------------------------------------------------------------------------------------------------------


def test_budgets() -> None:
    assert Budget.parse("3.2bpw").bytes(1000) == 400 and Budget.parse(" 2 bits ").bytes(8) == 2
    assert Budget.parse("58MB").bytes(1) == 58_000_000 and Budget.parse("1.5 KiB").bytes(1) == 1536
    for text in ("", "58", "MB", "0MB", "-3bpw", "3.2bpv", "nan MB", "1e9999bpw", "3,2bpw"):
        with pytest.raises(BadBudget) as caught:
            Budget.parse(text)
        assert "58MB" in caught.value.hint


def test_rules() -> None:
    rule = Rule.parse(" loss <= 1.08 ")
    assert rule.holds({"loss": 1.08}) and not rule.holds({"loss": 1.081})
    assert not rule.holds({"loss": math.nan}) and not rule.holds({"loss": None}) and not rule.holds({})
    assert [str(one) for one in rules(["kl<0.3,agreement>0.8", "loss<2"])] == ["kl<0.3", "agreement>0.8", "loss<2"]
    assert rule.claim().bound.limit == 1.08


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("loss", "no rule", "loss<1.08"),
        ("", "no rule", "loss<1.08"),
        ("los<1", "'los'", "loss"),
        ("loss>1.08", "bad model", "loss<1.08"),
        ("agreement<0.5", "bad model", "agreement>0.5"),
        ("kl<1e", "no number", "kl<1"),
        ("kl<1e999", "no number", "kl<1"),
        ("kl<1,kl<2", "two rules", "one of them"),
    ],
)
def test_wrong_rules(text: str, says: str, hint: str) -> None:
    with pytest.raises(BadRule) as caught:
        rules(text)
    assert says in caught.value.message and hint in caught.value.hint


def test_counts() -> None:
    assert [count_of(text) for text in ("20M", "500k", "4096", "1e6", "2.5m", 7)] == [
        20_000_000,
        500_000,
        4096,
        1_000_000,
        2_500_000,
        7,
    ]
    for wrong in ("", "many", "0", "-1", "inf", 0):
        with pytest.raises(UsageError, match="tokens is"):
            count_of(wrong)
