"""How much a model is to think: templates are told, and thoughts are closed when they are spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchard.session.executors import thinking
from orchard.session.executors.thinking import template_variables, thinking_rules
from orchard.session.options import ContextOptions, ReasoningLevel
from orchard.session.turn import Reasoning, Turn
from orchard.text.chat import chat_ids
from orchard.text.messages import Message
from tests.session.test_local_executor import USER, scripted, text_of
from tests.session.tools.test_call_formats import tokenizer_of
from tests.tiny import TEMPLATE

ASKS = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}quick{{ reasoning_effort }}{% endif %}"


def test_templates_are_told_in_their_own_words() -> None:
    assert template_variables(None) == {}
    assert template_variables("none") == {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}
    assert template_variables("deep") == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    assert template_variables("extreme")["reasoning_effort"] == "extreme"


def test_variables_reach_the_template_and_nothing_changes_without(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ASKS)
    hello = [Message("user", "Hi")]
    plain, told = (chat_ids(tokenizer, hello, variables=template_variables(level)) for level in (None, "none"))
    assert tokenizer.decode(told[len(plain) :]) == "quicknone"
    assert plain == chat_ids(tokenizer, hello) == told[: len(plain)]


def test_spent_thoughts_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(thinking.TOKENS, "light", 3)
    events = scripted(tmp_path, TEMPLATE, "<think>abcdefghijklmnop</think>Four.", Turn(USER, reasoning="light"))
    thoughts = "".join(event.delta for event in events if isinstance(event, Reasoning))
    assert thoughts == "abc"
    assert text_of(events)
    free = scripted(tmp_path, TEMPLATE, "<think>abcdefghijklmnop</think>Four.", Turn(USER, reasoning="deep"))
    assert "".join(event.delta for event in free if isinstance(event, Reasoning)) == "abcdefghijklmnop"


def test_levels_without_a_bound_have_no_rule(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, TEMPLATE)
    assert thinking_rules(tokenizer, None, opened=False) == thinking_rules(tokenizer, "deep", opened=True) == ()
    (rule,) = thinking_rules(tokenizer, "none", opened=True)
    assert rule.tokens == 0 and rule.begin is None and tokenizer.decode(rule.end) == "</think>"
    assert ContextOptions(reasoning_level="none").reasoning_level == ReasoningLevel.none  # type: ignore[arg-type]
