"""A schema in few words, to stand in a prompt: the names in order, what each may hold, and what it means.

Small models follow an outline of the JSON better than a JSON Schema, which is longer and looks like an answer itself. The
length is bounded: descriptions go first, then what is nested deepest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchard.session.schema.check import target_of

LONGEST = 1500
"""In characters; about 400 tokens."""
_MOST_CHOICES, _LONGEST_DESCRIPTION = 12, 120
_NAMES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null"}


def words_for(schema: Mapping[str, Any], longest: int = LONGEST) -> str:
    """A description of the JSON that a schema (in the SDK's dialect) asks for."""
    beginning = "Answer with JSON only, in this form:"
    text = ""
    for depth, described in ((6, True), (6, False), (3, False), (2, False), (1, False)):
        outline = Outline(schema, depth)
        text = f"{beginning}\n{outline.of(schema, 0)}"
        meant = [*([schema["description"]] if schema.get("description") else []), *outline.descriptions]
        if described and meant:
            text += "\n" + "\n".join(f"- {_cut(line)}" for line in meant)
        if len(text) <= longest:
            return text
    return text[: longest - 1] + "…"


class Outline:
    """Writes the outline, and collects the descriptions that it passes."""

    def __init__(self, root: Mapping[str, Any], deepest: int) -> None:
        self.root = root
        self.deepest = deepest
        self.descriptions: list[str] = []
        self._inside: list[int] = []

    def of(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping):
            return "anything"
        if isinstance(schema.get("$ref"), str):
            return self._reference(target_of(self.root, schema["$ref"]), depth)
        if "const" in schema or "enum" in schema:
            return _choices([schema["const"]] if "const" in schema else schema["enum"])
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            return " | ".join(dict.fromkeys(self.of(option, depth) for option in options))
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(self.of({**schema, "type": one}, depth) for one in kind)
        if kind == "object" or "properties" in schema:
            return self._object(schema, depth)
        if kind == "array" or "items" in schema or "prefixItems" in schema:
            return self._array(schema, depth)
        return _plain(schema)

    def _reference(self, target: Any, depth: int) -> str:
        if id(target) in self._inside:  # it contains itself
            title = target.get("title", "the same") if isinstance(target, Mapping) else "the same"
            return f"{{{title} again}}"
        return self.of(target, depth)

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties") or {}
        if depth >= self.deepest:
            return "{...}"
        if not properties:
            inner = schema.get(
                "additionalProperties", next(iter((schema.get("patternProperties") or {}).values()), True)
            )
            return "{}" if inner is False else f'{{"name": {self.of(inner, depth + 1)}, ...}}'
        self._inside.append(id(schema))
        required = set(schema.get("required", ()))
        parts = []
        order = [name for name in schema.get("x-order", ()) if name in properties]
        for name in dict.fromkeys([*order, *properties]):
            inner = properties[name]
            if isinstance(inner, Mapping) and inner.get("description"):
                self.descriptions.append(f"{name}: {inner['description']}")
            mark = "" if name in required else " (optional)"
            parts.append(f"{json.dumps(name, ensure_ascii=False)}: {self.of(inner, depth + 1)}{mark}")
        self._inside.pop()
        return "{" + ", ".join(parts) + "}"

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        if schema.get("prefixItems"):
            return f"[{', '.join(self.of(item, depth + 1) for item in schema['prefixItems'])}]"
        item = self.of(schema.get("items", True), depth)
        low, high = schema.get("minItems"), schema.get("maxItems")
        if low is not None and low == high:
            return f"[{item}, ...] ({low} items)" if low != 1 else f"[{item}]"
        bounds = " ".join([*([f"at least {low}"] if low else []), *([f"at most {high}"] if high is not None else [])])
        return f"[{item}, ...]" + (f" ({bounds} items)" if bounds else "")


def _plain(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    name = schema.get("format") or _NAMES.get(kind if isinstance(kind, str) else "", "anything")
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None and high is not None:
        return f"{name} from {low} to {high}"
    if low is not None or high is not None:
        return f"{name} of at least {low}" if high is None else f"{name} of at most {high}"
    pattern = schema.get("pattern")
    return f"{name} like {pattern}" if isinstance(pattern, str) and len(pattern) <= 40 else name


def _choices(values: list[Any]) -> str:
    shown = [json.dumps(value, ensure_ascii=False) for value in values[:_MOST_CHOICES]]
    return " | ".join([*shown, "..."] if len(values) > _MOST_CHOICES else shown)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_DESCRIPTION else f"{line[: _LONGEST_DESCRIPTION - 1]}…"
