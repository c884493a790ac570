"""What holds for tools, stop strings and numbers of a request, whatever the protocol. Each check raises an `ApiError` that names
the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchard.core.errors import OrchardError
from orchard.serve.errors import api_error, invalid
from orchard.serve.openai.constraints import checked_schema
from orchard.serve.settings import Limits
from orchard.session.turn import Constraint, Sampling, ToolSpec

NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


def tool_spec(name: str, description: str | None, schema: Any, limits: Limits, param: str) -> ToolSpec:
    """`param`: the field of the schema, which is one of an object."""
    if not isinstance(schema, dict):
        raise invalid(f"{param}: give a JSON Schema of an object", param, code="invalid_schema")
    known = checked_schema(schema, limits, param)
    if known.get("type", "object") != "object":
        words = f'{param}: a tool takes an object: give a schema with "type": "object"'
        raise invalid(words, param, code="invalid_schema")
    return ToolSpec(name, description or "", {"type": "object", "properties": {}, **known})


def check_names(names: Sequence[str], limits: Limits, param: str) -> None:
    """The names of a request's tools."""
    if len(names) > limits.tools:
        raise invalid(f"{param}: {len(names)} tools are more than {limits.tools}: send fewer", param)
    seen: set[str] = set()
    for place, name in enumerate(names):
        at = f"{param}.{place}.name"
        if not NAME.fullmatch(name):
            words = f"{at}: {name[:80]!r} is no name of a tool: use up to 128 letters, digits, '_' and '-'"
            raise invalid(words, at)
        if name in seen:
            raise invalid(f"{at}: there are two tools called {name!r}: give each a name of its own", at)
        seen.add(name)


def named_tool(tools: Sequence[ToolSpec], name: str | None, param: str) -> tuple[ToolSpec, ...]:
    """The one tool that must be called. It is offered alone, and required: its name may be that of a mode."""
    found = tuple(tool for tool in tools if tool.name == name)
    if not found:
        known = ", ".join(tool.name for tool in tools[:8]) or "none"
        raise invalid(f"{param}: there is no tool {(name or '')[:80]!r}: known are {known}", param)
    return found


def check_stops(stops: Sequence[str], limits: Limits, param: str) -> tuple[str, ...]:
    if len(stops) > limits.stops:
        raise invalid(f"{param}: {len(stops)} stop strings are more than {limits.stops}: send fewer", param)
    for place, stop in enumerate(stops):
        if not stop or len(stop) > limits.stop_chars:
            words = f"{param}.{place}: a stop string has 1 to {limits.stop_chars} characters, not {len(stop)}"
            raise invalid(words, f"{param}.{place}")
    return tuple(stops)


def sampling_of(temperature: float | None, top_p: float | None, top_k: int | None = None) -> Sampling:
    """The protocols draw at temperature 1 where nothing is said. A `top_p` of 0 leaves one token, a `top_k` of 0 all."""
    if top_p == 0:
        top_p, top_k = None, 1
    try:
        return Sampling(temperature=1.0 if temperature is None else temperature, top_p=top_p, top_k=top_k or None)
    except OrchardError as error:
        raise api_error(error) from None


def json_constraint(schema: Any, limits: Limits, param: str) -> Constraint:
    if not isinstance(schema, Mapping):
        raise invalid(f"{param}: missing: give a JSON Schema", param, code="invalid_schema")
    try:
        return Constraint.json_schema(checked_schema(dict(schema), limits, param))
    except OrchardError as error:
        raise api_error(error) from None
