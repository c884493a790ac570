"""Hooks: what they see, what they may change, and what becomes of a turn when they raise."""

from __future__ import annotations

from typing import Any

import pytest

from orchard.core.errors import UsageError
from orchard.session.hooks import HookChain, Hooks, ToolRejectedError, approve, edit, reject
from orchard.session.session import Session
from orchard.session.transcript import Instructions, PromptEntry, ToolOutput, Transcript
from orchard.session.turn import Call
from orchard.testing import Answer, ScriptedModel, ToolCall


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def ready(*answers: Any, **settings: Any) -> tuple[Session, ScriptedModel]:
    model = ScriptedModel(answers)
    return Session(model=model, guardrails=None, **settings), model


def outputs(session: Session) -> list[str]:
    return [entry.text for entry in session.transcript if isinstance(entry, ToolOutput)]


def test_on_prompt_changes_the_prompt() -> None:
    session, model = ready("x", "y", hooks={"on_prompt": lambda text: text.upper() if "loud" in text else None})
    session.respond("loud")
    session.respond("quiet")
    assert model.prompts == ["LOUD", "quiet"] and session.transcript[0].text == "LOUD"


def test_on_response_sees_it_before_the_transcript_does() -> None:
    seen: list[tuple[str, int]] = []
    session, _ = ready("hello")
    session.hooks = Hooks(on_response=lambda response: seen.append((response.text, len(session.transcript))))
    session.respond("hi")
    assert seen == [("hello", 0)] and len(session.transcript) == 2


def test_a_hook_that_raises_discards_the_turn() -> None:
    def no(response: Any) -> None:
        raise LookupError("not good enough")

    session, _ = ready("bad", "good", hooks={"on_response": no})
    with pytest.raises(LookupError):
        session.respond("hi")
    assert len(session.transcript) == 0 and not session.is_responding
    session.hooks = Hooks()
    assert session.respond("hi").text == "good"


@pytest.mark.parametrize("yes", [None, True, approve()])
def test_a_call_can_be_approved(yes: Any) -> None:
    seen: list[Call] = []

    def hook(call: Call) -> Any:
        seen.append(call)
        return yes

    session, _ = ready(ToolCall("add", {"a": 1, "b": 2}), "3", tools=[add], hooks={"on_tool_call": hook})
    session.respond("1+2")
    assert outputs(session) == ["3"] and seen[0].name == "add" and seen[0].arguments == '{"a":1,"b":2}'


@pytest.mark.parametrize("no", [False, reject("only on weekdays")])
def test_one_call_can_be_rejected_and_the_turn_goes_on_apple_fails(no: Any) -> None:
    calls = [ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 5, "b": 5})]
    hook = lambda call: no if '"a":1' in call.arguments else None  # noqa: E731
    session, _ = ready(calls, "ten", tools=[add], hooks={"on_tool_call": hook})
    response = session.respond("go")
    assert response.text == "ten" and outputs(session)[1] == "10"
    assert getattr(no, "reason", "not allowed") in outputs(session)[0]
    assert len(response.tool_errors) == 1 and isinstance(response.tool_errors[0], ToolRejectedError)


@pytest.mark.parametrize("change", [{"a": 10, "b": 20}, edit({"a": 10, "b": 20}), edit('{"a":10,"b":20}')])
def test_arguments_can_be_edited(change: Any) -> None:
    session, _ = ready(
        ToolCall("add", {"a": 1, "b": 2}), "30", tools=[add], hooks={"on_tool_call": lambda call: change}
    )
    session.respond("go")
    assert outputs(session) == ["30"]


def test_edited_arguments_are_checked_like_any_others() -> None:
    session, _ = ready(
        ToolCall("add", {"a": 1, "b": 2}), "hm", tools=[add], hooks={"on_tool_call": lambda call: {"a": "one"}}
    )
    assert len(session.respond("go").tool_errors) == 1


def test_a_decision_that_is_none_of_them() -> None:
    session, _ = ready(ToolCall("add", {"a": 1, "b": 2}), tools=[add], hooks={"on_tool_call": lambda call: 7})
    with pytest.raises(UsageError, match="on_tool_call"):
        session.respond("go")


def test_on_tool_output_changes_what_the_model_reads() -> None:
    session, model = ready(
        ToolCall("add", {"a": 1, "b": 2}), "x", tools=[add], hooks={"on_tool_output": lambda call, out: f"<{out}>"}
    )
    session.respond("go")
    assert outputs(session) == ["<3>"] and model.turns[1].messages[-1].content == "<3>"


def test_hooks_must_return_texts() -> None:
    session, _ = ready("x", hooks={"on_prompt": lambda text: 7})
    with pytest.raises(UsageError, match="on_prompt"):
        session.respond("go")


def test_history_transform_changes_what_the_model_sees_and_not_what_is_kept() -> None:
    def last_only(transcript: Transcript) -> Transcript:
        transcript[:] = list(transcript)[-1:]  # a copy: it may be changed
        return transcript

    session, model = ready("1", "2", hooks={"history_transform": last_only})
    session.respond("a")
    session.respond("b")
    assert [message.content for message in model.turns[1].messages] == ["b"] and len(session.transcript) == 4


def test_history_transform_can_add() -> None:
    add_rule = lambda transcript: Transcript([Instructions("Be brief."), *transcript])  # noqa: E731
    session, model = ready("1", hooks={"history_transform": add_rule})
    session.respond("a")
    assert model.turns[0].messages[0].content == "Be brief."
    assert type(session.transcript[0]) is PromptEntry


def test_reasoning_is_heard_as_it_comes() -> None:
    heard: list[str] = []
    session, _ = ready(Answer("x", reasoning="one two three"), hooks={"on_reasoning": heard.append})
    session.respond("a")
    assert heard == ["one ", "two ", "three"]


def test_chains_run_in_order_and_the_first_rejection_counts() -> None:
    chain = HookChain(
        Hooks(on_prompt=lambda text: text + "1", on_tool_call=lambda call: {"n": 1}),
        Hooks(on_prompt=lambda text: text + "2", on_tool_call=lambda call: reject(call.arguments)),
    )
    assert chain.prompt("0") == "012"
    call, decision = chain.tool_call(Call("id", "t", "{}"))
    assert decision.kind == "reject" and decision.reason == '{"n": 1}' and call.arguments == '{"n": 1}'


def test_a_wrong_set_of_hooks() -> None:
    assert Hooks.of(None) == Hooks()
    with pytest.raises(UsageError, match="on_everything"):
        Hooks.of({"on_everything": print})
