"""A whole session over an endpoint: tools, typed answers, streams, and a transcript that only good turns reach."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import orchard
from orchard.session import errors
from tests.session.endpoint_server import FakeEndpoint, Handler, delta, said, served, stopped

pytestmark = pytest.mark.loopback


@dataclass
class Cat:
    name: str
    age: int


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    yield from served()


def in_turn(*answers: list[dict[str, Any]]) -> Any:
    """One answer after the other, each a list of chunks."""
    left = iter(answers)
    return lambda handler: handler.stream(*next(left))


def session_on(endpoint: FakeEndpoint, **named: Any) -> orchard.Session:
    return orchard.Session("Be brief.", model=endpoint.executor(), guardrails=None, **named)


def test_a_conversation_of_two_turns(endpoint: FakeEndpoint) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    endpoint.answer = in_turn([said("Hel"), said("lo"), stopped(), usage], [said("Again"), stopped(), usage])
    session = session_on(endpoint)
    assert list(session.stream("Hi").deltas()) == ["Hel", "lo"]
    assert session.respond("And?").content == "Again"
    assert [message["role"] for message in endpoint.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert (session.usage.input, session.usage.output) == (10, 4)


def test_tools_are_called_and_their_results_sent_back(endpoint: FakeEndpoint) -> None:
    def weather(city: str) -> dict[str, Any]:
        """The weather in a city."""
        return {"city": city, "degrees": 21}

    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    wrong = {"index": 0, "id": "c2", "function": {"name": "weather", "arguments": '{"city": 3}'}}
    endpoint.answer = in_turn(
        [delta(tool_calls=[call]), stopped("tool_calls")],
        [delta(tool_calls=[wrong]), stopped("tool_calls")],
        [said("21 degrees."), stopped()],
    )
    answer = session_on(endpoint, tools=[weather]).respond("How warm is it in Oslo?")
    assert (
        answer.content == "21 degrees." and len(answer.tool_errors) == 1
    )  # an endpoint may err; the tool is not called
    sent = endpoint.bodies[1]["messages"]
    assert sent[-2]["tool_calls"][0]["id"] == "c1" == sent[-1]["tool_call_id"] and "21" in sent[-1]["content"]
    assert json.loads(sent[-2]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert endpoint.bodies[0]["tools"][0]["function"]["parameters"]["properties"]["city"]["type"] == "string"


def test_typed_answers_are_checked_again_here(endpoint: FakeEndpoint) -> None:
    endpoint.answer = in_turn(
        [said('{"name": "Tom", '), said('"age": 3}'), stopped()], [said('{"name": "Tom"}'), stopped()]
    )
    session = session_on(endpoint)
    assert session.respond("Invent a cat.", generating=Cat).content == Cat("Tom", 3)
    told = endpoint.bodies[0]["response_format"]["json_schema"]
    assert told["strict"] is True and list(told["schema"]["properties"]) == ["name", "age"]
    with pytest.raises(errors.DecodingFailureError):
        session.respond("Invent a cat.", generating=Cat)
    assert len(session.transcript) == 3


@pytest.mark.parametrize("form", [{"regex": "a+"}, {"choices": ["a", "b"]}])
def test_forms_that_an_endpoint_cannot_hold_to(endpoint: FakeEndpoint, form: dict[str, Any]) -> None:
    session = session_on(endpoint)
    with pytest.raises(errors.UnsupportedCapabilityError):
        session.respond("x", **form)
    assert not endpoint.bodies and len(session.transcript) == 1


def test_a_turn_that_breaks_off_is_not_in_the_transcript(endpoint: FakeEndpoint) -> None:
    def cut(handler: Handler) -> None:
        handler.begin()
        handler.chunk(b"data: " + json.dumps(said("half")).encode() + b"\n\n")

    endpoint.answer = cut
    session = session_on(endpoint)
    with pytest.raises(errors.AssetsUnavailableError):
        session.respond("Hi")
    assert len(session.transcript) == 1
    endpoint.answer = in_turn([said("Hello"), stopped()])
    assert session.respond("Hi").content == "Hello"
