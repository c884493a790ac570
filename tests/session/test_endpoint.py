"""An endpoint behind a session: what is sent, what is understood, and how it is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from orchard.core.errors import UsageError
from orchard.generate.constraint import Constraint
from orchard.generate.request import Sampling
from orchard.session import errors
from orchard.session.executors.endpoint import EndpointExecutor
from orchard.session.turn import Call, Done, Executor, Reasoning, Text, Turn, Usage
from orchard.text.messages import Message
from tests.session.endpoint_server import (
    HELLO,
    KEY,
    WEATHER,
    FakeEndpoint,
    Handler,
    delta,
    events_of,
    said,
    served,
    stopped,
)

pytestmark = pytest.mark.loopback


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    yield from served()


# What is sent --------------------------------------------------------------------------------------------------------------


def test_a_plain_turn(endpoint: FakeEndpoint) -> None:
    executor = endpoint.executor()
    assert isinstance(executor, Executor) and executor.name == "small"
    assert events_of(executor) == [Text("hi"), Done("stop")]
    assert endpoint.paths == ["/v1/chat/completions"]
    assert endpoint.heads[0]["Authorization"] == f"Bearer {KEY}"
    assert endpoint.bodies[0] == {
        "model": "small",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }


def test_every_setting_is_sent(endpoint: FakeEndpoint) -> None:
    turn = Turn(
        (Message("system", "Be brief."), *HELLO),
        sampling=Sampling(temperature=0.5, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.1),
        max_tokens=7,
        seed=3,
        stop=("END",),
        logprobs=2,
        reasoning="deep",
    )
    executor = endpoint.executor(extra={"user": "me", "max_tokens": None}, headers={"X-Team": "blue-team"})
    assert events_of(executor, turn)[-1] == Done("stop", seed=3)
    body = endpoint.bodies[0]
    wanted: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": 3,
    }
    wanted |= {"stop": ["END"], "logprobs": True, "top_logprobs": 2, "reasoning_effort": "high", "user": "me"}
    assert {key: body[key] for key in wanted} == wanted and "max_tokens" not in body
    assert endpoint.heads[0]["X-Team"] == "blue-team"


@pytest.mark.parametrize(
    ("mode", "choice"),
    [
        ("allowed", "auto"),
        ("required", "required"),
        ("disallowed", "none"),
        ("weather", {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_the_four_modes_of_tools(endpoint: FakeEndpoint, mode: str, choice: Any) -> None:
    events_of(endpoint.executor(), Turn(HELLO, tools=(WEATHER,), tool_mode=mode, parallel_calls=False))
    body = endpoint.bodies[0]
    assert body["tool_choice"] == choice and body["tools"][0]["function"]["name"] == "weather"
    assert body.get("parallel_tool_calls") is (None if mode == "disallowed" else False)


def test_history_with_calls_is_sent_as_the_protocol_wants_it(endpoint: FakeEndpoint) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    history = (
        *HELLO,
        Message("assistant", "", tool_calls=[call]),
        Message("tool", "sunny", name="weather", tool_call_id="c1"),
    )
    events_of(endpoint.executor(), Turn(history))
    sent = endpoint.bodies[0]["messages"]
    assert sent[1]["content"] is None
    assert sent[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Zürich"}'}
    assert sent[2] == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}


def test_a_schema_is_sent_without_our_own_words(endpoint: FakeEndpoint) -> None:
    inner = {"type": "string", "enum": ["x-ray"]}
    schema = {
        "title": "A cat!",
        "type": "object",
        "properties": {"x-ray": inner, "b": {"type": "array", "items": {"type": "integer", "x-order": []}}},
        "required": ["x-ray", "b"],
        "additionalProperties": False,
        "x-order": ["x-ray", "b"],
    }
    events_of(endpoint.executor(), Turn(HELLO, constraint=Constraint.json_schema(schema)))
    told = endpoint.bodies[0]["response_format"]
    assert told["type"] == "json_schema" and told["json_schema"]["name"] == "A_cat_" and told["json_schema"]["strict"]
    sent = told["json_schema"]["schema"]
    assert list(sent["properties"]) == ["x-ray", "b"] and "x-order" not in json.dumps(sent)
    events_of(endpoint.executor(), Turn(HELLO, constraint=Constraint.json_schema(schema | {"required": ["b"]})))
    assert endpoint.bodies[1]["response_format"]["json_schema"]["strict"] is False


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (Turn(HELLO, constraint=Constraint.regex("a+")), "regular expression"),
        (Turn(HELLO, constraint=Constraint.choices(["a", "b"])), "choices"),
        (Turn(HELLO, constraint=Constraint.lark('start: "a"')), "grammar"),
        (Turn(HELLO, adapters=("mine",)), "adapters"),
        (Turn(HELLO, begin="Yes"), "beginning"),
    ],
)
def test_what_the_protocol_cannot_carry_is_refused_before_anything_is_sent(
    endpoint: FakeEndpoint, turn: Turn, says: str
) -> None:
    with pytest.raises(errors.UnsupportedCapabilityError, match=says) as caught:
        events_of(endpoint.executor(), turn)
    assert caught.value.hint and not endpoint.bodies


@pytest.mark.parametrize(
    "turn",
    [
        Turn(HELLO, logprobs=1),
        Turn(HELLO, reasoning="light"),
        Turn(HELLO, tools=(WEATHER,)),
        Turn(HELLO, constraint=Constraint.json_schema(True)),
    ],
)
def test_an_endpoint_that_can_less_refuses_more(endpoint: FakeEndpoint, turn: Turn) -> None:
    executor = endpoint.executor(capabilities=())
    assert executor.capabilities == frozenset()
    with pytest.raises(errors.UnsupportedCapabilityError):
        events_of(executor, turn)
    assert not endpoint.bodies
    assert events_of(executor, Turn(HELLO, seed=1))[-1] == Done("stop", seed=None)
    assert "seed" not in endpoint.bodies[0]


@pytest.mark.parametrize("turn", [Turn(HELLO, tool_mode="required"), Turn(HELLO, tools=(WEATHER,), tool_mode="other")])
def test_a_tool_that_must_be_called_has_to_be_there(endpoint: FakeEndpoint, turn: Turn) -> None:
    with pytest.raises(UsageError):
        events_of(endpoint.executor(), turn)


# What is understood --------------------------------------------------------------------------------------------------------


def test_usage_reasoning_and_logprobs(endpoint: FakeEndpoint) -> None:
    top = [{"token": "a", "logprob": -0.5}, {"token": "token_id:7", "logprob": -2}]
    scored = {"content": [{"token": "token_id:12", "logprob": -0.5, "top_logprobs": top}]}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 3}
    spoken = said("a")
    spoken["choices"][0]["logprobs"] = scored
    endpoint.answer = lambda handler: handler.stream(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(reasoning="m"),
        spoken,
        stopped("length"),
        {"choices": [], "usage": usage},
    )
    first, second, text, done = events_of(endpoint.executor(), Turn(HELLO, logprobs=2))
    assert (first, second) == (Reasoning("hm"), Reasoning("m"))
    assert isinstance(text, Text) and text.delta == "a" and text.ids == ()
    assert text.logprobs[0].id == 12 and text.logprobs[0].top == ((-1, -0.5), (7, -2.0))
    assert done == Done("length", Usage(input=9, cached=6, output=4, reasoning=3, calls=4))


def pieces(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [delta(tool_calls=[part]) for part in parts]


@pytest.mark.parametrize(
    "parts",
    [
        pieces(
            {"index": 0, "id": "a", "type": "function", "function": {"name": "one", "arguments": ""}},
            {"index": 1, "id": "b", "function": {"name": "two", "arguments": "{"}},
            {"index": 0, "function": {"arguments": '{"x"'}},
            {"index": 1, "function": {"arguments": "}"}},
            {"index": 0, "function": {"arguments": ":1}"}},
        ),
        pieces({"id": "a", "function": {"name": "one", "arguments": '{"x":1}'}}, {"id": "b", "function": {"name": "two"}}),
        pieces(
            {"id": "a", "function": {"name": "one", "arguments": '{"x"'}},
            {"function": {"arguments": ":1}"}},
            {"id": "b", "function": {"name": "two", "arguments": {}}},
        ),
        [delta(tool_calls=[{"index": n, "id": i, "function": f} for n, i, f in (
            (0, "a", {"name": "one", "arguments": '{"x":1}'}), (1, "b", {"name": "two", "arguments": "{}"}))])],
    ],
    ids=["letter by letter", "by id", "without id", "at once"],
)  # fmt: skip
def test_calls_come_whole(endpoint: FakeEndpoint, parts: list[dict[str, Any]]) -> None:
    endpoint.answer = lambda handler: handler.stream(*parts, stopped("tool_calls"))
    found = events_of(endpoint.executor(), Turn(HELLO, tools=(WEATHER,)))
    assert found == [Call("a", "one", '{"x":1}'), Call("b", "two", "{}"), Done("tool_calls")]


def test_calls_end_with_tool_calls_whatever_the_server_says(endpoint: FakeEndpoint) -> None:
    endpoint.answer = lambda handler: handler.stream(*pieces({"function": {"name": "one"}}), stopped("stop"))
    call, done = events_of(endpoint.executor(), Turn(HELLO, tools=(WEATHER,)))
    assert isinstance(call, Call) and call.id and call.arguments == "{}"
    assert isinstance(done, Done) and done.finish == "tool_calls"


def test_a_whole_answer_where_a_stream_was_asked_for(endpoint: FakeEndpoint) -> None:
    whole = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "all"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
    }
    endpoint.answer = lambda handler: handler.reply(200, json.dumps(whole).encode())
    assert events_of(endpoint.executor()) == [Text("all"), Done("stop", Usage(input=2, output=1, calls=1))]


def test_streams_of_other_habits(endpoint: FakeEndpoint) -> None:
    """No [DONE]; [DONE] without a finish; other choices; lone surrogates; cut anywhere by the network."""
    endpoint.answer = lambda handler: handler.stream(said("hi"), stopped(), done=False)
    assert events_of(endpoint.executor()) == [Text("hi"), Done("stop")]
    endpoint.answer = lambda handler: handler.stream(said("hi"))
    assert events_of(endpoint.executor()) == [Text("hi"), Done("stop")]
    other = {"choices": [{"index": 1, "delta": {"content": "no"}}]}
    endpoint.answer = lambda handler: handler.stream(other, said("\ud800"), stopped("something new"))
    assert events_of(endpoint.executor()) == [Text("\ufffd"), Done("stop")]

    def byte_by_byte(handler: Handler) -> None:
        handler.begin()
        for byte in b'data: {"choices":[{"delta":{"content":"\xc3\xa9"},"finish_reason":"stop"}]}\r\n\r\ndata: [DONE]':
            handler.chunk(bytes([byte]))
        handler.wfile.write(b"0\r\n\r\n")

    endpoint.answer = byte_by_byte
    assert events_of(endpoint.executor()) == [Text("é"), Done("stop")]


def test_refusals_and_filters_are_typed(endpoint: FakeEndpoint) -> None:
    endpoint.answer = lambda handler: handler.stream(delta(refusal="I can"), delta(refusal="not."), stopped())
    with pytest.raises(errors.RefusalError) as caught:
        events_of(endpoint.executor())
    assert caught.value.explanation == "I cannot."
    endpoint.answer = lambda handler: handler.stream(said("well"), stopped("content_filter"))
    with pytest.raises(errors.GuardrailViolationError):
        events_of(endpoint.executor())


# How it is made ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://x/v1",
        "x/v1",
        "http://",
        "http://h:99999/v1",
        "http://h/a b",
        "http://h/v1#x",
        "http://ü/v1",
        "h\n",
        3,
    ],
)
def test_addresses_that_are_none(url: Any) -> None:
    with pytest.raises(UsageError) as caught:
        EndpointExecutor(url, "m")
    assert caught.value.hint


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(UsageError) as caught:
        EndpointExecutor(f"https://me:{KEY}@example.org/v1", "m")
    assert KEY not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize(
    "named",
    [
        {"model": ""},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"timeout": "9"},
        {"context_size": 0},
        {"capabilities": ["vision"]},
        {"api_key": f"{KEY}\n"},
        {"headers": {"A": f"{KEY}\r\nB: c"}},
        {"headers": {"A b": "c"}},
        {"extra": {"a": object()}},
        {"extra": {"a": float("nan")}},
    ],
)
def test_settings_that_make_no_sense(named: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        EndpointExecutor("http://127.0.0.1:1/v1", **({"model": "m"} | named))
    assert caught.value.hint and KEY not in f"{caught.value} {caught.value.hint}"


def test_keys_go_where_they_were_meant_for(endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("ORCHARD_API_KEY", raising=False)
    events_of(endpoint.executor(api_key=None))
    assert "Authorization" not in endpoint.heads[0]
    monkeypatch.setenv("ORCHARD_API_KEY", "ours-123")
    events_of(endpoint.executor(api_key=None))
    assert endpoint.heads[1]["Authorization"] == "Bearer ours-123"
    events_of(endpoint.executor(api_key=""))
    assert "Authorization" not in endpoint.heads[2]
    with pytest.raises(UsageError, match="clear text"):
        EndpointExecutor("http://example.org/v1", "m", api_key=KEY)
    with pytest.raises(UsageError, match="clear text"):
        EndpointExecutor("http://example.org/v1", "m", api_key="", headers={"X-Key": KEY})
    made = EndpointExecutor("http://example.org/v1", "m", api_key=KEY, insecure=True)
    assert KEY not in repr(made) and "example.org" in repr(made)
    EndpointExecutor("https://example.org/v1", "m", api_key=KEY)


def test_addresses_are_understood(endpoint: FakeEndpoint) -> None:
    for tail in ("/v1", "/v1/", "/v1/chat/completions", "/v1?version=2"):
        events_of(EndpointExecutor(f"http://127.0.0.1:{endpoint.server_port}{tail}", "m", api_key=""))
    assert endpoint.paths == ["/v1/chat/completions"] * 3 + ["/v1/chat/completions?version=2"]


def test_certificates_are_checked() -> None:
    import ssl

    from orchard.session.executors.endpoint_http import Address, connection_to

    context = getattr(connection_to(Address.of("https://example.org/v1"), 1), "_context")  # noqa: B009
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
