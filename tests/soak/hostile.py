"""Requests that ought to be refused, or that are meant to hurt: bodies of the wrong form, inputs that are too long, schemas that
are too deep, too large, endless, contradictory or expensive. Each is made from a seeded generator alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.soak.catalog import MODEL

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"


@dataclass(frozen=True)
class Shot:
    """A request, and the statuses that are right for it (`4`: any of 400 to 499)."""

    name: str
    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = (4,)
    codes: tuple[str, ...] = ()
    """Codes that are right; none: any."""


def malformed(draw: random.Random) -> Shot:
    """One of many bodies that no server should accept."""
    kind = draw.choice(["bytes", "field", "field", "field", "field", "field", "shape", "route"])
    return {"bytes": _bytes, "field": _field, "shape": _shape, "route": _route}[kind](draw)


def _good(path: str) -> dict[str, Any]:
    said = [{"role": "user", "content": "Hello."}]
    if path == TEXT:
        return {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
    if path == RESPONSES:
        return {"model": MODEL, "input": "Hello", "max_output_tokens": 4}
    return {"model": MODEL, "messages": said, "max_tokens": 4}


def _bytes(draw: random.Random) -> Shot:
    path = draw.choice([CHAT, TEXT, MESSAGES, RESPONSES])
    good = json.dumps(_good(path)).encode()
    deep = draw.choice([b"[", b'{"a":'])
    bodies = {
        "cut": good[: draw.randrange(1, len(good) - 1)],
        "empty": b"",
        "noise": draw.randbytes(draw.randrange(1, 400)),
        "not UTF-8": good.replace(b"Hello", b"\xff\xfe\xfa"),
        "deep": deep * 10_000,
        "deep inside": good.replace(
            b'"max_tokens"', b'"metadata": ' + b"[" * 10_000 + b"]" * 10_000 + b', "max_tokens"'
        ),
        "twice": good + good,
        "a list": b"[" + good + b"]",
        "null": b"null",
        "a word": b'"hello"',
        "bare NaN": good.replace(b"4", b"NaN"),
        "comment": b"// hi\n" + good,
    }
    if path == RESPONSES:
        del bodies["deep inside"]
    name = draw.choice(list(bodies))
    return Shot(f"malformed bytes: {name}", path, bodies[name])


WRONG_FIELDS: dict[str, list[tuple[str, Any]]] = {
    CHAT: [
        ("messages", None),
        ("messages", []),
        ("messages", "Hello"),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "wizard", "content": "x"}]),
        ("messages", [{"content": "x"}]),
        ("messages", [7]),
        ("messages", [{"role": "user", "content": {"a": 1}}]),
        ("messages", [{"role": "user", "content": [{"type": "mystery"}]}]),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("max_tokens", 10**400),
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", 1e9),
        ("top_p", 2),
        ("top_p", "x"),
        ("n", 0),
        ("n", -1),
        ("n", 100_000),
        ("stop", 7),
        ("stop", ["x"] * 1000),
        ("stop", ["x" * 100_000]),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"999999999": 1}),
        ("logprobs", "yes please"),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": 7}}]),
        ("tools", "hammer"),
        ("tool_choice", {"type": "function", "function": {"name": "absent"}}),
        ("response_format", {"type": "poem"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": "no"}}),
        ("stream", "perhaps"),
        ("model", 7),
        ("seed", "x"),
    ],
    TEXT: [
        ("prompt", None),
        ("prompt", {"a": 1}),
        ("prompt", [[-1]]),
        ("prompt", [10**12]),
        ("prompt", ["x"] * 5000),
        ("max_tokens", -1),
        ("n", 0),
        ("logprobs", 10**6),
        ("stop", {"a": 1}),
        ("logit_bias", {"1": "x"}),
    ],
    MESSAGES: [
        ("messages", []),
        ("messages", "x"),
        ("max_tokens", None),
        ("max_tokens", 0),
        ("messages", [{"role": "user", "content": 7}]),
        ("messages", [{"role": "user", "content": [{"type": "mystery"}]}]),
        ("tools", [{"name": "f"}]),
        ("tool_choice", {"type": "tool", "name": "absent"}),
        ("temperature", "x"),
        ("stop_sequences", "x"),
    ],
    RESPONSES: [("input", None), ("input", 7), ("max_output_tokens", -1), ("temperature", "x"), ("tools", "x")],
}


def _field(draw: random.Random) -> Shot:
    path = draw.choice([CHAT, CHAT, TEXT, MESSAGES, RESPONSES])
    name, value = draw.choice(WRONG_FIELDS[path])
    body = {**_good(path), name: value}
    if value is None:
        del body[name]
    return Shot(f"malformed field: {path} {name}={json.dumps(value)[:60]}", path, json.dumps(body).encode())


def _shape(draw: random.Random) -> Shot:
    """A good body in which something random took the place of something else."""
    path = draw.choice([CHAT, TEXT, MESSAGES, RESPONSES])
    body = _good(path)
    name = draw.choice([name for name in body if name not in ("model", "max_tokens", "max_output_tokens")])
    body[name] = draw.choice([True, 3.25, {"a": [1, {"b": None}]}, [[[[]]]], [None]])
    return Shot(f"malformed shape: {path} {name}={body[name]}", path, json.dumps(body).encode())


def _route(draw: random.Random) -> Shot:
    good = json.dumps(_good(CHAT)).encode()
    unknown = json.dumps({**_good(CHAT), "model": "no-such-model"}).encode()
    kind = {"content-type": "text/plain"}
    return draw.choice(
        [
            Shot("no such model", CHAT, unknown, statuses=(404,), codes=("model_not_found",)),
            Shot("no such path", "/v1/nowhere", good, statuses=(404,)),
            Shot("wrong method", CHAT, b"", method="GET", statuses=(405,)),
            Shot("wrong kind of body", CHAT, good, headers=kind, statuses=(415, 400)),
            Shot("foreign host", CHAT, good, headers={"host": "evil.example"}, statuses=(403, 400)),
            Shot("foreign page", CHAT, good, headers={"origin": "http://evil.example"}, statuses=(403,)),
        ]
    )


def over_long(draw: random.Random) -> Shot:
    """More tokens than any context has room for."""
    text = "river stone cloud lamp " * draw.choice([2200, 3000, 20_000])
    path = draw.choice([CHAT, TEXT, MESSAGES, RESPONSES])
    body = _good(path)
    if path in (CHAT, MESSAGES):
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt" if path == TEXT else "input"] = text
    return Shot(
        f"over-long {path}", path, json.dumps(body).encode(), statuses=(400,), codes=("context_length_exceeded",)
    )


# Schemas ----------------------------------------------------------------------------------------------------------------


def hostile_schema(draw: random.Random) -> Shot:
    name = draw.choice(list(SCHEMAS))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name](draw)}}
    body = {**_good(CHAT), "response_format": form, "max_tokens": 24, "temperature": 0}
    return Shot(f"hostile schema: {name}", CHAT, json.dumps(body).encode(), statuses=(200, 4))


def _deep(draw: random.Random) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(draw.choice([30, 200, 400])):
        schema = draw.choice([{"type": "array", "items": schema}, {"type": "object", "properties": {"a": schema}}])
        if isinstance(schema, dict) and "properties" in schema:
            schema["required"] = ["a"]
    return schema


def _enum(draw: random.Random) -> Any:
    return {"enum": [f"value {number} {draw.random()}" for number in range(draw.choice([500, 5000, 20_000]))]}


def _loop(draw: random.Random) -> Any:
    return draw.choice(
        [
            {"$ref": "#"},
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            {"allOf": [{"$ref": "#"}, {"type": "object"}]},
            {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
            {"$ref": "http://example.invalid/schema.json"},
            {"$ref": "file:///etc/passwd"},
            {"$ref": "#/$defs/absent"},
        ]
    )


def _regex(draw: random.Random) -> Any:
    pattern = draw.choice(
        [
            "^(a+)+$",
            "^(a|a)*b$",
            "^(([a-z])+.)+[A-Z]([a-z])+$",
            "^(a{1,1000}){1,1000}$",
            "^.{100000}$",
            "^(?=a)b$",
            "^(.*)(\\1)+$",
            "^[a-z]{0,5000}[0-9]{0,5000}[a-z]{0,5000}x$",
            "(",
            "^" + "(" * 500 + "a" + ")" * 500 + "$",
            "^" + "(x|y)?" * 300 + "$",
        ]
    )
    return {"type": "string", "pattern": pattern}


def _contradiction(draw: random.Random) -> Any:
    return draw.choice(
        [
            {"type": "string", "minLength": 5, "maxLength": 2},
            {"type": "integer", "minimum": 5, "maximum": 2},
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
            {"type": "object", "required": ["a"], "additionalProperties": False},
            {"const": 1, "enum": [2]},
            {"enum": []},
            {"not": {}},
            False,
            {"type": "array", "minItems": 3, "maxItems": 1},
            {"type": "array", "items": False, "minItems": 1},
        ]
    )


def _wide(draw: random.Random) -> Any:
    names = [f"field_{number}" for number in range(draw.choice([200, 2000, 6000]))]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}


def _branches(draw: random.Random) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(draw.choice([8, 16, 24])):  # shared parts: small to write down, huge when it is unfolded
        schema = (
            {"anyOf": [schema, schema]} if len(json.dumps(schema)) < 60_000 else {"oneOf": [schema, {"type": "null"}]}
        )
    return schema


def _doubling(draw: random.Random) -> Any:
    """Thirty definitions, each twice the one before: a billion when it is unfolded."""
    count = draw.choice([10, 30])
    parts: dict[str, Any] = {"d0": {"type": "integer"}}
    for number in range(1, count):
        before = {"$ref": f"#/$defs/d{number - 1}"}
        parts[f"d{number}"] = {"type": "object", "properties": {"l": before, "r": before}, "required": ["l", "r"]}
    return {"$ref": f"#/$defs/d{count - 1}", "$defs": parts}


def _numbers(draw: random.Random) -> Any:
    return draw.choice(
        [
            {"type": "string", "minLength": 10**9},
            {"type": "string", "maxLength": 10**9},
            {"type": "array", "items": {"type": "integer"}, "minItems": 10**7},
            {"type": "integer", "multipleOf": 10**30},
            {"type": "number", "multipleOf": 1e-300},
            {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
            {"type": "number", "minimum": 0.1, "exclusiveMaximum": 0.1000000000000001},
            {"type": "object", "minProperties": 10**6},
            {"type": "object", "patternProperties": {"^(a+)+$": {}, ".*": {"type": "null"}}, "minProperties": 3},
            {"type": ["string", "integer", "null", "array"], "minItems": 2, "minimum": 10**20},
        ]
    )


SCHEMAS: dict[str, Callable[[random.Random], Any]] = {
    "deep": _deep,
    "huge enum": _enum,
    "loop": _loop,
    "regex bomb": _regex,
    "contradiction": _contradiction,
    "wide": _wide,
    "branches": _branches,
    "doubling": _doubling,
    "numbers": _numbers,
}
