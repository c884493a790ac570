"""Does a JSON value match a schema? For answers of models that are not held to it by a grammar.

The keywords are those that this package writes, and the common ones of JSON Schema. What is not looked at here (a format, a
condition) is never a reason to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from orchard.session.schema.errors import mismatch
from orchard.session.schema.shapes import json_kind

_DEEPEST = 400


def check(schema: Mapping[str, Any], value: Any) -> None:
    """Raise `UnreadableContentError` for the first thing that does not match."""
    for at, wanted, wrong in _mismatches(schema, value, "", schema, 0):
        raise mismatch(at, wanted, wrong)


Mismatches = Iterator[tuple[str, str, Any]]


def _mismatches(schema: Any, value: Any, at: str, root: Mapping[str, Any], depth: int) -> Mismatches:
    if schema is False:
        yield at, "left out", value
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    if isinstance(schema.get("$ref"), str):
        yield from _mismatches(target_of(root, schema["$ref"]), value, at, root, depth + 1)
    kinds = schema.get("type")
    wanted = [kinds] if isinstance(kinds, str) else kinds or []
    if wanted and not any(_is(value, kind) for kind in wanted):
        yield at, " or ".join(wanted), value
        return
    if "enum" in schema and not any(_same(value, choice) for choice in schema["enum"]):
        yield at, "one of " + ", ".join(json.dumps(choice, ensure_ascii=False) for choice in schema["enum"][:12]), value
    if "const" in schema and not _same(value, schema["const"]):
        yield at, json.dumps(schema["const"], ensure_ascii=False), value
    kind = json_kind(value)
    if kind == "number":
        yield from _number(schema, value, at)
    elif kind == "string":
        yield from _text(schema, value, at)
    elif kind == "array":
        yield from _array(schema, value, at, root, depth)
    elif kind == "object":
        yield from _object(schema, value, at, root, depth)
    yield from _joined(schema, value, at, root, depth)


def _joined(schema: Mapping[str, Any], value: Any, at: str, root: Mapping[str, Any], depth: int) -> Mismatches:
    for part in schema.get("allOf", ()):
        yield from _mismatches(part, value, at, root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if options and not any(_matches(option, value, root, depth) for option in options):
            yield at, "one of the kinds that the schema allows", value


def _matches(schema: Any, value: Any, root: Mapping[str, Any], depth: int) -> bool:
    return next(_mismatches(schema, value, "", root, depth + 1), None) is None


def _number(schema: Mapping[str, Any], value: Any, at: str) -> Mismatches:
    for keyword, holds, words in (
        ("minimum", lambda bound: value >= bound, "at least"),
        ("maximum", lambda bound: value <= bound, "at most"),
        ("exclusiveMinimum", lambda bound: value > bound, "above"),
        ("exclusiveMaximum", lambda bound: value < bound, "below"),
    ):
        bound = schema.get(keyword)
        if isinstance(bound, (int, float)) and not isinstance(bound, bool) and not holds(bound):
            yield at, f"{words} {bound}", value
    step = schema.get("multipleOf")
    if isinstance(step, int) and isinstance(value, int) and step > 0 and value % step:
        yield at, f"a multiple of {step}", value


def _text(schema: Mapping[str, Any], value: str, at: str) -> Mismatches:
    if len(value) < schema.get("minLength", 0):
        yield at, f"at least {schema['minLength']} characters long", value
    if len(value) > schema.get("maxLength", len(value)):
        yield at, f"at most {schema['maxLength']} characters long", value
    pattern = _compiled(schema["pattern"]) if isinstance(schema.get("pattern"), str) else None
    if pattern is not None and not pattern.search(value):
        yield at, f"a text that matches {schema['pattern']}", value


def _array(schema: Mapping[str, Any], value: list[Any], at: str, root: Mapping[str, Any], depth: int) -> Mismatches:
    if len(value) < schema.get("minItems", 0):
        yield at, f"a list of at least {schema['minItems']}", value
    if len(value) > schema.get("maxItems", len(value)):
        yield at, f"a list of at most {schema['maxItems']}", value
    first = schema.get("prefixItems", ())
    for place, item in enumerate(value):
        inner = first[place] if place < len(first) else schema.get("items", True)
        yield from _mismatches(inner, item, f"{at}[{place}]", root, depth + 1)


def _object(
    schema: Mapping[str, Any], value: dict[str, Any], at: str, root: Mapping[str, Any], depth: int
) -> Mismatches:
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{at}.{key}" if at else str(key), "there", None
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
        yield at, "an object with another number of properties", value
    named = schema.get("properties", {})
    patterns = {_compiled(text): inner for text, inner in schema.get("patternProperties", {}).items()}
    for key, item in value.items():
        where = f"{at}.{key}" if at else key
        inners = [named[key]] if key in named else []
        inners += [inner for pattern, inner in patterns.items() if pattern is None or pattern.search(key)]
        for inner in inners or [schema.get("additionalProperties", True)]:
            yield from _mismatches(inner, item, where, root, depth + 1)


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return whole and not isinstance(value, bool)
    return json_kind(value) == kind


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON, where true is not 1."""
    if json_kind(one) != json_kind(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(item, other[key]) for key, item in one.items())
    return one == other


def target_of(root: Any, pointer: str) -> Any:
    found = root
    for part in pointer.lstrip("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return True
    return found


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error:  # of a dialect that Python does not speak
        return None
