"""Requests whose answers are known: greedy ones of every protocol, each with a way to read its answer from either form.

What an item reads is the same for a whole answer and for a stream, and does not depend on ids or times. So an answer computed
once, alone, can be compared with every later one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from orchard.bench.load.client import Reply

MODEL = "smollm2"
TOPICS = (
    "ferns",
    "the sea",
    "a red bicycle",
    "prime numbers",
    "bread",
    "the moon",
    "an old library",
    "chess",
    "rain in April",
    "volcanoes",
)


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    inhabitants: int
    coastal: bool


class Recipe(BaseModel):
    model_config = ConfigDict(extra="forbid")
    title: str
    minutes: int
    level: Literal["easy", "medium", "hard"]
    steps: list[str]


SHAPES: dict[str, type[BaseModel]] = {"city": City, "recipe": Recipe}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


class Wrong(Exception):
    """An answer that is not what it has to be."""


@dataclass(frozen=True)
class Item:
    """`read` gives an answer as plain text to compare; `check` says what is wrong with it by itself."""

    name: str
    path: str
    body: dict[str, Any]
    read: Callable[[Reply], str]
    streams: bool = True
    check: Callable[[str], None] = lambda answer: None
    headers: dict[str, str] = field(default_factory=dict)

    def bytes(self, *, stream: bool) -> bytes:
        return json.dumps({**self.body, "stream": True} if stream else self.body).encode()


def items(*, embeddings: bool = False) -> list[Item]:
    found = [*_chats(), *_shaped(), *_tools(), *_completions(), *_messages(), *_responses()]
    return found + (_embeddings() if embeddings else [])


# What is asked ----------------------------------------------------------------------------------------------------------


def _chat(topic: str, **more: Any) -> dict[str, Any]:
    words = {"role": "user", "content": f"Say something about {topic}."}
    return {"model": MODEL, "messages": [words], "temperature": 0, "max_tokens": 24, **more}


def _chats() -> list[Item]:
    path = "/v1/chat/completions"
    found = [Item(f"chat {topic}", path, _chat(topic), read_chat) for topic in TOPICS]
    system = [
        {"role": "system", "content": "You are a poet."},
        {"role": "user", "content": "Write one line about snow."},
    ]
    found.append(Item("chat with instructions", path, _chat("", messages=system), read_chat))
    found.append(Item("chat with a stop", path, _chat("cats", stop=[".", "\n"], max_tokens=40), read_chat))
    found.append(Item("chat twice", path, _chat("dogs", n=2, max_tokens=12), read_chat, check=_choices_alike))
    found.append(Item("chat of one token", path, _chat("tea", max_tokens=1), read_chat))
    return found


def _shaped() -> list[Item]:
    found = []
    for name, shape in SHAPES.items():
        form = {
            "type": "json_schema",
            "json_schema": {"name": name, "strict": True, "schema": shape.model_json_schema()},
        }
        body = _chat(f"a {name}, as JSON", response_format=form, max_tokens=160)
        found.append(Item(f"shaped {name}", "/v1/chat/completions", body, read_chat, check=_of_shape(shape)))
    return found


def _tools() -> list[Item]:
    about = {"name": "weather", "description": "The weather of a city", "parameters": WEATHER}
    body = _chat(
        "the weather in Rome",
        tools=[{"type": "function", "function": about}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=80,
    )
    return [Item("tool", "/v1/chat/completions", body, read_chat, check=_called)]


def _completions() -> list[Item]:
    bodies = [{"model": MODEL, "prompt": f"{topic} is", "temperature": 0, "max_tokens": 16} for topic in TOPICS[:4]]
    return [Item(f"completion {body['prompt']}", "/v1/completions", body, read_completion) for body in bodies]


def _messages() -> list[Item]:
    headers = {"anthropic-version": "2023-06-01"}
    body = {
        "model": MODEL,
        "max_tokens": 24,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Name a river."}],
    }
    tool = {"name": "weather", "description": "The weather of a city", "input_schema": WEATHER}
    called = body | {"tools": [tool], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 80}
    return [
        Item("messages", "/v1/messages", body, read_messages, headers=headers),
        Item("messages with a tool", "/v1/messages", called, read_messages, headers=headers, check=_called),
    ]


def _responses() -> list[Item]:
    body = {"model": MODEL, "input": "Name three colours.", "temperature": 0, "max_output_tokens": 24}
    return [Item("responses", "/v1/responses", body, read_responses)]


def _embeddings() -> list[Item]:
    body = {"model": "minilm", "input": ["a fern", "the sea"]}
    return [Item("embeddings", "/v1/embeddings", body, read_embeddings, streams=False)]


# What comes back --------------------------------------------------------------------------------------------------------


def _events(reply: Reply) -> Iterable[dict[str, Any]] | None:
    """The events of a stream; None for a whole answer."""
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        return None
    return [json.loads(data) for _, data in reply.events() if data.strip() != "[DONE]"]


def _canonical(choices: Iterable[Any]) -> str:
    return json.dumps(list(choices), sort_keys=True)


def read_chat(reply: Reply) -> str:
    events = _events(reply)
    if events is None:
        return _canonical(
            [
                one["message"].get("content") or "",
                [
                    (call["function"]["name"], call["function"]["arguments"])
                    for call in one["message"].get("tool_calls") or ()
                ],
                one["finish_reason"],
            ]
            for one in sorted(reply.json()["choices"], key=lambda one: one["index"])
        )
    found: dict[int, list[Any]] = {}
    calls: dict[tuple[int, int], list[str]] = {}
    for chunk in events:
        _raise_error(chunk)
        for one in chunk["choices"]:
            choice = found.setdefault(one["index"], ["", [], None])
            choice[0] += one["delta"].get("content") or ""
            choice[2] = one.get("finish_reason") or choice[2]
            for call in one["delta"].get("tool_calls") or ():
                parts = calls.setdefault((one["index"], call["index"]), ["", ""])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
    for (index, _), parts in sorted(calls.items()):
        found[index][1].append(parts)
    return _canonical(found[index] for index in sorted(found))


def read_completion(reply: Reply) -> str:
    events = _events(reply)
    if events is None:
        return _canonical([one["text"], one["finish_reason"]] for one in reply.json()["choices"])
    found: dict[int, list[Any]] = {}
    for chunk in events:
        _raise_error(chunk)
        for one in chunk["choices"]:
            choice = found.setdefault(one["index"], ["", None])
            choice[0] += one["text"]
            choice[1] = one.get("finish_reason") or choice[1]
    return _canonical(found[index] for index in sorted(found))


def read_messages(reply: Reply) -> str:
    events = _events(reply)
    if events is None:
        whole = reply.json()
        used = [part for part in whole["content"] if part["type"] == "tool_use"]
        text = "".join(part["text"] for part in whole["content"] if part["type"] == "text")
        made = [[part["name"], json.dumps(part["input"], sort_keys=True)] for part in used]
        return _canonical([[text, made, whole["stop_reason"]]])
    text, stop, calls = "", None, dict[int, list[str]]()
    for event in events:
        _raise_error(event)
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = [event["content_block"]["name"], ""]
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                calls[event["index"]][1] += event["delta"]["partial_json"]
        elif event["type"] == "message_delta":
            stop = event["delta"]["stop_reason"]
    made = [[name, json.dumps(json.loads(words or "{}"), sort_keys=True)] for name, words in calls.values()]
    return _canonical([[text, made, stop]])


def read_responses(reply: Reply) -> str:
    events = _events(reply)
    if events is None:
        whole = reply.json()
        texts = [part["text"] for one in whole["output"] if one["type"] == "message" for part in one["content"]]
        return _canonical(["".join(texts)])
    text = ""
    for event in events:
        _raise_error(event)
        if event["type"] == "response.output_text.delta":
            text += event["delta"]
    return _canonical([text])


def read_embeddings(reply: Reply) -> str:
    rows = [one["embedding"] for one in reply.json()["data"]]
    return _canonical([len(row), [round(number, 3) for number in row[:8]]] for row in rows)


def _raise_error(event: dict[str, Any]) -> None:
    if event.get("error") or event.get("type") in ("error", "response.failed"):
        raise Wrong(f"an error in the stream: {json.dumps(event)[:300]}")


# What is right ----------------------------------------------------------------------------------------------------------


def _choices_alike(answer: str) -> None:
    choices = json.loads(answer)
    if len(choices) != 2 or choices[0] != choices[1]:
        raise Wrong("two greedy choices of one request differ")


def _of_shape(shape: type[BaseModel]) -> Callable[[str], None]:
    def check(answer: str) -> None:
        [[text, _, finish]] = json.loads(answer)
        if finish != "length":
            try:
                shape.model_validate_json(text, strict=True)
            except ValueError as error:
                raise Wrong(f"not of its schema: {text[:200]} ({error})") from error

    return check


def _called(answer: str) -> None:
    [[_, calls, finish]] = json.loads(answer)
    if finish in ("length", "max_tokens"):
        return
    if len(calls) != 1 or calls[0][0] != "weather":
        raise Wrong(f"the tool was not called: {answer[:200]}")
    arguments = json.loads(calls[0][1])
    if set(arguments) != {"city", "days"} or not isinstance(arguments["city"], str) or not 1 <= arguments["days"] <= 9:
        raise Wrong(f"arguments that are not of the tool's schema: {calls[0][1][:200]}")
