"""The conversation loop over a scripted model: what is asked, what comes back, what the transcript keeps."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from orchard.core.errors import Cancelled, OrchardError, UsageError
from orchard.session.errors import (
    AssetsUnavailableError,
    ConcurrentRequestsError,
    DecodingFailureError,
    ExceededContextWindowSizeError,
    GuardrailViolationError,
    ImagePromptError,
    PromptError,
    RateLimitedError,
    RefusalError,
    TranscriptError,
)
from orchard.session.options import ContextOptions, GenerationOptions, SamplingMode, ToolCallingMode
from orchard.session.policies import RollingWindow, Strict, Summarise
from orchard.session.prompt import ImageAttachment
from orchard.session.respond import TooManyStepsError
from orchard.session.schema import GeneratedContent, GenerationSchema, generable, guide, schema_for
from orchard.session.session import Session
from orchard.session.transcript import (
    Instructions,
    PromptEntry,
    Reasoning,
    Response,
    StructureSegment,
    ToolCalls,
    ToolOutput,
    Transcript,
)
from orchard.session.turn import Usage
from orchard.testing import Answer, ScriptedModel, ToolCall


@generable("A cat")
class Cat:
    name: str = guide("its name")
    age: int = guide("years", range=(0, 20))


@dataclass
class Point:
    x: int
    y: int


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: where
    """
    return f"sunny in {city}"


def broken(city: str) -> str:
    """A tool that fails."""
    raise KeyError(city)


def ready(*answers: Any, **settings: Any) -> tuple[Session, ScriptedModel]:
    model = ScriptedModel(answers, **settings.pop("script", {}))
    return Session(settings.pop("instructions", None), model=model, **settings), model


# One answer


def test_a_text_and_everything_about_it() -> None:
    session, model = ready("Hello there!", instructions="Be kind.")
    response = session.respond("Hi")
    assert response.content == response.text == str(response) == "Hello there!"
    assert response.finish == "stop" and response.raw_content is None and response.logprobs is None
    assert response.usage.output == 2 and response.usage.input > 3
    assert [message.role for message in model.turns[0].messages] == ["system", "user"]
    assert model.turns[0].tool_mode == "disallowed" and model.turns[0].constraint is None
    assert [type(entry) for entry in session.transcript] == [Instructions, PromptEntry, Response]
    assert response.transcript_entries == session.transcript.entries[1:]


def test_the_next_turn_sees_what_was_said() -> None:
    session, model = ready("One.", "Two.")
    session.respond("first")
    session.respond("second")
    assert [message.content for message in model.turns[1].messages] == ["first", "One.", "second"]


def test_usage_is_summed_and_also_counts_a_failed_turn() -> None:
    session, _ = ready("One two.", Answer("three four", error=RateLimitedError("slow down")), "five")
    first = session.respond("a").usage
    with pytest.raises(RateLimitedError):
        session.respond("b")
    third = session.respond("c").usage
    assert session.usage == first + third  # a turn that broke off reported nothing
    session.transcript = []
    assert session.usage.output == 3


def test_logprobs_come_one_for_each_token() -> None:
    session, model = ready("one two three")
    response = session.respond("go", options=GenerationOptions(logprobs=2))
    assert model.turns[0].logprobs == 2
    assert response.logprobs is not None and len(response.logprobs) == 3


def test_options_reach_the_turn() -> None:
    session, model = ready("x", options=GenerationOptions(temperature=0.5, maximum_response_tokens=7, stop=("END",)))
    session.respond("go", options=GenerationOptions(SamplingMode.random(top=3, seed=11)))
    turn = model.turns[0]
    assert (turn.sampling.temperature, turn.sampling.top_k, turn.max_tokens, turn.stop, turn.seed) == (
        0.5,
        3,
        7,
        ("END",),
        11,
    )


def test_a_fresh_seed_is_chosen_and_reported() -> None:
    session, model = ready("x", "x")
    first, second = session.respond("go"), session.respond("go")
    assert first.seed == model.turns[0].seed and second.seed == model.turns[1].seed
    assert first.seed != second.seed


def test_the_length_limit_shows_in_finish() -> None:
    session, _ = ready("one two three four")
    response = session.respond("go", options=GenerationOptions(maximum_response_tokens=2))
    assert response.finish == "length" and response.text == "one two "


