"""OpenAI's own package against `/v1/responses`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
from pydantic import BaseModel

from orchard.core.errors import UsageError
from orchard.testing import Answer, ScriptedModel, ToolCall
from tests.serve.serving import Serving, scripted_settings, serving

pytestmark = pytest.mark.loopback

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "parameters": None, "strict": False}
STATELESS = "this server keeps nothing of earlier answers: send the whole conversation as input"


def client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=serving.base_url, api_key="none", max_retries=0)


def post(serving: Serving, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{serving.base_url}/responses", json={"model": "scripted", "input": "Hello"} | body)


class City(BaseModel):
    name: str
    people: int


# Answers ------------------------------------------------------------------------------------------------------------------


def test_response(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel(["Hello to you!"])
    ours = client(scripted_server(model))
    found = ours.responses.create(model="scripted", input="Hello", instructions="Be kind.", metadata={"a": "b"})
    assert found.id.startswith("resp_") and found.object == "response" and found.status == "completed"
    assert found.output_text == "Hello to you!" and found.error is None and found.incomplete_details is None
    assert [(item.type, item.status) for item in found.output] == [("message", "completed")]  # type: ignore[union-attr]
    assert found.usage is not None and found.usage.output_tokens == 3
    assert found.usage.total_tokens == found.usage.input_tokens + 3
    assert (found.instructions, found.metadata, found.temperature) == ("Be kind.", {"a": "b"}, 1.0)
    assert found.to_dict()["store"] is False
    assert [(one.role, one.content) for one in model.turns[0].messages] == [("system", "Be kind."), ("user", "Hello")]
    assert model.turns[0].sampling.temperature == 1.0 and model.turns[0].max_tokens is None


ANSWERS: dict[str, Any] = {
    "text": "Some words, and a few more.",
    "nothing": "",
    "white space": Answer(" \n ", pieces=(" ", "\n ")),
    "thoughts": Answer("So it is 4.", reasoning="two and two are"),
    "call": ToolCall("weather", {"city": "Paris"}),
    "words and calls": Answer("I look: ", calls=(ToolCall("weather", {"city": "Zürich"}), ToolCall("clock"))),
    "white space and a call": Answer("\n\n", calls=(ToolCall("clock"),)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_adds_up_to_the_whole(scripted_server: Callable[..., Serving], name: str) -> None:
    ours = client(scripted_server([ANSWERS[name]] * 3))
    asked: dict[str, Any] = {"model": "scripted", "input": "Hello", "tools": [WEATHER, CLOCK]}
    whole = ours.responses.create(**asked)
    with ours.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()

    def plain(response: Any) -> list[dict[str, Any]]:
        def kept(value: Any) -> Any:
            unlike = ("id", "call_id", "parsed", "parsed_arguments")
            if isinstance(value, dict):
                return {key: kept(part) for key, part in value.items() if key not in unlike}
            return [kept(part) for part in value] if isinstance(value, list) else value

        return [kept(item.to_dict()) for item in response.output]

    assert plain(streamed) == plain(whole) and streamed.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    # What grew piece by piece is what came as a whole at the end.
    raw = list(ours.responses.create(**asked, stream=True))
    grown: dict[int, str] = {}
    for event in raw:
        if event.type.endswith(".delta"):
            grown[event.output_index] = grown.get(event.output_index, "") + event.delta  # type: ignore[union-attr]
        elif event.type.endswith(("_text.done", "arguments.done")):
            done: Any = event
            assert grown[done.output_index] == (done.text if hasattr(done, "text") else done.arguments)
    assert len(grown) == len(whole.output)


def test_order_of_events(scripted_server: Callable[..., Serving]) -> None:
    answer = Answer("See:", calls=(ToolCall("clock"),), reasoning="hm")
    ours = client(scripted_server([answer]))
    kinds = [e.type for e in ours.responses.create(model="scripted", input="Hi", tools=[CLOCK], stream=True)]  # type: ignore[list-item]
    assert [kind.removeprefix("response.") for kind in kinds] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_cut_answers(scripted_server: Callable[..., Serving]) -> None:
    ours = client(scripted_server(["one two three"] * 2))
    asked: dict[str, Any] = {"model": "scripted", "input": "Hello", "max_output_tokens": 2}
    whole = ours.responses.create(**asked)
    assert whole.status == "incomplete" and whole.output_text == "one two "
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    last = list(ours.responses.create(**asked, stream=True))[-1]
    assert last.type == "response.incomplete" and last.response.output_text == "one two "
    assert last.response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_parse_and_stream_a_model(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel([{"name": "Bern", "people": 134000}] * 2)
    ours = client(scripted_server(model))
    found = ours.responses.parse(model="scripted", input="Bern?", text_format=City)
    assert found.output_parsed == City(name="Bern", people=134000)
    constraint = model.turns[0].constraint
    assert constraint is not None and json.loads(constraint.source)["required"] == ["name", "people"]
    with ours.responses.stream(model="scripted", input="Bern?", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == found.output_parsed


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "name": "n", "schema": {"type": "array"}}, {"type": "array"}),
    ],
)
def test_formats(scripted_server: Callable[..., Serving], form: Any, schema: Any) -> None:
    model = ScriptedModel([Answer("x", checked=False)])
    found = client(scripted_server(model)).responses.create(model="scripted", input="Hi", text={"format": form})
    constraint = model.turns[0].constraint
    assert (None if constraint is None else json.loads(constraint.source)) == schema
    assert found.text is not None and found.text.format is not None and found.text.format.type == form["type"]


def test_async_client(scripted_server: Callable[..., Serving]) -> None:
    serving = scripted_server(["One."] * 4)

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=serving.base_url, api_key="none", max_retries=0) as ours:
            whole = await asyncio.gather(*(ours.responses.create(model="scripted", input="Hi") for _ in range(3)))
            async with ours.responses.stream(model="scripted", input="Hi") as stream:
                streamed = await stream.get_final_response()
        return [one.output_text for one in (*whole, streamed)]

    assert asyncio.run(ask()) == ["One."] * 4


# Tools and the conversation -----------------------------------------------------------------------------------------------


def test_calls_and_their_results(scripted_server: Callable[..., Serving]) -> None:
    calls = Answer("I look.", calls=(ToolCall("weather", {"city": "Paris"}), ToolCall("clock")), reasoning="hm")
    model = ScriptedModel([calls, "Rain."])
    ours = client(scripted_server(model))
    asked: dict[str, Any] = {"model": "scripted", "tools": [WEATHER, CLOCK]}
    said: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
    first = ours.responses.create(**asked, input=said, instructions="Be kind.")
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    said += first.output
    for item in first.output:
        if item.type == "function_call":
            output: Any = "rain" if item.name == "weather" else [{"type": "input_text", "text": "noon"}]
            said.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
    assert ours.responses.create(**asked, input=said, instructions="Be kind.").output_text == "Rain."
    told = model.turns[1].messages
    assert [(one.role, one.content, one.name) for one in told] == [
        ("system", "Be kind.\n\nBe brief.", None),
        ("user", "Weather?", None),
        ("assistant", "I look.", None),
        ("tool", "rain", "weather"),
        ("tool", "noon", "clock"),
    ]
    assert [call["function"]["name"] for call in told[2].tool_calls or ()] == ["weather", "clock"]


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ("auto", "allowed", ["weather", "clock"]),
        ("required", "required", ["weather", "clock"]),
        ("none", "disallowed", ["weather", "clock"]),
        ({"type": "function", "name": "clock"}, "required", ["clock"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]},
            "allowed",
            ["clock"],
        ),
    ],
)
def test_tool_choice(scripted_server: Callable[..., Serving], choice: Any, mode: str, names: list[str]) -> None:
    model = ScriptedModel(["No." if mode == "disallowed" else ToolCall("clock")])
    ours = client(scripted_server(model))
    tools: list[Any] = [WEATHER, CLOCK]
    found = ours.responses.create(
        model="scripted", input="Hi", tools=tools, tool_choice=choice, parallel_tool_calls=False
    )
    turn = model.turns[0]
    assert (turn.tool_mode, [tool.name for tool in turn.tools]) == (mode, names)
    assert turn.parallel_calls is False and found.parallel_tool_calls is False
    assert [tool.type for tool in found.tools] == ["function", "function"]


class Weather(BaseModel):
    """The weather in a city"""

    city: str


def test_tools_from_types(scripted_server: Callable[..., Serving]) -> None:
    ours = client(scripted_server([ToolCall("Weather", {"city": "Paris"})]))
    tools: list[Any] = [openai.pydantic_function_tool(Weather)]
    found = ours.responses.parse(model="scripted", input="Hi", tools=tools)
    assert found.output[0].parsed_arguments == Weather(city="Paris")  # type: ignore[union-attr]


def test_logprobs(scripted_server: Callable[..., Serving]) -> None:
    model = ScriptedModel(["one two"] * 2)
    ours = client(scripted_server(model))
    found = ours.responses.create(model="scripted", input="Hi", include=["message.output_text.logprobs"])
    part = found.output[0].content[0]  # type: ignore[union-attr, index]
    assert [entry.token for entry in part.logprobs] == ["one ", "two"]  # type: ignore[union-attr]
    events = ours.responses.create(model="scripted", input="Hi", top_logprobs=2, stream=True)
    deltas = [entry.token for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert deltas == ["one ", "two"] and [turn.logprobs for turn in model.turns] == [0, 2]


@pytest.mark.parametrize(
    ("effort", "level"), [("none", "none"), ("minimal", "light"), ("medium", "moderate"), ("high", "deep")]
)
def test_effort(scripted_server: Callable[..., Serving], effort: Any, level: str) -> None:
    thinks, talks = ScriptedModel(["a"]), ScriptedModel(["a"], capabilities=frozenset({"tools"}))
    serving = scripted_server(thinks, models={"talks": talks})
    assert "x-orchard-ignored" not in post(serving, reasoning={"effort": effort}).headers
    assert thinks.turns[0].reasoning == level
    answer = post(serving, model="talks", reasoning={"effort": effort})
    assert talks.turns[0].reasoning is None
    assert answer.headers.get("x-orchard-ignored") == (None if effort == "none" else "reasoning.effort")


def test_input_tokens(scripted_server: Callable[..., Serving]) -> None:
    ours = client(scripted_server(["x"]))
    counted = ours.responses.input_tokens.count(model="scripted", input="Hello there", instructions="Be kind.")
    found = ours.responses.create(model="scripted", input="Hello there", instructions="Be kind.")
    assert found.usage is not None and found.usage.input_tokens == counted.input_tokens


# Errors -------------------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "memory": ({"previous_response_id": "resp_1"}, "unsupported_parameter", STATELESS),
    "conversation": ({"conversation": "conv_1"}, "unsupported_parameter", STATELESS),
    "reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "unsupported_parameter", STATELESS),
    "nobody's result": (
        {"input": [{"type": "function_call_output", "call_id": "call_1", "output": "x"}]},
        "invalid_request",
        STATELESS,
    ),
    "background": ({"background": True}, "unsupported_parameter", "background"),
    "prompt": ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
    "search": ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "web_search"),
    "custom tool": ({"tools": [{"type": "custom", "name": "x"}]}, "unsupported_parameter", "custom"),
    "picture": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "unsupported_parameter",
        "input_image",
    ),
    "unknown item": ({"input": [{"type": "mcp_call"}]}, "unsupported_parameter", "mcp_call"),
    "role": ({"input": [{"role": "robot", "content": "x"}]}, "invalid_request", "input.0.role"),
    "empty": ({"input": ""}, "invalid_request", "input"),
    "no items": ({"input": []}, "invalid_request", "input"),
    "wrong part": (
        {"input": [{"role": "user", "content": [{"type": 3}]}]},
        "invalid_request",
        "input.0.content.0.type",
    ),
    "number": ({"input": 3}, "invalid_request", "input"),
    "temperature": ({"temperature": 3}, "invalid_request", "temperature"),
    "no tokens": ({"max_output_tokens": 0}, "invalid_request", "max_output_tokens"),
    "format": ({"text": {"format": {"type": "xml"}}}, "invalid_request", "text.format.type"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "invalid_schema", "text.format.schema"),
    "effort": ({"reasoning": {"effort": "heroic"}}, "invalid_request", "reasoning.effort"),
    "choice": ({"tool_choice": "sometimes"}, "invalid_request", "tool_choice"),
    "no tools": ({"tool_choice": "required"}, "invalid_request", "tools"),
    "unknown tool": ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}}, "invalid_request", "clock"),
    "other choice": ({"tools": [CLOCK], "tool_choice": {"type": "mcp"}}, "unsupported_parameter", "mcp"),
    "too long": ({"input": "word " * 5000}, "context_length_exceeded", "4,096"),
}


@pytest.fixture(scope="module")
def refusing() -> Iterator[Serving]:
    """One server for all that is refused: its model is never asked."""
    found = serving(scripted_settings(), scripted=ScriptedModel())
    yield found
    found.close()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_told_what_to_change(refusing: Serving, name: str) -> None:
    body, code, words = WRONG[name]
    ours = client(refusing)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ours.responses.create(model="scripted", input="Hello", extra_body=body | {"stream": stream})
        assert caught.value.code == code and words in caught.value.message


def test_an_error_in_the_middle(scripted_server: Callable[..., Serving]) -> None:
    wrong = Answer("one two", delay=0.05, error=UsageError("it broke", hint="mend it"))
    ours = client(scripted_server([wrong]))
    last = list(ours.responses.create(model="scripted", input="Hi", stream=True))[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error is not None and last.response.error.message == "it broke: mend it"
    assert last.response.output_text == "one two"


def test_what_has_no_effect_is_named(scripted_server: Callable[..., Serving]) -> None:
    serving = scripted_server(["a", "a"])
    more = {"truncation": "auto", "include": ["reasoning.encrypted_content"], "moderation": {"model": "x"}}
    answer = post(serving, store=True, text={"verbosity": "low"}, reasoning={"summary": "auto"}, **more)
    names = answer.headers["x-orchard-ignored"].split(", ")
    assert sorted(names) == ["include", "moderation", "reasoning.summary", "store", "text.verbosity", "truncation"]
    harmless = {
        "store": False,
        "truncation": "disabled",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "user": "ada",
    }
    assert "x-orchard-ignored" not in post(serving, **harmless).headers


def test_a_client_that_hangs_up_frees_its_place(scripted_server: Callable[..., Serving]) -> None:
    serving = scripted_server([Answer("word " * 2000, delay=0.05)])
    body = {"model": "scripted", "input": "Hello", "stream": True}
    with httpx2.stream("POST", f"{serving.base_url}/responses", json=body) as answer:
        lines = answer.iter_lines()  # letting go of it would hang up
        assert next(lines)
        assert serving.service.gate.running == 1
    serving.settled()  # 100 seconds of answer are left


# The default model --------------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_the_default_model(server: Serving) -> None:
    ours = client(server)
    asked: dict[str, Any] = {"model": "smollm2", "input": "Name a colour.", "temperature": 0, "max_output_tokens": 12}
    whole = ours.responses.create(**asked, top_logprobs=2)
    part: Any = whole.output[0].content[0]  # type: ignore[union-attr, index]
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == whole.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    with ours.responses.stream(**asked) as stream:
        event = list(stream)[-1]
    assert event.type in ("response.completed", "response.incomplete")
    assert event.response.output_text == whole.output_text  # type: ignore[union-attr]
    found = ours.responses.parse(
        model="smollm2", input="Bern has 134000 people.", text_format=City, temperature=0, max_output_tokens=60
    )
    assert isinstance(found.output_parsed, City)
