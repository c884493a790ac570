"""One tool in a box, whatever it was made from: what a model is told of it, and how it is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchard.session.tools.errors import BadToolError
from orchard.session.tools.functions import Function
from orchard.session.tools.tool import schema_once, typed_arguments
from orchard.session.turn import ToolSpec

if TYPE_CHECKING:
    from orchard.session.schema import GeneratedContent, GenerationSchema

LONGEST_NAME = 128
MODES = ("allowed", "required", "disallowed")


@dataclass(frozen=True)
class Entry:
    """`call` is handed a `GeneratedContent` and may answer a coroutine; `source` is the tool as it was given."""

    spec: ToolSpec
    schema: GenerationSchema
    call: Callable[[GeneratedContent], Any]
    source: Any

    @property
    def name(self) -> str:
        return self.spec.name


def tool_of(thing: Any) -> Entry:
    """A tool from an instance of `Tool` (or one that has the same attributes), or from a function with types."""
    if isinstance(thing, Entry):
        return thing
    if isinstance(thing, type):
        hint = f"pass an instance: {thing.__name__}()"
        raise BadToolError(f"{thing.__name__} is a class, and tools are objects or functions", hint=hint)
    if hasattr(thing, "call") and (hasattr(type(thing), "arguments_schema") or hasattr(thing, "Arguments")):
        return _from_object(thing)
    if callable(thing):
        made = Function(thing)
        return _entry(made.name, made.description, made.schema, made.call, thing)
    hint = "pass a function with types, or an instance of a class derived from Tool"
    raise BadToolError(f"a {type(thing).__name__} is no tool", hint=hint)


def _from_object(tool: Any) -> Entry:
    schema = schema_once(tool)
    typed = typed_arguments(tool)
    call: Callable[[Any], Any] = (lambda content: tool.call(schema.instance(content))) if typed else tool.call
    shown = bool(getattr(tool, "includes_schema_in_instructions", True))
    return _entry(tool.name, tool.description, schema, call, tool, shown)


def _entry(
    name: str, description: str, schema: GenerationSchema, call: Callable[[Any], Any], source: Any, shown: bool = True
) -> Entry:
    if not name or len(name) > LONGEST_NAME or not name.isprintable() or name != name.strip():
        hint = f"use a short name such as get_weather, of at most {LONGEST_NAME} characters"
        raise BadToolError(f"{name!r} cannot be the name of a tool", hint=hint)
    if name in MODES:
        raise BadToolError(f"{name!r} is the name of a tool mode", hint="give the tool another name")
    return Entry(ToolSpec(name, description, _parameters(name, schema), shown), schema, call, source)


def _parameters(name: str, schema: GenerationSchema) -> dict[str, Any]:
    """The schema as a grammar holds to it (patterns from end to end), with the title and order that people read."""
    constraint = schema.constraint()
    exact = json.loads(constraint.source) if constraint.kind == "json_schema" else schema.to_dict()
    if not isinstance(exact, dict) or exact.get("type") != "object":
        hint = "use a class with fields; a single value is an object with one field"
        raise BadToolError(f"the arguments of the tool {name!r} are no object", hint=hint)
    shown = schema.to_dict()
    return {**{key: shown[key] for key in ("title", "x-order") if key in shown}, **exact}