def test_reasoning_is_kept_apart() -> None:
    heard: list[str] = []
    session, model = ready(Answer("4", reasoning="two and two"), hooks={"on_reasoning": heard.append})
    response = session.respond("2+2?", context_options=ContextOptions(reasoning_level="deep"))
    assert response.text == "4" and response.reasoning == "two and two" == "".join(heard)
    assert model.turns[0].reasoning == "deep"
    assert [type(entry) for entry in session.transcript] == [PromptEntry, Reasoning, Response]


def test_adapters_and_metadata_reach_the_turn() -> None:
    session, model = ready("x", "y", adapters=("style",))
    session.respond("go")
    session.respond("go", adapters=("other", "more"), metadata={"id": 7})
    assert model.turns[0].adapters == ("style",) and model.turns[1].adapters == ("other", "more")
    assert model.turns[1].metadata == {"id": 7}


# Forms of answers


def test_a_generable_comes_back_as_an_instance() -> None:
    session, model = ready({"name": "Tom", "age": 3})
    response = session.respond("A cat", generating=Cat)
    assert isinstance(response.content, Cat) and (response.content.name, response.content.age) == ("Tom", 3)
    assert isinstance(response.raw_content, GeneratedContent)
    assert model.turns[0].constraint is not None and model.turns[0].constraint.kind == "json_schema"
    prompt, answer = session.transcript.entries
    assert isinstance(prompt, PromptEntry) and prompt.response_format is not None
    assert isinstance(answer, Response) and isinstance(answer.segments[0], StructureSegment)
    assert answer.segments[0].content == {"name": "Tom", "age": 3}


def test_a_plain_dataclass_works_too() -> None:
    session, _ = ready({"y": 2, "x": 1})
    assert session.respond("A point", Point).content == Point(1, 2)


def test_a_schema_gives_generated_content() -> None:
    schema: GenerationSchema = schema_for(Cat)
    session, _ = ready({"name": "Tom", "age": 3})
    content = session.respond("A cat", schema=schema).content
    assert isinstance(content, GeneratedContent) and content.value(int, for_property="age") == 3


def test_a_json_schema_gives_generated_content() -> None:
    schema = {"title": "P", "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    session, _ = ready('{"a":true}')
    content = session.respond("go", json_schema=schema | {"additionalProperties": False}).content
    assert content.value(bool, for_property="a") is True


def test_regex_and_choices_give_text() -> None:
    session, model = ready("2024-05-01", "yes")
    assert session.respond("when?", regex=r"\d{4}-\d{2}-\d{2}").content == "2024-05-01"
    assert session.respond("really?", choices=["yes", "no"]).content == "yes"
    assert "yes, no" in model.turns[1].messages[-1].content
    assert "yes, no" not in session.transcript.entries[2].text


def test_str_as_a_type_is_plain_text() -> None:
    session, model = ready("hello")
    assert session.respond("hi", generating=str).content == "hello" and model.turns[0].constraint is None


def test_the_schema_is_in_the_prompt_unless_it_is_not_wanted() -> None:
    session, model = ready({"name": "Tom", "age": 3}, {"name": "Tom", "age": 3})
    session.respond("A cat", Cat)
    session.respond("A cat", Cat, context_options=ContextOptions(include_schema_in_prompt=False))
    assert "age" in model.turns[0].messages[-1].content
    assert model.turns[1].messages[-1].content == "A cat"
    assert [entry.text for entry in session.transcript if isinstance(entry, PromptEntry)] == ["A cat", "A cat"]


def test_options_count_for_guided_calls_apple_fails() -> None:
    session, model = ready({"name": "Tom", "age": 3})
    session.respond("A cat", Cat, options=GenerationOptions(temperature=0.3, seed=5))
    assert model.turns[0].sampling.temperature == 0.3 and model.turns[0].seed == 5


def test_an_answer_that_was_cut_off_is_a_decoding_failure() -> None:
    session, _ = ready(Answer({"name": "Tom", "age": 3}, pieces=('{"name":', '"Tom","age":3}')))
    with pytest.raises(DecodingFailureError) as caught:
        session.respond("A cat", Cat, options=GenerationOptions(maximum_response_tokens=1))
    assert caught.value.raw == '{"name":' and "maximum_response_tokens" in caught.value.hint
    assert len(session.transcript) == 0


def test_what_cannot_be_read_is_a_decoding_failure_with_what_was_written() -> None:
    session, _ = ready(Answer("no json at all", checked=False))
    with pytest.raises(DecodingFailureError) as caught:
        session.respond("A cat", Cat)
    assert caught.value.raw == "no json at all" and len(session.transcript) == 0


@pytest.mark.parametrize(
    "forms",
    [
        {"generating": Cat, "regex": "x"},
        {"choices": ["a"], "regex": "x"},
        {"schema": {}, "json_schema": {"type": "null"}},
    ],
)
def test_two_forms_at_once_are_refused(forms: dict[str, Any]) -> None:
    session, model = ready("x")
    with pytest.raises(UsageError, match="together"):
        session.respond("go", **forms)
    assert model.remaining == 1


def test_unserialisable_schemas_raise_before_any_token() -> None:
    session, model = ready("x")
    with pytest.raises(OrchardError):
        session.respond("go", json_schema={"type": "object", "x": object()})
    assert not model.turns


# Bad input


@pytest.mark.parametrize("prompt", ["", "   ", [], 7, None, b"bytes"])
def test_prompts_that_are_none_raise_and_leave_the_session_usable(prompt: Any) -> None:
    session, _ = ready("fine")
    with pytest.raises(PromptError):
        session.respond(prompt)
    assert session.respond("go").text == "fine"


def test_an_image_for_a_text_model(tmp_path: Any) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"png")
    session, model = ready("x")
    with pytest.raises(ImagePromptError):
        session.respond(["look", ImageAttachment(image)])
    assert not model.turns


