"""OpenAI's own package against scripted models: what the default model cannot be made to do, and what goes wrong on the way."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from orchard.core.errors import OrchardError
from orchard.generate.constraint import Constraint
from orchard.serve.settings import Limits
from orchard.session.turn import Turn
from orchard.testing import Answer, ScriptedModel, ToolCall
from tests.serve.serving import Serving

pytestmark = pytest.mark.loopback
Make = Callable[..., Serving]
TOO_LATE = (openai.APITimeoutError, openai.InternalServerError)
"""The server knows how long a client waits for a whole answer: whichever of the two is first."""
ASKED: list[Any] = [{"role": "user", "content": "Hello?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}, "strict": True}}
    for name in ("red", "blue")
]


def asked(server: Serving, **more: Any) -> Any:
    settings = {"model": "scripted", "messages": ASKED} | more
    return server.openai(**settings.pop("client", {})).chat.completions.create(**settings)


def test_several_calls_at_once(scripted_server: Make) -> None:
    server = scripted_server([[ToolCall("red", {"a": 1}), ToolCall("blue")]])
    choice = asked(server, tools=TOOLS).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["red", "blue"]
    assert len({call.id for call in choice.message.tool_calls}) == 2 and choice.finish_reason == "tool_calls"


def test_several_streamed_calls_have_their_own_index(scripted_server: Make) -> None:
    server = scripted_server([Answer("Let me see.", (ToolCall("red", {"a": 1}), ToolCall("blue")))])
    calls: dict[int, Any] = {}
    text = ""
    for chunk in asked(server, tools=TOOLS, stream=True):
        text += chunk.choices[0].delta.content or ""
        for call in chunk.choices[0].delta.tool_calls or ():
            calls[call.index] = call
    assert text == "Let me see." and [calls[place].function.name for place in (0, 1)] == ["red", "blue"]
    assert json.loads(calls[0].function.arguments) == {"a": 1} and calls[0].id != calls[1].id


def test_results_of_several_calls_are_told_with_their_tools(scripted_server: Make) -> None:
    model = ScriptedModel([[ToolCall("red"), ToolCall("blue")], "Both."])
    server = scripted_server(model)
    message = asked(server, tools=TOOLS).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result of {call.function.name}"}
        for call in reversed(message.tool_calls)
    ]
    assert asked(server, messages=[*ASKED, message, *results], tools=TOOLS).choices[0].message.content == "Both."
    told = model.turns[1].messages
    assert [(one.role, one.name) for one in told[2:]] == [("tool", "blue"), ("tool", "red")]


def test_one_call_at_a_time_can_be_asked_for(scripted_server: Make) -> None:
    model = ScriptedModel(["x", "y"])
    server = scripted_server(model)
    asked(server, tools=TOOLS, parallel_tool_calls=False)
    asked(server, tools=TOOLS)
    assert [turn.parallel_calls for turn in model.turns] == [False, True]


def test_thoughts_are_apart_from_the_answer(scripted_server: Make) -> None:
    server = scripted_server([Answer("Four.", reasoning="Two and two …")] * 2)
    message = asked(server, reasoning_effort="high").choices[0].message
    assert (message.content, message.reasoning_content) == ("Four.", "Two and two …")
    deltas = [chunk.choices[0].delta for chunk in asked(server, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Two and two …"
    assert "".join(delta.content or "" for delta in deltas) == "Four."


@pytest.mark.parametrize(
    ("effort", "level"),
    [("none", "none"), ("minimal", "light"), ("low", "light"), ("medium", "moderate"), ("high", "deep")],
)
def test_how_much_to_think(scripted_server: Make, effort: Any, level: str) -> None:
    model = ScriptedModel(["x"])
    answer = (
        scripted_server(model)
        .openai()
        .chat.completions.with_raw_response.create(model="scripted", messages=ASKED, reasoning_effort=effort)
    )
    assert model.turns[0].reasoning == level and "x-orchard-ignored" not in answer.headers


def test_reasoning_tokens_are_counted(scripted_server: Make) -> None:
    used = asked(scripted_server([Answer("Four.", reasoning="one two three")])).usage
    assert used.completion_tokens_details.reasoning_tokens == 3


def test_everything_that_is_asked_for_reaches_the_model(scripted_server: Make) -> None:
    model = ScriptedModel([{"a": 1}])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked(
        scripted_server(model),
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=5,
        stop=["END", "FIN"],
        max_completion_tokens=50,
        logit_bias={"17": 5},
        logprobs=True,
        top_logprobs=4,
        extra_body={"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1},
    )
    turn: Turn = model.turns[0]
    sampling = turn.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert turn.constraint == Constraint.json_schema(schema) and turn.bias == {17: 5.0} and turn.logprobs == 4
    assert (turn.seed, turn.stop, turn.max_tokens) == (5, ("END", "FIN"), 50)


def test_the_default_temperature_is_one(scripted_server: Make) -> None:
    model = ScriptedModel(["x"])
    asked(scripted_server(model))
    assert model.turns[0].sampling.temperature == 1.0 and model.turns[0].max_tokens is None


def test_an_error_in_mid_stream_is_told_in_the_stream(scripted_server: Make) -> None:
    broken = Answer("It begins well.", error=OrchardError("the machine is on fire", hint="run"), delay=0.05)
    server = scripted_server([broken])
    text = ""
    with pytest.raises(openai.APIError, match="on fire") as caught:
        for chunk in asked(server, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "It begins well." and caught.value.body["code"] == "internal"  # type: ignore[index]
    server.settled()


def test_an_error_before_the_first_word_has_its_status(scripted_server: Make) -> None:
    server = scripted_server([ValueError("secret words"), ValueError("secret words")])
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            asked(server, stream=stream)
        assert caught.value.code == "internal" and "secret" not in caught.value.message


def test_a_stream_ends_with_done_and_is_no_cached_page(scripted_server: Make) -> None:
    server = scripted_server(["Hello there."])
    body = {"model": "scripted", "messages": ASKED, "stream": True}
    answer = httpx2.post(f"{server.base_url}/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache" and answer.text.endswith("data: [DONE]\n\n")
    events = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") and "\n" not in line for line in events)
    assert [json.loads(line[6:])["object"] for line in events[:-1]] == ["chat.completion.chunk"] * (len(events) - 1)


def test_all_of_unicode_comes_through_a_stream(scripted_server: Make) -> None:
    words = 'quotes " \\ / \x00\x1f\u2028 é 語 🎉 \r\n\t'
    pieces = tuple(words)
    server = scripted_server([Answer(pieces=pieces), Answer(pieces=pieces)])
    parts = [chunk.choices[0].delta.content or "" for chunk in asked(server, stream=True)]
    assert "".join(parts) == words == asked(server).choices[0].message.content


def test_a_full_line_is_told_when_to_come_back(scripted_server: Make) -> None:
    slow = ScriptedModel(["word " * 1000] * 3, delay=0.02)
    server = scripted_server(slow, limits=Limits(running=1, queue=0))
    stream = asked(server, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        asked(server)
    assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
    stream.close()
    server.settled()


def test_the_package_tries_again_by_itself(scripted_server: Make) -> None:
    slow = ScriptedModel(["word " * 20, "second"], delay=0.02)
    server = scripted_server(slow, limits=Limits(running=1, queue=0))
    stream = asked(server, stream=True)
    next(iter(stream))
    assert asked(server, client={"max_retries": 3}).choices[0].message.content == "second"


def test_a_stream_that_is_left_stops_the_model(scripted_server: Make) -> None:
    server = scripted_server(ScriptedModel(["word " * 10_000], delay=0.01))
    begun = time.monotonic()
    stream = asked(server, stream=True)
    next(iter(stream))
    stream.close()
    server.settled()
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_in_the_line_leaves_it(scripted_server: Make, stream: bool) -> None:
    model = ScriptedModel(["word " * 10_000], delay=0.01)
    server = scripted_server(model, limits=Limits(running=1))
    first = asked(server, stream=True)
    next(iter(first))
    with pytest.raises(TOO_LATE):
        asked(server, stream=stream, client={"timeout": 0.3})
    gate = server.service.gate
    deadline = time.monotonic() + 20
    while gate.waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (gate.waiting, gate.running, len(model.turns)) == (0, 1, 1)
    first.close()
    server.settled()


def test_a_stream_may_take_longer_than_the_client_waits_for_a_byte(scripted_server: Make) -> None:
    server = scripted_server(ScriptedModel(["word " * 40], delay=0.05))
    chunks = list(asked(server, stream=True, client={"timeout": 1.5}))
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_whole_answers_are_called_off_too(scripted_server: Make) -> None:
    server = scripted_server(ScriptedModel(["word " * 10_000], delay=0.01))
    with pytest.raises(TOO_LATE):
        asked(server, client={"timeout": 0.3})
    server.settled()


def test_users_are_told_apart(scripted_server: Make) -> None:
    """Who has nothing running yet goes before who has, in whose name ever the same address asks."""
    model = ScriptedModel(["word " * 1000, "word " * 1000, "short", "short"], delay=0.02)
    server = scripted_server(model, limits=Limits(running=2))

    def said(words: str) -> list[Any]:
        return [{"role": "user", "content": words}]

    first, second = (asked(server, stream=True, user="ada", messages=said(words)) for words in ("a1", "a2"))
    with ThreadPoolExecutor(2) as pool:
        waiting = []
        for count, (field, name, words) in enumerate((("user", "ada", "a3"), ("safety_identifier", "bob", "b1")), 1):
            waiting.append(pool.submit(asked, server, messages=said(words), **{field: name}))
            deadline = time.monotonic() + 20
            while server.service.gate.waiting < count and time.monotonic() < deadline:
                time.sleep(0.005)
        first.close()
        assert all(one.result().choices[0].message.content == "short" for one in waiting)
    second.close()
    assert model.prompts == ["a1", "a2", "b1", "a3"]


def test_the_servers_own_limit_of_tokens(scripted_server: Make) -> None:
    model = ScriptedModel(["one two three four five"])
    server = scripted_server(model, limits=Limits(max_tokens=3))
    with pytest.raises(openai.BadRequestError, match="3 or fewer"):
        asked(server, max_tokens=4)
    assert asked(server).choices[0].finish_reason == "length" and model.turns[0].max_tokens == 3


def test_keys(scripted_server: Make) -> None:
    server = scripted_server(["x"], keys=(hashlib.sha256(b"sesame").hexdigest(),))
    with pytest.raises(openai.AuthenticationError) as caught:
        asked(server)
    assert caught.value.code == "invalid_api_key"
    assert asked(server, client={"api_key": "sesame"}, extra_body={"priority": 5}).choices[0].message.content == "x"


def test_only_clients_with_a_key_go_before_others(scripted_server: Make) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(scripted_server(["x"]), extra_body={"priority": 5})
    assert caught.value.param == "priority"


def test_a_body_that_is_too_large(scripted_server: Make) -> None:
    server = scripted_server(["x"], limits=Limits(body_bytes=10_000))
    with pytest.raises(openai.APIStatusError) as caught:
        asked(server, messages=[{"role": "user", "content": "x" * 20_000}])
    assert caught.value.status_code == 413 and caught.value.code == "body_too_large"


def test_a_path_that_is_not_there(scripted_server: Make) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        scripted_server([]).openai().images.generate(prompt="a cat")
    assert caught.value.code == "not_found"


def test_body_that_is_no_json(scripted_server: Make) -> None:
    server = scripted_server([])
    answer = httpx2.post(
        f"{server.base_url}/chat/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_the_description_of_the_api_names_the_fields(scripted_server: Make) -> None:
    document = httpx2.get(f"{scripted_server([]).url}/openapi.json").json()
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert field in schema["properties"]
