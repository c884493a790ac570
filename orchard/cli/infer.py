"""A schema from examples: what values look like, as one JSON Schema that all of them match.

A property that every example has is required, others are optional; values of several kinds become `anyOf`. Nothing is guessed
beyond that: a text that looks like a date stays a text, and a list that is always empty may hold anything.
"""

from __future__ import annotations

from typing import Any

MOST_DEPTH = 64


def infer(examples: list[Any], title: str = "Answer", depth: int = 0) -> dict[str, Any]:
    """One schema for all the examples, in the words that `GenerationSchema` uses."""
    if depth > MOST_DEPTH:
        return {}
    kinds: dict[str, list[Any]] = {}
    for example in examples:
        kinds.setdefault(_kind(example), []).append(example)
    if "integer" in kinds and "number" in kinds:
        kinds["number"] += kinds.pop("integer")
    parts = [_of_kind(kind, values, title, depth) for kind, values in kinds.items()]
    if not parts:
        return {}
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = ((dict, "object"), (list, "array"), (str, "string"), (int, "integer"))
    return next((name for kind, name in names if isinstance(value, kind)), "number")


def _of_kind(kind: str, values: list[Any], title: str, depth: int) -> dict[str, Any]:
    if kind == "object":
        return _object(values, title, depth)
    if kind == "array":
        return {"type": "array", "items": infer([item for value in values for item in value], title, depth + 1)}
    return {"type": kind}


def _object(values: list[dict[str, Any]], title: str, depth: int) -> dict[str, Any]:
    names = list(dict.fromkeys(name for value in values for name in value))
    properties = {
        name: infer([value[name] for value in values if name in value], _title(name), depth + 1) for name in names
    }
    required = [name for name in names if all(name in value for value in values)]
    return {
        "title": title,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "x-order": names,
    }


def _title(name: str) -> str:
    """`home_address` → `HomeAddress`: what a class of it would be called."""
    words = "".join(letter if letter.isalnum() else " " for letter in name).split()
    return "".join(word[:1].upper() + word[1:] for word in words) or "Part"