@pytest.mark.parametrize(
    "settings",
    [
        {"at_limit": "explode"},
        {"transcript_error_policy": "maybe"},
        {"hooks": {"on_prompts": print}},
        {"hooks": {"on_prompt": 7}},
        {"profile": 7},
        {"use_case": "poetry"},
        {"guardrails": "medieval"},
        {"instructions": 7},
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(OrchardError) as caught:
        ready("x", **settings)
    assert caught.value.hint


def test_a_model_that_is_none() -> None:
    with pytest.raises(UsageError, match="no model"):
        Session(model=7)


def test_a_model_that_is_not_there(empty_home: Any) -> None:
    with pytest.raises(AssetsUnavailableError) as caught:
        Session(model="nobody-has-this")
    assert "nobody-has-this" in str(caught.value) and caught.value.hint


def test_options_of_the_wrong_type() -> None:
    session, _ = ready("x")
    with pytest.raises(UsageError):
        session.respond("go", options={"temperature": 1})  # type: ignore[arg-type]


# Turns that fail


def test_an_error_of_the_model_leaves_the_transcript_as_it_was() -> None:
    session, _ = ready("One.", Answer("half an ans", error=RateLimitedError("busy")), "Two.")
    session.respond("a")
    before = session.transcript.entries
    with pytest.raises(RateLimitedError, match="busy"):
        session.respond("b")
    assert session.transcript.entries == before and not session.is_responding
    assert session.respond("c").text == "Two."


def test_preserve_keeps_what_there_was() -> None:
    broken_off = Answer("half an", error=RateLimitedError("busy"))
    session, _ = ready(broken_off, "fine", transcript_error_policy="preserve", guardrails=None)
    with pytest.raises(RateLimitedError):
        session.respond("b")
    assert [type(entry) for entry in session.transcript] == [PromptEntry, Response]
    assert session.transcript[1].text == "half an"
    session.respond("again")
    assert [entry.text for entry in session.transcript][2:] == ["again", "fine"]


def test_a_refusal_carries_its_explanation() -> None:
    session, _ = ready(RefusalError("I do not give legal advice"))
    with pytest.raises(RefusalError) as caught:
        session.respond("sue them")
    assert caught.value.explanation == "I do not give legal advice"
    assert isinstance(caught.value.explanation_entries[0], Response)


def test_too_long_a_conversation_raises_and_nothing_is_cut() -> None:
    session, _ = ready("x", script={"context_size": 12})
    with pytest.raises(ExceededContextWindowSizeError) as caught:
        session.respond("word " * 30)
    assert caught.value.limit == 12 and caught.value.tokens > 12 and len(session.transcript) == 0


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


# The transcript


def test_the_transcript_cannot_change_while_an_answer_is_on_its_way() -> None:
    session, _ = ready("one two three")
    with session.stream("go") as stream:
        next(stream)
        with pytest.raises(TranscriptError):
            session.transcript = Transcript()
        with pytest.raises(TranscriptError):
            session.transcript.append(PromptEntry("no"))
        assert len(session.transcript) == 0
    session.transcript.append(PromptEntry("yes"))


def test_a_transcript_can_be_edited_and_replaced_between_turns() -> None:
    session, model = ready("One.", "Two.", "Three.")
    session.respond("a")
    del session.transcript[0:2]
    session.respond("b")
    assert [message.content for message in model.turns[1].messages] == ["b"]
    session.transcript = [Instructions("Be brief."), PromptEntry("x"), Response("y")]
    session.respond("c")
    assert [message.content for message in model.turns[2].messages] == ["Be brief.", "x", "y", "c"]


def test_a_given_transcript_is_the_same_object_and_grows() -> None:
    transcript = Transcript([Instructions("Be brief."), PromptEntry("x"), Response("y")])
    session = Session(model=ScriptedModel(["z"]), transcript=transcript)
    session.respond("c")
    assert session.transcript is transcript and len(transcript) == 5


# Policies


def test_a_rolling_window_drops_old_turns_for_the_model_only() -> None:
    session, model = ready(*["answer"] * 6, script={"context_size": 60}, policy=RollingWindow())
    for number in range(6):
        response = session.respond(f"question {number} " + "word " * 8)
    assert len(session.transcript) == 12 and response.dropped
    assert len(model.turns[-1].messages) < 12
    assert model.turns[-1].messages[-1].content.startswith("question 5")


def test_a_summary_is_made_once_and_kept_until_it_no_longer_fits() -> None:
    long = "word " * 50
    answers = ["a", "b", "THE SUMMARY", "c", "d"]
    session, model = ready(
        *answers, script={"context_size": 160}, policy=Summarise(keep_turns=1, words=2), options=_short()
    )
    session.respond(f"one {long}")
    session.respond(f"two {long}")
    session.respond(f"three {long}")
    assert "Sum up" in model.prompts[2]
    assert "THE SUMMARY" in model.turns[3].messages[0].content
    session.respond("four")
    assert "THE SUMMARY" in model.turns[4].messages[0].content and model.remaining == 0
    assert all("THE SUMMARY" not in entry.text for entry in session.transcript)


def _short() -> GenerationOptions:
    return GenerationOptions(maximum_response_tokens=4)


def test_the_strict_policy_leaves_the_room_to_the_model() -> None:
    session, _ = ready("x", script={"context_size": 30}, policy=Strict())
    assert session.respond("word " * 25).text == "x"


def test_any_function_of_a_transcript_can_be_a_policy() -> None:
    session, model = ready("1", "2", policy=lambda transcript: transcript[-1:])
    session.respond("a")
    response = session.respond("b")
    assert [message.content for message in model.turns[1].messages] == ["b"] and len(response.dropped) == 2


def test_a_policy_that_cannot_help_raises_the_typed_overflow() -> None:
    session, _ = ready("x", script={"context_size": 30}, policy=RollingWindow())
    with pytest.raises(ExceededContextWindowSizeError):
        session.respond("word " * 60)


# Guardrails


def test_guardrails_are_on_by_default_and_can_be_off() -> None:
    harmful = "How do I build a pipe bomb at home?"
    session, model = ready("no")
    with pytest.raises(GuardrailViolationError) as caught:
        session.respond(harmful)
    assert caught.value.violation is not None and str(caught.value) and not model.turns and len(session.transcript) == 0
    open_session, _ = ready("answer", guardrails="off")
    assert open_session.respond(harmful).text == "answer"


BAD = "First, here is how to build a pipe bomb at home to kill people."


def test_output_is_guarded_too_also_inside_structure() -> None:
    session, _ = ready(BAD, {"name": BAD, "age": 1}, "fine")
    for form in (None, Cat):
        with pytest.raises(GuardrailViolationError, match="guardrail violation in the answer") as caught:
            session.respond("tell me", form)
        assert caught.value.violation.stage == "output"
    assert len(session.transcript) == 0 and session.respond("hello").text == "fine"


def test_nothing_of_a_stopped_sentence_is_ever_shown() -> None:
    session, _ = ready(f"All is well. {BAD} The end.")
    shown = ""
    with pytest.raises(GuardrailViolationError):
        for snapshot in session.stream("tell me"):
            shown = snapshot.text
    assert "bomb" not in shown


def test_what_tools_are_given_and_give_is_guarded() -> None:
    def search(query: str) -> str:
        """Searches."""
        return BAD if query == "news" else "nothing"

    for query in ("news", BAD):
        session, _ = ready(ToolCall("search", {"query": query}), "x", tools=[search])
        with pytest.raises(GuardrailViolationError, match="tool"):
            session.respond("go")
        assert len(session.transcript) == 1


def test_permissive_guardrails_let_plain_text_through() -> None:
    session, _ = ready(BAD, guardrails="permissive")
    assert session.respond("Rewrite this story.").text == BAD


# Getting ready, measuring, closing


def test_prewarm_reads_the_instructions_and_the_beginning_of_the_prompt() -> None:
    session, model = ready("x", instructions="Be kind.")
    session.prewarm("Once upon")
    assert [message.content for message in model.prewarmed[0]] == ["Be kind.", "Once upon"]
    Session(model=model).prewarm()
    assert len(model.prewarmed) == 1


def test_token_counts() -> None:
    session, _ = ready("x", instructions="Be kind.")
    assert session.token_count("a b c") > session.token_count("a") > 0
    assert session.token_count(instructions="a b c") > 0
    assert session.token_count(schema_for(Cat)) > 0
    assert session.token_count([weather]) > 0 and session.token_count([]) == 0
    assert session.token_count(session.transcript) == session.token_count() > 0
    assert session.token_count(Transcript()) == 0
    with pytest.raises(ValueError):
        session.token_count("a", instructions="b")


def test_a_closed_session_answers_no_more() -> None:
    session, _ = ready("x")
    with session as same:
        assert same is session
    for call in (lambda: session.respond("go"), lambda: session.stream("go"), session.prewarm, session.token_count):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert "closed" in repr(session)


def test_close_stops_an_answer() -> None:
    session, _ = ready("word " * 1000, script={"delay": 0.005})
    threading.Timer(0.05, session.close).start()
    with pytest.raises(Cancelled):
        session.respond("go")


def test_feedback_is_a_document() -> None:
    session, _ = ready("Hello.")
    session.respond("Hi")
    document = json.loads(session.feedback("negative", ["incorrect"], "Good day."))
    assert document["sentiment"] == "negative" and document["issues"][0]["category"] == "incorrect"


def test_reprs_are_short_and_escaped() -> None:
    session, _ = ready("<b>bold</b>")
    response = session.respond("<script>")
    assert "<b>bold" not in response._repr_html_() and "&lt;b&gt;" in response._repr_html_()
    assert "<script>" not in session._repr_html_() and "scripted" in repr(session)


# Nothing lingers


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_session_is_freed_at_once(no_collector: None) -> None:
    def talk() -> weakref.ref[Session]:
        session, _ = ready(
            "one two",
            ToolCall("weather", {"city": "Rome"}),
            "three",
            RateLimitedError("busy"),
            {"name": "Tom", "age": 1},
            "long answer here",
            tools=[weather],
        )
        session.respond("a")
        session.respond("b")
        with pytest.raises(RateLimitedError):
            session.respond("c")
        session.respond("d", Cat)
        stream = session.stream("e")
        next(stream)
        return weakref.ref(session)

    assert talk()() is None


def test_an_abandoned_stream_lets_the_next_one_in(no_collector: None) -> None:
    session, _ = ready("one two three", "four")
    for _ in session.stream("a"):
        break
    assert not session.is_responding and session.respond("b").text == "four" and len(session.transcript) == 2


def test_usage_adds_up() -> None:
    assert Usage(1, 2, 3, 4, 5) + Usage(1, 1, 1, 1, 1) == Usage(2, 3, 4, 5, 6)
