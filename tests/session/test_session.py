"""The conversation loop over a scripted model: what is asked, what comes back, what the transcript keeps."""

from __future__ import annotations

from typing import Any

import pytest

from orchard.core.errors import OrchardError, UsageError
from orchard.session.errors import (
    AssetsUnavailableError,
    DecodingFailureError,
    ExceededContextWindowSizeError,
    ImagePromptError,
    PromptError,
    RateLimitedError,
    RefusalError,
)
from orchard.session.options import ContextOptions, GenerationOptions, SamplingMode
from orchard.session.prompt import ImageAttachment
from orchard.session.schema import GeneratedContent, GenerationSchema, schema_for
from orchard.session.session import Session
from orchard.session.transcript import (
    Instructions,
    PromptEntry,
    Reasoning,
    Response,
    StructureSegment,
)
from orchard.testing import Answer
from tests.session.talking import Cat, Point, ready

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
