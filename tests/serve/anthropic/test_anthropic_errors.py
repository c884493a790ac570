"""What `/v1/messages` refuses, and what Anthropic's package makes of it; limits, and clients that hang up."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx2
import pytest

from orchard.core.errors import UsageError
from orchard.serve.settings import Limits
from orchard.testing import Answer, ScriptedModel
from tests.serve.anthropic.asking import CLOCK, HELLO, client, post
from tests.serve.serving import Serving, scripted_settings, serving

pytestmark = pytest.mark.loopback


def part(**block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no bound": ({"max_tokens": None}, "invalid_request", "max_tokens"),
    "no tokens": ({"max_tokens": 0}, "invalid_request", "max_tokens"),
    "truth": ({"max_tokens": True}, "invalid_request", "max_tokens"),
    "no messages": ({"messages": []}, "invalid_request", "messages"),
    "empty": ({"messages": [{"role": "user", "content": ""}]}, "invalid_request", "messages.0.content"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_request", "messages.0.role"),
    "picture": (part(type="image", source={"type": "url", "url": "x"}), "unsupported_parameter", "image"),
    "document": (part(type="document", source={}), "unsupported_parameter", "document"),
    "unknown block": (part(type="search_result"), "unsupported_parameter", "search_result"),
    "block without text": (part(type="text"), "invalid_request", "messages.0.content.0.text"),
    "nobody's result": (part(type="tool_result", tool_use_id="toolu_1"), "invalid_request", "toolu_1"),
    "call of a user": (part(type="tool_use", id="a", name="b", input={}), "invalid_request", "assistant"),
    "only thoughts": (
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "invalid_request",
        "messages",
    ),
    "call without result": (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
            ]
        },
        "invalid_request",
        "tool_result",
    ),
    "server tool": (
        {"tools": [{"type": "web_search_20260209", "name": "web_search"}]},
        "unsupported_parameter",
        "web_search",
    ),
    "no schema": ({"tools": [{"name": "a"}]}, "invalid_schema", "tools.0.input_schema"),
    "no object": ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "invalid_schema", "object"),
    "two of a name": ({"tools": [CLOCK, CLOCK]}, "invalid_request", "clock"),
    "name of a tool": ({"tools": [CLOCK | {"name": "a b"}]}, "invalid_request", "tools.0.name"),
    "choice without tools": ({"tool_choice": {"type": "any"}}, "invalid_request", "tool_choice"),
    "unknown tool": ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "invalid_request", "clock"),
    "other servers": ({"mcp_servers": [{"url": "x"}]}, "unsupported_parameter", "mcp_servers"),
    "compaction": ({"compaction": {"type": "x"}}, "unsupported_parameter", "compaction"),
    "container": ({"container": "c"}, "unsupported_parameter", "container"),
    "budget": ({"thinking": {"type": "enabled"}}, "invalid_request", "budget_tokens"),
    "temperature": ({"temperature": 3}, "invalid_request", "temperature"),
    "many stops": ({"stop_sequences": ["x"] * 17}, "invalid_request", "17"),
    "empty stop": ({"stop_sequences": [""]}, "invalid_request", "stop_sequences.0"),
    "other format": ({"output_config": {"format": {"type": "yaml"}}}, "unsupported_parameter", "yaml"),
    "too long": ({"messages": [{"role": "user", "content": "word " * 5000}]}, "context_length_exceeded", "4,096"),
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
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": HELLO}
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as caught:
            ours.messages.create(**asked, extra_body={**body, "stream": stream})
        error = caught.value
        told: Any = error.body
        assert told["type"] == "error" and error.type == "invalid_request_error"
        assert told["error"]["code"] == error.error_code == code and words in told["error"]["message"]
        assert told["request_id"] == error.request_id and told["request_id"].startswith("req_")


def test_unknown_models(scripted_server: Callable[..., Serving]) -> None:
    with pytest.raises(anthropic.NotFoundError, match="scripted") as caught:
        client(scripted_server([])).messages.create(model="claude", max_tokens=9, messages=HELLO)
    assert caught.value.type == "not_found_error"


def test_no_json(scripted_server: Callable[..., Serving]) -> None:
    answer = httpx2.post(
        f"{scripted_server([]).url}/v1/messages", content=b"{", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
    assert answer.json()["request_id"] == answer.headers["request-id"]


def test_an_error_in_the_middle(scripted_server: Callable[..., Serving]) -> None:
    wrong = Answer("one two", delay=0.05, error=UsageError("it broke", hint="mend it"))
    ours = client(scripted_server([wrong]))
    heard = []
    with pytest.raises(anthropic.APIStatusError, match="it broke: mend it") as caught:
        for event in ours.messages.create(model="scripted", max_tokens=9, messages=HELLO, stream=True):
            heard.append(event.type)
    assert (
        "content_block_delta" in heard
        and caught.value.error_code == "invalid_request"
        and caught.value.type == "invalid_request_error"
    )


def test_keys(scripted_server: Callable[..., Serving]) -> None:
    serving = scripted_server(["Hi"], keys=(hashlib.sha256(b"a-key-of-ours").hexdigest(),))
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": HELLO}
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client(serving).messages.create(**asked)
    assert (caught.value.type, caught.value.error_code) == ("authentication_error", "invalid_api_key")
    assert caught.value.request_id is not None and caught.value.request_id.startswith("req_")
    ours = anthropic.Anthropic(base_url=serving.url, api_key="a-key-of-ours", max_retries=0)
    assert ours.messages.create(**asked).content[0].text == "Hi"  # type: ignore[union-attr]


def test_large_bodies(scripted_server: Callable[..., Serving]) -> None:
    serving = scripted_server(["never"], limits=Limits(body_bytes=1000))
    said: list[Any] = [{"role": "user", "content": "x" * 2000}]
    with pytest.raises(anthropic.APIStatusError) as caught:
        client(serving).messages.create(model="scripted", max_tokens=9, messages=said)
    assert (caught.value.status_code, caught.value.error_code) == (413, "body_too_large")


def test_late_answers(scripted_server: Callable[..., Serving]) -> None:
    serving = scripted_server([Answer("a b c d e f", delay=0.2)], limits=Limits(deadline=0.5))
    with pytest.raises(anthropic.InternalServerError) as caught:
        client(serving).messages.create(model="scripted", max_tokens=9, messages=HELLO)
    assert (caught.value.status_code, caught.value.error_code) == (504, "deadline_exceeded")
    serving.settled()


def test_a_full_line_is_a_rate_limit(scripted_server: Callable[..., Serving]) -> None:
    serving = scripted_server([Answer("a b c d", delay=0.3), "x"], limits=Limits(running=1, queue=0))
    ours = client(serving)
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": HELLO}
    with ours.messages.stream(**asked) as stream:
        next(iter(stream))
        with pytest.raises(anthropic.RateLimitError) as caught:
            ours.messages.create(**asked)
    assert int(caught.value.response.headers["retry-after"]) >= 1 and caught.value.type == "rate_limit_error"


def test_users_are_told_apart(scripted_server: Callable[..., Serving]) -> None:
    """Who has nothing running yet goes before who has."""
    model = ScriptedModel(["word " * 1000, "word " * 1000, "short", "short"], delay=0.02)
    serving = scripted_server(model, limits=Limits(running=2))
    ours = client(serving)

    def asked(name: str, words: str) -> dict[str, Any]:
        said = [{"role": "user", "content": words}]
        return {"model": "scripted", "max_tokens": 3000, "messages": said, "metadata": {"user_id": name}}

    first, second = (ours.messages.create(**asked("ada", words), stream=True) for words in ("a1", "a2"))
    with ThreadPoolExecutor(2) as pool:
        waiting = []
        for count, (name, words) in enumerate((("ada", "a3"), ("bob", "b1")), 1):
            waiting.append(pool.submit(ours.messages.create, **asked(name, words)))
            deadline = time.monotonic() + 20
            while serving.service.gate.waiting < count and time.monotonic() < deadline:
                time.sleep(0.005)
        first.close()
        assert all(one.result().content[0].text == "short" for one in waiting)
    second.close()
    assert model.prompts == ["a1", "a2", "b1", "a3"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_place(scripted_server: Callable[..., Serving], stream: bool) -> None:
    serving = scripted_server([Answer("word " * 2000, delay=0.05)])
    body = {"model": "scripted", "max_tokens": 4000, "messages": HELLO, "stream": stream}
    if stream:
        with httpx2.stream("POST", f"{serving.url}/v1/messages", json=body) as answer:
            lines = answer.iter_lines()  # letting go of it would hang up
            assert next(lines)
            assert serving.service.gate.running == 1
    else:
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(f"{serving.url}/v1/messages", json=body, timeout=0.5)
    serving.settled()  # 100 seconds of answer are left


def test_unknown_fields_are_named(scripted_server: Callable[..., Serving]) -> None:
    serving = scripted_server(["x", "x"])
    said = [{"role": "user", "content": [{"type": "text", "text": "a", "color": "red"}]}]
    for stream in (False, True):
        answer = post(serving, messages=said, speed="fast", tools=[CLOCK | {"defer_loading": True}], stream=stream)
        names = answer.headers["x-orchard-ignored"].split(", ")
        assert sorted(names) == ["messages.0.content.0.color", "speed", "tools.0.defer_loading"]
