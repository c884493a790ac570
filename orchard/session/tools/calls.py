"""The grammar of tool calls: only names of tools that are there, and arguments that match their schemas.

Text before the arguments is fixed once the name is, so it costs no run of the model. Every tool's schema stays a document of
its own inside the grammar: its references mean what they meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from orchard.generate.constraint import Constraint
from orchard.session.tools.formats import Written
from orchard.session.turn import ToolSpec

MOST_CALLS = 8
"""Calls in one answer."""
MOST_TOKENS = 2048
"""Of all calls in one answer, where the caller gives no limit."""
LONGEST_TEXT = 1000
"""Characters of an argument whose schema gives no limit: a small model may never find the end of a text by itself."""
MOST_ITEMS = 64
MOST_FIELDS = 16
"""Fields of an object whose schema names none."""
_DEEPEST = 2
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/|[A-Za-z_]\w*')
_DEFINED = re.compile(r"^([A-Za-z_]\w*)(?:::\w+)?\s*:", re.MULTILINE)
_TEXT_LIMITS = ("maxLength", "pattern", "format", "enum", "const")
_ITEM_LIMITS = ("maxItems", "enum", "const")
_FIELD_LIMITS = ("maxProperties", "patternProperties", "propertyNames", "enum", "const", "unevaluatedProperties")
_PARTS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "then", "else")
_TURNED = frozenset({"not", "if", "oneOf"})
"""Where a narrower part makes the whole wider."""


def calls_constraint(written: Written, tools: Sequence[ToolSpec], *, parallel: bool) -> Constraint:
    """One call of one of these tools, or with `parallel` up to `MOST_CALLS`, each on a line of its own."""
    key = tuple((tool.name, json.dumps(dict(tool.parameters))) for tool in tools)
    return _constraint(written, key, parallel)


@lru_cache(maxsize=64)
def _constraint(written: Written, tools: tuple[tuple[str, str], ...], parallel: bool) -> Constraint:
    more = f' ("\\n" call){{0,{MOST_CALLS - 1}}}' if parallel else ""
    rules = [f"start: call{more}", "call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
    for place, (name, parameters) in enumerate(tools):
        head = f'{written.before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{written.arguments}": '
        tail = "}" + written.after
        rules.append(f"call_{place}: {_quoted(head)} arguments_{place} {_quoted(tail)}")
        rules.append(_arguments(parameters, f"arguments_{place}"))
    return Constraint.lark("\n".join(rules) + "\n")


def _arguments(parameters: str, name: str) -> str:
    """The grammar of a schema as a part of another: its rules get names of their own, and its JSON a space after commas and
    colons, which small models are used to (they choose arguments better so, see docs/log.md)."""
    from orchard.generate.json_schema import schema_grammar

    grammar = schema_grammar(json.dumps(bounded(json.loads(parameters)), ensure_ascii=False))
    # The dialect tells rules from terminals by their first letter.
    names = {one: f"{name if one[0].islower() else name.upper()}_{one}" for one in _DEFINED.findall(grammar)}
    names["start"] = name
    lines: list[str] = []
    in_rule = True
    for line in grammar.splitlines():
        in_rule = in_rule if line[:1].isspace() else line[:1].islower()  # an indented line goes on with the one above
        spaced = _spaced if in_rule else str
        lines.append(_TOKEN.sub(lambda found: names.get(found[0]) or spaced(found[0]), line))  # noqa: B023
    return "\n".join(lines)


def _spaced(token: str) -> str:
    """A text of a rule with a space after the comma that it begins with and after the colon of the key that it ends with."""
    if not token.startswith('"'):
        return token
    text = re.sub(r'^",', '", ', token)
    return re.sub(r':"$', ': "', text) if text == '":"' or text.endswith('\\":"') else text


def bounded(schema: Any) -> Any:
    """The schema with limits where it has none, so that every value comes to an end. What it allows, the schema allows too; so
    one in which narrower parts could allow more is left as it is."""
    return schema if _turned(schema) else _bounded(schema)


def _turned(schema: Any) -> bool:
    """Whether such a part is anywhere in it; also where a property only has that name, which does no harm."""
    if isinstance(schema, Mapping):
        return not _TURNED.isdisjoint(schema) or any(map(_turned, schema.values()))
    return isinstance(schema, list) and any(map(_turned, schema))


def _bounded(schema: Any) -> Any:
    if schema is True or schema == {}:
        return _anything(_DEEPEST)
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in _PARTS:
        if isinstance(made.get(key), Mapping):
            made[key] = {name: _bounded(part) for name, part in made[key].items()}
    for key in _LISTS:
        if isinstance(made.get(key), list):
            made[key] = [_bounded(part) for part in made[key]]
    for key in _SINGLE:
        if isinstance(made.get(key), Mapping):
            made[key] = _bounded(made[key])
    kind = made.get("type")
    if kind == "string" and not any(key in made for key in _TEXT_LIMITS):
        made["maxLength"] = max(LONGEST_TEXT, made.get("minLength", 0))
    elif kind == "array" and not any(key in made for key in _ITEM_LIMITS):
        made["maxItems"] = max(MOST_ITEMS, made.get("minItems", 0))
        if "items" not in made and "prefixItems" not in made:
            made["items"] = _anything(_DEEPEST)
    elif kind == "object" and not any(key in made for key in _FIELD_LIMITS):
        made |= _other_fields(made)
    return made


def _other_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Of an object. Fields that a schema neither names nor speaks of are not made up."""
    named = len(schema.get("properties", ()))
    others = schema.get("additionalProperties", not named)
    if others is False:
        return {"additionalProperties": False}
    most = max(named + MOST_FIELDS, schema.get("minProperties", 0))
    return {"additionalProperties": _anything(_DEEPEST) if others is True else others, "maxProperties": most}


def _anything(depth: int) -> dict[str, Any]:
    """Any JSON value up to a depth."""
    inner = [] if not depth else [{"type": "array", "items": _anything(depth - 1), "maxItems": MOST_FIELDS}]
    inner += (
        []
        if not depth
        else [{"type": "object", "additionalProperties": _anything(depth - 1), "maxProperties": MOST_FIELDS}]
    )
    text = {"type": "string", "maxLength": LONGEST_TEXT}
    return {"anyOf": [text, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, *inner]}


def _quoted(text: str) -> str:
    """A text as the grammar's dialect writes it."""
    return json.dumps(text, ensure_ascii=False)
