"""A JSON Schema that came as a dict: kept as it is, but for the order of its properties (`x-order`) and, where it becomes
part of another schema, the places that its references point to."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchard.session.errors import InvalidGenerationSchemaError
from orchard.session.schema.shapes import ALL_KINDS, Anything

if TYPE_CHECKING:
    from orchard.session.schema.book import Book

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas by name."""
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "additionalItems",
    "unevaluatedItems",
    "unevaluatedProperties",
)


class JsonSchema(Anything):
    """Any JSON that a given schema allows."""

    def __init__(self, schema: Mapping[str, Any], name: str | None = None) -> None:
        self.given = _checked(schema)
        title = self.given.get("title")
        self.name = name or (title if isinstance(title, str) and title else "Response")
        kinds = self.given.get("type")
        named = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
        self.kinds = frozenset("number" if kind == "integer" else kind for kind in named) & ALL_KINDS or ALL_KINDS

    def schema(self, book: Book) -> dict[str, Any]:
        """Small and without references of its own: in place; otherwise a definition, for its references to point into."""
        return self.definition(book, "") if '"$ref"' not in json.dumps(self.given) else book.refer(self)

    def definition(self, book: Book, at: str) -> dict[str, Any]:
        moved = self.given if at in ("", "#") else rewritten(self.given, lambda schema: _moved(schema, at))
        return rewritten(moved, _for_a_grammar) if book.exact else copy.deepcopy(moved)


def _checked(schema: Any) -> dict[str, Any]:
    try:
        plain = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        message = f"this JSON Schema is not JSON: {error}"
        raise InvalidGenerationSchemaError(
            message, hint="use dicts, lists, texts, finite numbers and booleans"
        ) from error
    if not isinstance(plain, dict):
        raise InvalidGenerationSchemaError(
            f"a JSON Schema is an object, not {schema!r}", hint='such as {"type": "string"}'
        )
    for keyword, kind in (("properties", dict), ("$defs", dict), ("required", list), ("x-order", list)):
        if keyword in plain and not isinstance(plain[keyword], kind):
            raise InvalidGenerationSchemaError(
                f"{keyword} of this JSON Schema is {plain[keyword]!r}",
                hint=f"use {'an object' if kind is dict else 'a list'}",
            )
    return plain


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of a schema with a change made to it and to every schema inside; what only looks like one (a default, a choice) is
    left alone."""
    if not isinstance(schema, dict):
        return copy.deepcopy(schema)
    out = dict(schema)
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            out[keyword] = {name: rewritten(inner, change) for name, inner in value.items()}
        elif keyword in _LISTED and isinstance(value, list):
            out[keyword] = [rewritten(inner, change) for inner in value]
        elif keyword in _SINGLE:
            out[keyword] = rewritten(value, change) if isinstance(value, dict) else copy.deepcopy(value)
        else:
            out[keyword] = copy.deepcopy(value)
    return change(out)


def _for_a_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    order = schema.pop("x-order", None)
    schema.pop("title", None)
    properties = schema.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        first = [name for name in order if isinstance(name, str) and name in properties]
        rest = [name for name in properties if name not in first]
        schema["properties"] = {name: properties[name] for name in dict.fromkeys([*first, *rest])}
    return schema


def _moved(schema: dict[str, Any], at: str) -> dict[str, Any]:
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        schema["$ref"] = at if target == "#" else f"{at}{target[1:]}"
    return schema


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without what no grammar can hold an answer to, for types whose own validator looks at the answer anyway."""

    def change(one: dict[str, Any]) -> dict[str, Any]:
        one.pop("uniqueItems", None)
        for keyword in ("format", "pattern"):
            if keyword in one and (one.get("type") != "string" or why_not({"type": "string", keyword: one[keyword]})):
                del one[keyword]
        return one

    return rewritten(schema, change)


def why_not(schema: Mapping[str, Any]) -> str:
    """Why no answer can be held to a small schema; empty where one can."""
    return _why_not(json.dumps(schema))


@lru_cache(maxsize=512)
def _why_not(source: str) -> str:
    from orchard.generate.errors import UnsupportedSchema
    from orchard.generate.json_schema import normalise

    try:
        normalise(json.loads(source))
    except UnsupportedSchema as error:
        return error.message.partition("schema: ")[2] or error.message
    return ""
