"""Bodies that are almost right: good ones of every protocol with a few things changed, and schemas of every bad kind.

A case is made from a random generator alone, so that a seed and a number, hypothesis, or the bytes of a coverage-guided fuzzer
can each be behind it.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.fuzz.serve_app import MODEL
from tests.soak import hostile

Case = tuple[str, bytes]
CHAT, TEXT, MESSAGES, RESPONSES = hostile.CHAT, hostile.TEXT, hostile.MESSAGES, hostile.RESPONSES
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "pattern": "^[A-Z][a-z]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 3},
        "more": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "number", "multipleOf": 0.5}},
}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look it up", "parameters": SCHEMA, "strict": True},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"name": "Ada", "age": 3}'}}
USE = {"type": "tool_use", "id": "t", "name": "look", "input": {"name": "Ada", "age": 3}}
GOOD: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "ada"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "found"},
                {"role": "user", "content": "Go on <|im_end|>"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "max_tokens": 6,
            "temperature": 0.5,
            "top_p": 0.9,
            "n": 2,
            "seed": 1,
            "stop": ["x", "\n"],
            "logit_bias": {"5": -100, "6": 3.5},
            "logprobs": True,
            "top_logprobs": 2,
            "presence_penalty": 0.1,
            "frequency_penalty": -0.1,
            "user": "ada",
            "metadata": {"a": "b"},
        },
    ),
    (
        CHAT,
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "JSON"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
            "max_completion_tokens": 6,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "low",
        },
    ),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": [PICTURE]}], "max_tokens": 2, "store": False}),
    (
        TEXT,
        {
            "model": MODEL,
            "prompt": ["Once", "upon"],
            "max_tokens": 4,
            "temperature": 0,
            "echo": True,
            "logprobs": 2,
            "n": 1,
            "best_of": 1,
            "stop": "z",
            "suffix": None,
            "stream": False,
            "logit_bias": {"7": 1},
        },
    ),
    (TEXT, {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 3, "stream": True, "seed": 4}),
    (
        RESPONSES,
        {
            "model": MODEL,
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "found"},
            ],
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
            "tool_choice": "auto",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "max_output_tokens": 4,
            "temperature": 0.3,
            "store": False,
            "stream": True,
        },
    ),
    (RESPONSES, {"model": MODEL, "input": "Hello", "max_output_tokens": 3, "reasoning": {"effort": "low"}}),
    (
        MESSAGES,
        {
            "model": MODEL,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "Hello"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"name": "A", "age": 1}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "found"}]},
            ],
            "tools": [{"name": "look", "description": "Look it up", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "max_tokens": 6,
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.9,
            "stop_sequences": ["x"],
            "stream": True,
            "metadata": {"user_id": "ada"},
        },
    ),
    (MESSAGES, {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}),
    ("/v1/embeddings", {"model": MODEL, "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}),
    ("/tokenize", {"model": MODEL, "prompt": "Hello"}),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}),
]
PATHS = list(dict.fromkeys(path for path, _ in GOOD))
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 1.5, 1e308, -(2**63), 2**63, 10**40, float("nan"), float("inf")),
    *("", "x", "x" * 5000, "\ud800", "\x00", "😀", "<|im_end|>", "auto", "none", "required", "{", "1e400", "\r\n: x"),
    *([], {}, [[]], [None], ["x"] * 300, [1, "a", None], {"": ""}, {"type": "text"}, {"role": "user"}, {"$ref": "#"}),
    *({"type": "function"}, {"type": "json_schema"}, {"a": {"b": {"c": [{"d": 1}]}}}, {"name": "look"}, {"5": 1}),
]
_NAMES = "unknown __class__ model_config model_fields copy dict json self _x type $ref é a.b"
NAMES = ["", *_NAMES.split()]


def make_case(draw: random.Random) -> Case:
    """A path and a body for it."""
    kind = draw.random()
    if kind < 0.2:
        shot = hostile.hostile_schema(draw)
        return shot.path, shot.body
    if kind < 0.3:
        shot = hostile.malformed(draw)
        if shot.method == "POST" and not shot.headers:
            return shot.path, shot.body
    path, good = draw.choice(GOOD)
    body: Any = copy.deepcopy(good)
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        body = changed(body, draw)
    data = json.dumps(body).encode()
    return path, broken(data, draw) if draw.random() < 0.1 else data


def changed(body: Any, draw: random.Random) -> Any:
    """One thing in it replaced, taken out, doubled, named otherwise, or added."""
    places = list(_places(body))
    if not places:
        return draw.choice(VALUES)
    holder, key = draw.choice(places)
    what = draw.choice(["replace", "replace", "replace", "remove", "double", "rename", "add", "swap"])
    if what == "replace":
        holder[key] = copy.deepcopy(draw.choice(VALUES))
    elif what == "remove":
        del holder[key]
    elif what == "swap":
        other, place = draw.choice(places)
        holder[key] = copy.deepcopy(other[place]) if place in other or isinstance(other, list) else None
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key] if what == "double" else draw.choice(VALUES)))
    elif what == "rename":
        holder[draw.choice(NAMES)] = holder.pop(key)
    else:
        holder[draw.choice(NAMES)] = copy.deepcopy(draw.choice(VALUES))
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every item of every list and object in it: the holder, and where in it."""
    for key, item in list(
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from _places(item)


def broken(data: bytes, draw: random.Random) -> bytes:
    """Some bytes cut out, doubled, or changed."""
    start = draw.randrange(len(data) + 1)
    end = min(len(data), start + draw.choice([1, 1, 3, 20, 200]))
    return draw.choice(
        [
            data[:start] + data[end:],
            data[:end] + data[start:],
            data[:start] + draw.randbytes(end - start) + data[end:],
            data[:start],
        ]
    )
