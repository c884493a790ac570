"""Whether a value is what a JSON Schema asks for (draft 2020-12): the judge of answers, which the grammar of the engine is not.

A grammar writes properties in one order and spells numbers in one way, so text that it refuses may well be valid. This looks at
the value. Keywords that it does not know are refused when the schema is read and not ignored when an answer is judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from orchard.core.errors import ConfigError

NOTES = frozenset(("title", "description", "default", "examples", "$schema", "$id", "$comment", "format", "deprecated"))
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
}
_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
    "multipleOf": lambda value, bound: abs(value / bound - round(value / bound)) < 1e-9,
}
_SIZES: dict[str, tuple[type[Any], Callable[[int, int], bool]]] = {
    "minLength": (str, lambda size, bound: size >= bound),
    "maxLength": (str, lambda size, bound: size <= bound),
    "minItems": (list, lambda size, bound: size >= bound),
    "maxItems": (list, lambda size, bound: size <= bound),
    "minProperties": (dict, lambda size, bound: size >= bound),
    "maxProperties": (dict, lambda size, bound: size <= bound),
}
_ONE = frozenset(["items", "additionalProperties", "not", "contains", "propertyNames"])
_LISTS = frozenset(["anyOf", "oneOf", "allOf", "prefixItems"])
_MAPS = frozenset(["properties", "patternProperties", "$defs", "definitions"])
_OTHERS = frozenset(["type", "enum", "const", "required", "pattern", "uniqueItems", "$ref"])
KNOWN = NOTES | _NUMBERS.keys() | _SIZES.keys() | _ONE | _LISTS | _MAPS | _OTHERS


class Schema:
    """`allows(value)` for a value as `json.loads` gives it."""

    def __init__(self, schema: Mapping[str, Any] | bool) -> None:
        self.root = schema
        self._check(schema, "")

    def allows(self, value: Any) -> bool:
        return self._fits(value, self.root)

    def _check(self, schema: Any, pointer: str) -> None:
        """Refuse what could not be held to."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise _wrong(pointer, f"a schema is an object, not {type(schema).__name__}")
        for name, value in schema.items():
            here = f"{pointer}/{name}"
            if name not in KNOWN:
                raise _wrong(here, f"the keyword {name!r} is not known here")
            if name == "$ref":
                self._found(value, here)
            elif name == "type" and not {*([value] if isinstance(value, str) else value)} <= TYPES.keys():
                raise _wrong(here, f"no type is called {value!r}")
            elif name in ("pattern", "patternProperties"):
                _compiled([value] if name == "pattern" else value, here)
            for key, below in _below(name, value, here):
                self._check(below, key)

    def _found(self, ref: Any, pointer: str) -> Any:
        found: Any = self.root
        parts = ref.split("/") if isinstance(ref, str) else [""]
        for part in parts[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, Mapping) else None
        if parts[0] != "#" or found is None:
            raise _wrong(pointer, f"{ref!r} points to nothing in this schema")
        return found

    def _fits(self, value: Any, schema: Any) -> bool:
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and not self._fits(value, self._found(schema["$ref"], "")):
            return False
        return _fits_plain(value, schema) and self._fits_parts(value, schema) and self._fits_choices(value, schema)

    def _fits_choices(self, value: Any, schema: Mapping[str, Any]) -> bool:
        if "not" in schema and self._fits(value, schema["not"]):
            return False
        if not all(self._fits(value, each) for each in schema.get("allOf", ())):
            return False
        if "anyOf" in schema and not any(self._fits(value, each) for each in schema["anyOf"]):
            return False
        return "oneOf" not in schema or sum(self._fits(value, each) for each in schema["oneOf"]) == 1

    def _fits_parts(self, value: Any, schema: Mapping[str, Any]) -> bool:
        if isinstance(value, list):
            first = schema.get("prefixItems", [])
            rest = schema.get("items", True)
            pairs = [*zip(value, first), *((item, rest) for item in value[len(first) :])]
            contains = "contains" not in schema or any(self._fits(item, schema["contains"]) for item in value)
            return contains and all(self._fits(item, each) for item, each in pairs)
        if not isinstance(value, dict):
            return True
        for name, item in value.items():
            named = [schema["properties"][name]] if name in schema.get("properties", {}) else []
            named += [each for pattern, each in schema.get("patternProperties", {}).items() if re.search(pattern, name)]
            if not all(self._fits(item, each) for each in named or [schema.get("additionalProperties", True)]):
                return False
        return all(self._fits(name, schema.get("propertyNames", True)) for name in value)


def _fits_plain(value: Any, schema: Mapping[str, Any]) -> bool:
    """All that needs no look into other schemas."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(TYPES[kind](value) for kind in kinds):
        return False
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if TYPES["number"](value) and not all(
        fits(value, schema[name]) for name, fits in _NUMBERS.items() if name in schema
    ):
        return False
    for name, (kind, fits_size) in _SIZES.items():
        if name in schema and isinstance(value, kind) and not fits_size(len(value), schema[name]):
            return False
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if isinstance(value, list) and schema.get("uniqueItems"):
        return not any(_same(one, other) for place, one in enumerate(value) for other in value[:place])
    return not isinstance(value, dict) or all(name in value for name in schema.get("required", ()))


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: true is not 1, 1 is 1.0."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return bool(one == other)


def _below(name: str, value: Any, pointer: str) -> list[tuple[str, Any]]:
    """The schemas inside a keyword, each with where it is."""
    if name in _ONE:
        return [(pointer, value)]
    if name in _LISTS and isinstance(value, list):
        return [(f"{pointer}/{place}", each) for place, each in enumerate(value)]
    if name in _MAPS and isinstance(value, Mapping):
        return [(f"{pointer}/{key}", each) for key, each in value.items()]
    if name in _LISTS | _MAPS:
        raise _wrong(pointer, "this is neither a list nor an object of schemas")
    return []


def _compiled(patterns: Any, pointer: str) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise _wrong(pointer, f"{pattern!r} is no regular expression: {error}") from error


def _wrong(pointer: str, why: str) -> ConfigError:
    return ConfigError(f"the schema at {pointer or 'its top'}: {why}", hint="say it in another way, or leave it out")
