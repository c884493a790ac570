"""What the text of an answer must match: `response_format`, and the fields by which users of vLLM know the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from orchard.core.errors import OrchardError
from orchard.serve.errors import ApiError, api_error, invalid, unsupported
from orchard.serve.openai.fields import ResponseFormat, Shared
from orchard.serve.settings import Limits
from orchard.session.turn import Constraint

_INSIDE = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
"""Keywords whose values are schemas by name."""

_ANY: dict[str, Any] = {"type": "object"}


def constraint_of(body: Shared, limits: Limits) -> Constraint | None:
    """`ApiError` where there are two, or where one is larger than the limits. Whether it can be held to is found when the answer
    begins, which is still before a byte is sent."""
    if body.grammar is not None:
        raise unsupported("grammar", "grammars in GBNF cannot be read: use guided_grammar with one in Lark")
    newer = body.structured_outputs
    given: list[tuple[str, str, Any]] = [
        ("response_format", "format", body.response_format),
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    ]
    if newer is not None:
        parts = {"json": newer.json_, "regex": newer.regex, "choice": newer.choice, "grammar": newer.grammar}
        given += [(f"structured_outputs.{kind}", kind, value) for kind, value in parts.items()]
    asked = [(param, kind, value) for param, kind, value in given if value is not None]
    asked = [one for one in asked if not (one[1] == "format" and one[2].type == "text")]
    if len(asked) > 1:
        names = " and ".join(param for param, *_ in asked)
        raise invalid(f"{names} cannot both hold for one answer: leave out all but one", asked[1][0])
    return _made(*asked[0], limits) if asked else None


def _made(param: str, kind: str, value: Any, limits: Limits) -> Constraint:
    try:
        if kind == "format":
            return Constraint.json_schema(_format_schema(value, limits))
        if kind == "json":
            return Constraint.json_schema(_schema_value(value, limits, param))
        size = sum(map(len, value)) if kind == "choice" else len(value)
        if size > limits.schema_bytes:
            raise _too_large(param, size, limits)
        if kind == "choice":
            return Constraint.choices(value)
        return Constraint.regex(value) if kind == "regex" else Constraint.lark(value)
    except OrchardError as error:
        found = api_error(error)
        raise ApiError(found.status, found.code, f"{param}: {found.message}", param=param) from error


def _format_schema(asked: ResponseFormat, limits: Limits) -> Mapping[str, Any]:
    if asked.type == "json_object":
        return checked_schema(_ANY if asked.schema_ is None else asked.schema_, limits, "response_format.schema")
    if asked.type != "json_schema":
        words = f"{asked.type[:40]!r} is not known: use text, json_object or json_schema"
        raise invalid(f"response_format.type: {words}", "response_format.type")
    if asked.json_schema is None:
        words = "response_format.json_schema: missing: give an object with a name and a schema"
        raise invalid(words, "response_format.json_schema")
    schema = asked.json_schema.schema_
    return checked_schema(_ANY if schema is None else schema, limits, "response_format.json_schema.schema")


def _schema_value(value: Any, limits: Limits, param: str) -> Any:
    if isinstance(value, str):
        try:
            value = from_json(value)
        except ValueError:
            raise invalid(f"{param}: the text is no JSON: give a JSON Schema", param, code="invalid_schema") from None
    if not isinstance(value, dict | bool):
        raise invalid(f"{param}: a JSON Schema is an object", param, code="invalid_schema")
    return checked_schema(value, limits, param) if isinstance(value, dict) else value


def checked_schema(schema: dict[str, Any], limits: Limits, param: str) -> dict[str, Any]:
    """The same schema, where it is within the limits and looks like one."""
    depth = 0
    level: list[Any] = [schema]
    while level:
        depth += 1
        if depth > limits.schema_depth:
            words = f"{param}: more than {limits.schema_depth} levels deep: make it flatter, or use $defs"
            raise invalid(words, param, code="invalid_schema")
        below = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
        level = [part for part in below if isinstance(part, dict | list)]
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except ValueError:
        raise invalid(f"{param}: holds a number that JSON cannot write", param, code="invalid_schema") from None
    if size > limits.schema_bytes:
        raise _too_large(param, size, limits)
    _look(schema, param)
    return schema


def _look(schema: Any, place: str) -> None:
    """Keywords of the wrong type, by their place: models are shown the words of schemas before anything is made of them."""
    if not isinstance(schema, dict):
        return
    kinds: dict[str, Any] = {"description": str, "enum": list, "required": list, "type": str | list}
    kinds |= dict.fromkeys(_INSIDE, dict)
    for word, kind in kinds.items():
        if word in schema and not isinstance(schema[word], kind):
            raise invalid(f"{place}.{word}: of the wrong type", f"{place}.{word}", code="invalid_schema")
    for word in ("required", "type"):
        if isinstance(schema.get(word), list) and not all(isinstance(item, str) for item in schema[word]):
            raise invalid(f"{place}.{word}: holds something that is no text", f"{place}.{word}", code="invalid_schema")
    for word in _INSIDE:
        for name, part in schema.get(word, {}).items():
            _look(part, f"{place}.{word}.{name[:40]}")
    for word in ("items", "additionalProperties", "not", "if", "then", "else", "contains"):
        _look(schema.get(word), f"{place}.{word}")
    for word in ("anyOf", "oneOf", "allOf", "prefixItems"):
        parts = schema.get(word)
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            _look(part, f"{place}.{word}.{number}")


def _too_large(param: str, size: int, limits: Limits) -> ApiError:
    words = f"{param}: {size:,} characters are more than the {limits.schema_bytes:,} that are allowed"
    return invalid(words, param, code="invalid_schema")
