"""Tools in a session: calls, errors, limits, modes; and one request at a time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from orchard.core.errors import Cancelled, UsageError
from orchard.session.errors import (
    ConcurrentRequestsError,
    DecodingFailureError,
)
from orchard.session.options import GenerationOptions, ToolCallingMode
from orchard.session.respond import TooManyStepsError
from orchard.session.session import Session
from orchard.session.transcript import (
    Instructions,
    PromptEntry,
    Response,
    ToolCalls,
    ToolOutput,
)
from orchard.testing import Answer, ToolCall
from tests.session.talking import Cat, broken, ready, weather

# Tools


def test_a_tool_is_called_and_the_model_goes_on() -> None:
    session, model = ready(ToolCall("weather", {"city": "Paris"}), "It is sunny.", tools=[weather])
    response = session.respond("Weather in Paris?")
    assert response.text == "It is sunny." and response.tool_errors == ()
    assert [type(entry) for entry in session.transcript] == [
        Instructions,
        PromptEntry,
        ToolCalls,
        ToolOutput,
        Response,
    ]
    output = session.transcript.entries[3]
    assert isinstance(output, ToolOutput) and output.text == "sunny in Paris"
    asked = model.turns[1].messages
    assert asked[-1].role == "tool" and asked[-1].content == "sunny in Paris"
    assert asked[-2].tool_calls is not None and asked[-2].tool_calls[0]["function"]["arguments"] == {"city": "Paris"}
    assert response.usage.calls == model.turns.__len__() + 3 - 1  # one call, and three pieces of text


def test_tools_are_named_in_the_transcript() -> None:
    session, model = ready("hi", tools=[weather])
    first = session.transcript[0]
    assert isinstance(first, Instructions) and first.tools is not None and first.tools[0].name == "weather"
    session.respond("hello")
    assert model.turns[0].tools[0].name == "weather" and model.turns[0].tool_mode == "allowed"


def test_several_calls_at_once_run_side_by_side_and_stay_in_order() -> None:
    together = threading.Barrier(2, timeout=5)

    def slow(name: str) -> str:
        """Waits for the other one."""
        together.wait()
        return name.upper()

    calls = [ToolCall("slow", {"name": "a"}), ToolCall("slow", {"name": "b"})]
    session, _ = ready(calls, "done", tools=[slow])
    session.respond("go")
    assert [entry.text for entry in session.transcript if isinstance(entry, ToolOutput)] == ["A", "B"]


def test_a_tool_that_fails_is_told_to_the_model_and_to_the_caller() -> None:
    session, model = ready(ToolCall("broken", {"city": "Paris"}), "I could not.", tools=[broken])
    response = session.respond("go")
    assert response.text == "I could not."
    assert [error.tool_name for error in response.tool_errors] == ["broken"]
    assert isinstance(response.tool_errors[0].underlying_error, KeyError)
    assert "Paris" in model.turns[1].messages[-1].content


def test_an_unknown_tool_and_bad_arguments_are_errors_for_the_model() -> None:
    wrong = Answer(calls=(ToolCall("nothing", {}), ToolCall("weather", "{not json")), checked=False)
    session, _model = ready(wrong, "sorry", tools=[weather])
    response = session.respond("go")
    assert response.text == "sorry" and len(response.tool_errors) == 2
    calls = session.transcript.entries[2]
    assert isinstance(calls, ToolCalls) and calls.calls[1].extra == {"invalidArguments": "{not json"}


def test_a_tool_that_never_returns_is_given_up() -> None:
    never = threading.Event()

    def stuck() -> str:
        """Never returns."""
        never.wait(20)
        return "late"

    session, _ = ready(ToolCall("stuck"), "gave up", tools=[stuck], tool_timeout=0.1)
    began = time.monotonic()
    response = session.respond("go")
    assert time.monotonic() - began < 5 and response.text == "gave up" and len(response.tool_errors) == 1
    never.set()


def test_async_tools_work_without_a_loop() -> None:
    async def later(x: int) -> int:
        """Adds one."""
        return x + 1

    session, _ = ready(ToolCall("later", {"x": 1}), "two", tools=[later])
    session.respond("go")
    assert [entry.text for entry in session.transcript if isinstance(entry, ToolOutput)] == ["2"]


def test_the_step_limit_is_a_typed_error() -> None:
    session, model = ready(*[ToolCall("weather", {"city": "Paris"})] * 3, tools=[weather], max_steps=2)
    with pytest.raises(TooManyStepsError) as caught:
        session.respond("go")
    assert len(model.turns) == 2 and "max_steps" in caught.value.hint and len(session.transcript) == 1


def test_at_the_limit_an_answer_without_tools_can_be_asked_for() -> None:
    call = ToolCall("weather", {"city": "Paris"})
    session, model = ready(call, call, "enough", tools=[weather], max_steps=2, at_limit="answer")
    assert session.respond("go").text == "enough"
    assert model.turns[2].tool_mode == "disallowed" and model.turns[2].tools == ()


def test_a_guided_call_may_use_tools_and_ends_in_its_form() -> None:
    call = ToolCall("weather", {"city": "Paris"})
    session, model = ready(call, call, {"name": "Tom", "age": 1}, tools=[weather], max_steps=2)
    assert session.respond("go", Cat).content.name == "Tom"
    assert [turn.tool_mode for turn in model.turns] == ["allowed", "allowed", "disallowed"]
    assert all(turn.constraint is not None for turn in model.turns)


@pytest.mark.parametrize("mode", ["required", ToolCallingMode.named("weather")])
def test_required_tools_are_required_once(mode: Any) -> None:
    session, model = ready(ToolCall("weather", {"city": "Paris"}), "sunny", tools=[weather])
    session.respond("go", options=GenerationOptions(tool_calling_mode=mode))
    assert [turn.tool_mode for turn in model.turns] == [getattr(mode, "mode", mode), "allowed"]


@pytest.mark.parametrize(("mode", "tools"), [("required", []), ("calendar", [weather])])
def test_a_required_tool_that_is_not_there_is_an_error_before_any_token(mode: str, tools: Any) -> None:
    session, model = ready("x", tools=tools)
    with pytest.raises(UsageError, match=r"must be called|required"):
        session.respond("go", options=GenerationOptions(tool_calling_mode=mode))
    assert not model.turns


def test_a_required_call_that_was_cut_off_is_a_decoding_failure() -> None:
    session, _ = ready(Answer("", finish="length", checked=False), tools=[weather])
    with pytest.raises(DecodingFailureError, match="no whole call"):
        session.respond("go", options=GenerationOptions(tool_calling_mode="required"))
    assert len(session.transcript) == 1


def test_required_in_every_step_until_the_limit() -> None:
    call = ToolCall("weather", {"city": "Paris"})
    session, model = ready(call, call, "end", tools=[weather], max_steps=2, required_steps=None, at_limit="answer")
    session.respond("go", options=GenerationOptions(tool_calling_mode="required"))
    assert [turn.tool_mode for turn in model.turns] == ["required", "required", "disallowed"]


def test_disallowed_tools_are_not_shown() -> None:
    session, model = ready("hi", tools=[weather])
    session.respond("go", options=GenerationOptions(tool_calling_mode="disallowed"))
    assert model.turns[0].tools == () and model.turns[0].tool_mode == "disallowed"


def test_tools_of_one_call() -> None:
    session, model = ready(ToolCall("weather", {"city": "Rome"}), "sunny", "plain")
    session.respond("go", tools=[weather])
    session.respond("again")
    assert model.turns[0].tools[0].name == "weather" and model.turns[2].tools == ()


def test_words_before_a_call_are_kept() -> None:
    first = Answer("Let me see.", calls=(ToolCall("weather", {"city": "Rome"}),))
    session, model = ready(first, "sunny", tools=[weather])
    assert session.respond("go").text == "sunny"
    assert model.turns[1].messages[-2].content == "Let me see."


# One at a time


def test_requests_wait_in_line_in_the_order_of_asking() -> None:
    session, model = ready(*["x"] * 6, script={"delay": 0.01})
    threads = []
    for number in range(6):
        thread = threading.Thread(target=session.respond, args=(f"prompt {number}",))
        thread.start()
        threads.append(thread)
        time.sleep(0.005)
    for thread in threads:
        thread.join(10)
    assert model.prompts == [f"prompt {number}" for number in range(6)]
    assert len(session.transcript) == 12


def test_a_tool_that_asks_its_own_session_is_refused() -> None:
    held: list[Session] = []

    def nested(question: str) -> str:
        """Asks the same session."""
        return held[0].respond(question).text

    session, _ = ready(ToolCall("nested", {"question": "?"}), "fine", tools=[nested])
    held.append(session)
    response = session.respond("go")
    assert response.text == "fine"
    assert isinstance(response.tool_errors[0].underlying_error, ConcurrentRequestsError)


def test_a_hook_that_asks_its_own_session_is_refused() -> None:
    held: list[Session] = []
    session, _ = ready("a", "b", hooks={"on_prompt": lambda text: held[0].respond(text).text})
    held.append(session)
    with pytest.raises(ConcurrentRequestsError):
        session.respond("go")


def test_a_tool_may_ask_another_session() -> None:
    other, _ = ready("42")

    def ask(question: str) -> str:
        """Asks another session."""
        return other.respond(question).text

    session, _ = ready(ToolCall("ask", {"question": "?"}), "it is 42", tools=[ask])
    assert session.respond("go").tool_errors == ()


def test_asking_while_a_stream_is_open_here_is_refused_and_not_a_deadlock() -> None:
    session, _ = ready("one two", "three")
    stream = session.stream("a")
    next(stream)
    with pytest.raises(ConcurrentRequestsError):
        session.respond("b")
    stream.close()
    assert session.respond("b").text == "three"


def test_cancel_from_another_thread() -> None:
    session, _ = ready("word " * 1000, "fine", script={"delay": 0.005})
    threading.Timer(0.05, session.cancel).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        session.respond("go")
    assert time.monotonic() - began < 2 and len(session.transcript) == 0
    assert session.respond("again").text == "fine" and not session.cancel()


def test_cancel_while_a_tool_runs() -> None:
    never = threading.Event()

    def stuck() -> str:
        """Never returns."""
        never.wait(20)
        return "late"

    session, _ = ready(ToolCall("stuck"), "fine", tools=[stuck])
    threading.Timer(0.1, session.cancel).start()
    with pytest.raises(Cancelled):
        session.respond("go")
    never.set()
    assert session.respond("again").text == "fine"
