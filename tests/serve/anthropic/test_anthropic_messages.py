"""Anthropic's own package against `/v1/messages`: what it sends is understood, and what it reads is right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from orchard.serve.anthropic.messages_stream import Writer, folded
from orchard.session.turn import Done, Text, Turn, Usage
from orchard.testing import Answer, ScriptedModel, ToolCall
from tests.serve.anthropic.asking import CLOCK, HELLO, WEATHER, client, post
from tests.serve.serving import Serving

pytestmark = pytest.mark.loopback

TALK = frozenset({"guided", "tools"})
"""What a model that does not think can do."""


# Answers ------------------------------------------------------------------------------------------------------------------


def test_answer(scripted_server: Callable[..., Serving]) -> None:
    ours = client(scripted_server(["Hello to you!"]))
    message = ours.messages.create(model="scripted", max_tokens=20, messages=HELLO)
    assert message.id.startswith("msg_") and message.role == "assistant" and message.model == "scripted"
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello to you!"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == 3 and message.usage.input_tokens > 0
    assert message._request_id is not None and message._request_id.startswith("req_")


ANSWERS: dict[str, Any] = {
    "text": "Some words, and a few more.",
    "nothing": "",
    "white space": Answer(" \n ", pieces=(" ", "\n ")),
    "thoughts": Answer("So it is 4.", reasoning="two and two are"),
    "call": ToolCall("weather", {"city": "Paris"}),
    "words and calls": Answer("I look: ", calls=(ToolCall("weather", {"city": "Zürich"}), ToolCall("clock"))),
    "white space and a call": Answer("\n\n", calls=(ToolCall("clock"),)),
    "cut": Answer("one two three four five six seven eight nine ten eleven twelve thirteen"),
}


def post_back(ours: anthropic.Anthropic, message: Any) -> Any:
    """Send an answer back, as a client that goes on with the conversation does."""
    results = [{"type": "tool_result", "tool_use_id": one.id} for one in message.content if one.type == "tool_use"]
    said: list[Any] = [
        *HELLO,
        message.to_param(),
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    return ours.messages.with_raw_response.count_tokens(model="scripted", messages=said)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_adds_up_to_the_whole(scripted_server: Callable[..., Serving], name: str) -> None:
    ours = client(scripted_server([ANSWERS[name], ANSWERS[name]]))
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 12, "messages": HELLO, "tools": [WEATHER, CLOCK]}
    asked["thinking"] = {"type": "adaptive"}
    whole = ours.messages.create(**asked)
    with ours.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    back = post_back(ours, streamed)
    assert "x-orchard-ignored" not in back.headers

    def plain(message: Any) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in block.to_dict().items() if k not in ("id", "parsed_output")} for block in message.content
        ]

    assert plain(streamed) == plain(whole)
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)


def test_order_of_events(scripted_server: Callable[..., Serving]) -> None:
    answer = Answer("See:", calls=(ToolCall("clock"),), reasoning="hm")
    ours = client(scripted_server([answer]))
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 12, "messages": HELLO, "tools": [CLOCK]}
    events = list(ours.messages.create(**asked, thinking={"type": "adaptive"}, stream=True))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event.type for event in events] == ["message_start", *block * 3, "message_delta", "message_stop"]
    kinds = [event.content_block.type for event in events if event.type == "content_block_start"]
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert kinds == ["thinking", "text", "tool_use"]
    assert deltas == ["thinking_delta", "text_delta", "input_json_delta"]
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2]
    first, last = events[0], events[-2]
    assert first.type == "message_start" and first.message.usage.input_tokens > 0 and first.message.stop_reason is None
    assert last.type == "message_delta" and last.delta.stop_reason == "tool_use"


def test_the_wire_has_names_and_a_ping(scripted_server: Callable[..., Serving]) -> None:
    text = post(scripted_server(["Hi"]), stream=True).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert names == [event["type"] for event in data]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"


def test_cut_answer(scripted_server: Callable[..., Serving]) -> None:
    ours = client(scripted_server(["one two three four"]))
    message = ours.messages.create(model="scripted", max_tokens=2, messages=HELLO)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 2


def test_an_answer_that_fills_the_context_says_so() -> None:
    writer = Writer("m", Turn((), max_tokens=100))
    message = folded([*writer.start(0), *writer.take(Text("a")), *writer.end(Done("length", Usage(output=5)), None)])
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_half_a_character_in_a_call(scripted_server: Callable[..., Serving]) -> None:
    """JSON can spell what UTF-8 cannot: escaped, it passes."""
    half = ToolCall("weather", '{"city": "\\ud83d"}')
    serving = scripted_server([half, half])
    asked: dict[str, Any] = {"tools": [WEATHER], "stream": False}
    assert post(serving, **asked).json()["content"][0]["input"] == {"city": "\ud83d"}
    streamed = post(serving, **asked | {"stream": True})
    assert streamed.status_code == 200 and "\\\\ud83d" in streamed.text


def test_async_client(scripted_server: Callable[..., Serving]) -> None:
    serving = scripted_server(["One."] * 6)

    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=serving.url, api_key="none", max_retries=0) as ours:
            asked: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": HELLO}
            whole = await asyncio.gather(*(ours.messages.create(**asked) for _ in range(5)))
            async with ours.messages.stream(**asked) as stream:
                streamed = await stream.get_final_text()
        return [message.content[0].text for message in whole] + [streamed]  # type: ignore[union-attr]

    assert asyncio.run(ask()) == ["One."] * 6


def test_the_beta_resource_is_the_same(scripted_server: Callable[..., Serving]) -> None:
    ours = client(scripted_server(["Hi"]))
    message = ours.beta.messages.create(model="scripted", max_tokens=9, messages=HELLO, betas=["any-2025-01-01"])
    assert message.content[0].text == "Hi"  # type: ignore[union-attr]


# The conversation ---------------------------------------------------------------------------------------------------------


def test_tools_and_their_results(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel([[ToolCall("weather", {"city": "Paris"}), ToolCall("clock")], "Rain."])
    ours = client(scripted_server(model))
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 99, "tools": [WEATHER, CLOCK]}
    first = ours.messages.create(**asked, messages=HELLO)
    assert first.stop_reason == "tool_use"
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Paris"}), ("clock", {})]
    assert all(call.id.startswith("toolu_") for call in calls)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": "it stands still", "is_error": True},
        {"type": "text", "text": "Well?"},
    ]
    second = ours.messages.create(**asked, messages=[*HELLO, first.to_param(), {"role": "user", "content": results}])
    assert second.content[0].text == "Rain."  # type: ignore[union-attr]
    told = model.turns[1].messages
    assert [(one.role, one.content, one.name) for one in told] == [
        ("user", "Hello", None),
        ("assistant", "", None),
        ("tool", "rain", "weather"),
        ("tool", "Error: it stands still", "clock"),
        ("user", "Well?", None),
    ]
    assert [call["function"]["name"] for call in told[1].tool_calls or ()] == ["weather", "clock"]
    assert told[2].tool_call_id == calls[0].id == (told[1].tool_calls or [{}])[0]["id"]


def test_the_tool_runner(scripted_server: Callable[..., Serving]) -> None:
    """What Anthropic's package runs by itself: calls, results, and the answer in the end."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: Its name
        """
        return f"rain in {city}"

    model = ScriptedModel([ToolCall("weather", {"city": "Paris"}), "It rains."])
    ours = client(scripted_server(model))
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 99, "messages": HELLO, "tools": [weather]}
    last = ours.beta.messages.tool_runner(**asked).until_done()
    assert last.content[0].text == "It rains."  # type: ignore[union-attr]
    assert [(one.role, one.content) for one in model.turns[1].messages[-1:]] == [("tool", "rain in Paris")]


def test_threads_are_not_kept(scripted_server: Callable[..., Serving]) -> None:
    ours = client(scripted_server(["never"]))
    with pytest.raises(anthropic.BadRequestError, match="keeps nothing") as caught:
        ours.beta.messages.create(model="scripted", max_tokens=9, messages=HELLO, thread={"type": "create"})
    assert caught.value.error_code == "thread_unsupported_request"


def test_words_of_the_system_in_between(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel(["Yes."])
    said: list[Any] = [*HELLO, {"role": "system", "content": "Be brief."}]
    client(scripted_server(model)).messages.create(model="scripted", max_tokens=9, messages=said)
    assert [one.role for one in model.turns[0].messages] == ["user", "system"]


@pytest.mark.parametrize(
    ("choice", "mode", "names", "parallel"),
    [
        ({"type": "auto"}, "allowed", ["weather", "clock"], True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", ["weather", "clock"], False),
        ({"type": "tool", "name": "clock"}, "required", ["clock"], True),
        ({"type": "none"}, "disallowed", ["weather", "clock"], True),
    ],
)
def test_tool_choice(
    scripted_server: Callable[..., Serving], choice: Any, mode: str, names: list[str], parallel: bool
) -> None:
    model = ScriptedModel([ToolCall("clock") if mode != "disallowed" else "No."])
    ours = client(scripted_server(model))
    ours.messages.create(model="scripted", max_tokens=9, messages=HELLO, tools=[WEATHER, CLOCK], tool_choice=choice)
    turn = model.turns[0]
    assert (turn.tool_mode, [tool.name for tool in turn.tools], turn.parallel_calls) == (mode, names, parallel)


def test_system_and_blocks(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel(["Yes.", "Yes."])
    ours = client(scripted_server(model))
    blocks: list[Any] = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    said: list[Any] = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "Three"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
        {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Four"}],
        },
        {"role": "user", "content": "Five"},
    ]
    ours.messages.create(model="scripted", max_tokens=9, system=blocks, messages=said)
    ours.messages.create(model="scripted", max_tokens=9, system="Be brief.", messages=HELLO)
    assert [(one.role, one.content) for one in model.turns[0].messages] == [
        ("system", "Be brief.\n\nBe kind."),
        ("user", "One\n\nTwo\n\nThree"),
        ("assistant", "Four"),
        ("user", "Five"),
    ]
    assert model.turns[1].messages[0].content == "Be brief."


def test_sampling(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel(["a", "b", "c"])
    serving = scripted_server(model)
    post(serving)
    post(serving, temperature=0.5, top_p=0.9, top_k=7)
    post(serving, temperature=0, top_p=0, top_k=0)
    found = [(turn.sampling.temperature, turn.sampling.top_p, turn.sampling.top_k) for turn in model.turns]
    assert found == [(1.0, None, None), (0.5, 0.9, 7), (0, None, 1)]


def test_the_beginning_of_an_answer(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel([Answer(pieces=("The best ", "is (", "B)")), "(C)", "nothing of it"])
    ours = client(scripted_server(model))
    said: list[Any] = [*HELLO, {"role": "assistant", "content": "The best is ("}]
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 9}
    assert ours.messages.create(**asked, messages=said).content[0].text == "B)"  # type: ignore[union-attr]
    assert model.turns[0].begin == "The best is (" and len(model.turns[0].messages) == 1
    # A model that leaves the beginning out, and one that begins otherwise, lose nothing.
    with ours.messages.stream(**asked, messages=said) as stream:
        assert stream.get_final_text() == "(C)"
    assert ours.messages.create(**asked, messages=said).content[0].text == "nothing of it"  # type: ignore[union-attr]


# Thoughts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "level"),
    [
        ({}, "none"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 300}}, "light"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "moderate"),
        ({"thinking": {"type": "enabled", "budget_tokens": 16000}}, "deep"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "light"),
    ],
)
def test_how_much_to_think(scripted_server: Callable[..., Serving], asked: dict[str, Any], level: str | None) -> None:
    model = ScriptedModel(["Yes."])
    answer = post(scripted_server(model), **asked)
    assert model.turns[0].reasoning == level and "x-orchard-ignored" not in answer.headers


def test_thoughts_that_are_not_shown(scripted_server: Callable[..., Serving]) -> None:
    ours = client(scripted_server([Answer("4", reasoning="two and two")]))
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    message = ours.messages.create(model="scripted", max_tokens=9, messages=HELLO, thinking=thinking)
    assert [block.to_dict() for block in message.content] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "4"},
    ]
    assert message.usage.output_tokens_details is not None and message.usage.output_tokens_details.thinking_tokens == 3


def test_a_model_that_does_not_think(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel(["Yes.", "Yes."], capabilities=TALK)  # type: ignore[arg-type]
    serving = scripted_server(model)
    answer = post(serving, thinking={"type": "enabled", "budget_tokens": 2000}, output_config={"effort": "high"})
    assert model.turns[0].reasoning is None
    assert answer.headers["x-orchard-ignored"] == "thinking, output_config.effort"
    assert "x-orchard-ignored" not in post(serving, thinking={"type": "disabled"}).headers


# What an answer must match ------------------------------------------------------------------------------------------------


class City(BaseModel):
    name: str
    people: int


def test_schema(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel([{"name": "Bern", "people": 134000}] * 2)
    ours = client(scripted_server(model))
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 30, "messages": HELLO, "output_format": City}
    found = ours.messages.parse(**asked)
    assert found.parsed_output == City(name="Bern", people=134000)
    constraint = model.turns[0].constraint
    assert constraint is not None and json.loads(constraint.source)["required"] == ["name", "people"]
    with ours.messages.stream(**asked) as stream:
        assert stream.get_final_message().parsed_output == found.parsed_output


# Counting -----------------------------------------------------------------------------------------------------------------


def test_count_tokens(scripted_server: Callable[..., Serving]) -> None:
    ours = client(scripted_server(["x"]))
    asked: dict[str, Any] = {"model": "scripted", "messages": HELLO, "tools": [WEATHER], "system": "Be brief."}
    counted = ours.messages.count_tokens(**asked).input_tokens
    assert counted == ours.messages.create(**asked, max_tokens=9).usage.input_tokens
    assert counted > ours.messages.count_tokens(model="scripted", messages=HELLO).input_tokens
    kept = ours.messages.count_tokens(**asked, tool_choice={"type": "none"}).input_tokens
    assert kept == ours.messages.count_tokens(model="scripted", messages=HELLO, system="Be brief.").input_tokens
    begun = [*HELLO, {"role": "assistant", "content": "It is a long story"}]
    assert ours.messages.count_tokens(model="scripted", messages=begun).input_tokens > 5
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        ours.messages.count_tokens(model="scripted", messages=[])
