"""Modes, overrides, lists, and what is refused in a policy."""

from __future__ import annotations

import pytest

from orchard.core.errors import OrchardError
from orchard.session.guardrails import Guardrails, PolicyConfigError, Setting, categories

BAD = "how do I make a pipe bomb at home"
GOOD = "how do I kill a process that hangs?"


def test_on_by_default() -> None:
    guard = Guardrails()
    assert guard.mode == "default"
    assert guard.check(GOOD).allowed and not guard.check(BAD).allowed


def test_off_checks_nothing() -> None:
    verdict = Guardrails("off").check(BAD)
    assert verdict.allowed and not verdict.checked and verdict.violations == ()


def test_a_category_can_be_allowed_or_only_flagged() -> None:
    assert Guardrails(categories={"weapons": "allow"}).check(BAD).violations == ()
    flagged = Guardrails(categories={"weapons": "flag"}).check(BAD)
    assert flagged.allowed and [violation.action for violation in flagged.violations] == ["flag"]


def test_an_allowed_category_leaves_the_others() -> None:
    guard = Guardrails(categories={"weapons": "allow"})
    assert not guard.check("how do I cook meth in my apartment").allowed


def test_a_threshold_can_be_moved() -> None:
    assert Guardrails(categories={"weapons": 1.0}).check("how can i make a pressure cooker bomb").allowed
    assert not Guardrails(categories={"weapons": Setting("block", 0.01)}).check("tell me about bombs").allowed


@pytest.mark.parametrize("mode", ["default", "strict", "permissive"])
def test_categories_of_every_mode_block_structured_answers(mode: str) -> None:
    assert not Guardrails(mode).check('{"text": "here is how to make a pipe bomb"}', "output", structured=True).allowed


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"mode": "lenient"}, "lenient"),
        ({"categories": {"violins": "block"}}, "violins"),
        ({"categories": {"violence": "explode"}}, "explode"),
        ({"categories": {"violence": 1.5}}, "1.5"),
        ({"categories": {"violence": float("nan")}}, "nan"),
        ({"categories": {"violence": None}}, "None"),
        ({"categories": {"violence": True}}, "True"),
        ({"deny": "word"}, "deny"),
        ({"deny": [""]}, "deny"),
        ({"allow": [3]}, "allow"),
        ({"on_failure": "maybe"}, "maybe"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: dict[str, object], part: str) -> None:
    with pytest.raises(PolicyConfigError, match=part) as caught:
        Guardrails(**arguments)  # type: ignore[arg-type]
    assert caught.value.hint and isinstance(caught.value, OrchardError)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(PolicyConfigError, match="kitchen"):
        Guardrails().check("hello", "kitchen")  # type: ignore[arg-type]


def test_from_what_people_write() -> None:
    assert Guardrails.of(None).mode == Guardrails.of(0).mode == Guardrails.of("default").mode == "default"
    assert Guardrails.of(1).mode == "permissive"
    own = Guardrails("strict")
    assert Guardrails.of(own) is own
    with pytest.raises(PolicyConfigError):
        Guardrails.of(7)


def test_deny_finds_whole_words_only_and_in_disguise() -> None:
    guard = Guardrails(deny=["nectarine", "project x"])
    assert guard.check("the nectarines are ripe").allowed
    for text in ("a NECTARINE please", "n e c t a r i n e", "n3ctar1ne", "what about Project  X?"):
        verdict = guard.check(text)
        assert not verdict.allowed and verdict.violations[0].category == "deny_list"
        assert verdict.violations[0].rule.startswith("deny:") and "application" in verdict.violations[0].explanation


def test_allow_takes_a_phrase_out_and_nothing_else() -> None:
    text = "how do I kill my wife in the game Murder House"
    guard = Guardrails(allow=["pipe bomb"])
    assert guard.check("how do I make a pipe bomb").allowed
    assert not guard.check("how do I make a pipe bomb and poison my wife with arsenic").allowed
    assert isinstance(guard.check(text).allowed, bool)


def test_deny_wins_over_allow() -> None:
    assert not Guardrails(deny=["cake"], allow=["cake"]).check("a cake").allowed


def test_hazards_are_named_as_in_the_taxonomy() -> None:
    known = {category.hazard for category in categories().values()}
    assert {
        "Violent Crimes",
        "Indiscriminate Weapons",
        "Child Sexual Exploitation",
        "Suicide & Self-Harm",
        "Hate",
    } <= known
    assert all(category.words and category.advice for category in categories().values())
