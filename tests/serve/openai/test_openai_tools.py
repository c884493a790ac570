"""Tools over `/v1/chat/completions`, called and streamed, read by OpenAI's own package."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.serve.openai.asking_chat import ASKED, MODEL, TOOLS, WEATHER, asked

pytestmark = [pytest.mark.loopback, pytest.mark.real]


def test_a_tool_is_called_where_the_words_ask_for_it(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = asked(client, messages=messages, tools=TOOLS, max_tokens=40).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather" and call.id
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_a_streamed_call(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    settings: Any = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 40}
    with client.chat.completions.stream(**settings, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content is None
    assert final.message.tool_calls and final.message.tool_calls[0].function.name == "get_weather"


def test_the_result_of_a_tool_is_used(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    message = asked(client, messages=messages, tools=TOOLS, max_tokens=40).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "17 degrees and rain"}
    answer = asked(client, messages=[*messages, message, result], tools=TOOLS, max_tokens=30).choices[0]
    # Which part of it a model this small repeats differs with the last bits of a processor.
    assert answer.finish_reason in ("stop", "length")
    assert any(part in answer.message.content for part in ("17 degrees", "rain"))


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_time"}}],
                },
            },
            {"get_time"},
        ),
        ("none", set()),
        ("auto", set()),
    ],
)
def test_whether_a_tool_must_be_called(client: openai.OpenAI, choice: Any, wanted: set[str]) -> None:
    message = asked(client, tools=TOOLS, tool_choice=choice, max_tokens=40).choices[0].message
    assert {call.function.name for call in message.tool_calls or ()} <= wanted
    assert bool(message.tool_calls) == bool(wanted)
    for call in message.tool_calls or ():
        if call.function.name == "get_time":
            assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")


def test_the_older_form_of_tools(client: openai.OpenAI) -> None:
    choice = asked(client, functions=[WEATHER], function_call={"name": "get_weather"}, max_tokens=40).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.function_call.name == "get_weather"
    assert choice.message.tool_calls is None
    history = [*ASKED, choice.message, {"role": "function", "name": "get_weather", "content": "rain"}]
    assert asked(client, messages=history, functions=[WEATHER], function_call="none").choices[0].message.content
