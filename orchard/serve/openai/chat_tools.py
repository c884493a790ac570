"""The tools of a chat, and which of them an answer may or must call."""

from __future__ import annotations

import re
from typing import Annotated, Any

from orchard.serve.bodies import one_of
from orchard.serve.errors import invalid, unsupported
from orchard.serve.openai.constraints import checked_schema
from orchard.serve.openai.fields import Exact
from orchard.serve.settings import Limits
from orchard.session.turn import ToolMode, ToolSpec

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MODES: dict[str, ToolMode] = {"auto": "allowed", "required": "required", "none": "disallowed"}


class FunctionBody(Exact):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Arguments are always held to the schema."""


class ToolBody(Exact):
    type: Annotated[str, one_of("function")]
    function: FunctionBody | None = None


class FunctionName(Exact):
    name: str


class NamedTool(Exact):
    type: Annotated[str, one_of("function")] = "function"
    function: FunctionName | None = None


class AllowedTools(Exact):
    mode: Annotated[str, one_of("auto", "required")]
    tools: list[NamedTool]


class ChoiceBody(Exact):
    type: Annotated[str, one_of("function", "allowed_tools")]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


Choice = str | ChoiceBody | None
Offer = tuple[tuple[ToolSpec, ...], ToolMode]


def tools_of(given: list[ToolBody] | None, choice: Choice, limits: Limits) -> Offer:
    """The tools that a model is shown, and whether it may, must or must not call one."""
    functions = []
    for place, tool in enumerate(given or ()):
        if tool.type != "function":
            why = f"tools of type {tool.type[:40]!r} are not known here: give functions"
            raise unsupported(f"tools.{place}.type", why)
        if tool.function is None:
            raise invalid(f"tools.{place}.function: missing: give a name and parameters", f"tools.{place}.function")
        functions.append(tool.function)
    return _chosen(_specs(functions, "tools", limits), choice)


def functions_of(given: list[FunctionBody] | None, choice: str | FunctionName | None, limits: Limits) -> Offer:
    """The same in the words of OpenAI's older form: `functions` and `function_call`."""
    specs = _specs(given or [], "functions", limits)
    if isinstance(choice, FunctionName):
        return _named(specs, choice.name, "function_call"), "required"
    if choice not in (None, "auto", "none"):
        raise invalid(f"function_call: {choice[:40]!r} is not known: use auto, none or a name", "function_call")
    return specs, MODES[choice or "auto"]


def _specs(functions: list[FunctionBody], field: str, limits: Limits) -> tuple[ToolSpec, ...]:
    if len(functions) > limits.tools:
        raise invalid(f"{field}: {len(functions)} are more than the {limits.tools} that are allowed", field)
    found: dict[str, ToolSpec] = {}
    for place, function in enumerate(functions):
        where = f"{field}.{place}.function" if field == "tools" else f"{field}.{place}"
        if not NAME.fullmatch(function.name):
            words = f"{where}.name: {function.name[:64]!r}: use 1 to 64 letters, digits, _ and -"
            raise invalid(words, f"{where}.name")
        if function.name in found:
            raise invalid(f"{where}.name: two are called {function.name!r}: give each its own name", f"{where}.name")
        schema = checked_schema(function.parameters or {}, limits, f"{where}.parameters")
        if schema.get("type", "object") != "object":
            words = f"{where}.parameters.type: arguments are an object: use the type object"
            raise invalid(words, f"{where}.parameters.type", code="invalid_schema")
        parameters = {"type": "object", "properties": {}, **schema}
        found[function.name] = ToolSpec(function.name, function.description or "", parameters)
    return tuple(found.values())


def _chosen(specs: tuple[ToolSpec, ...], choice: Choice) -> Offer:
    if choice is None:
        return specs, "allowed"
    if isinstance(choice, str):
        if choice not in MODES:
            words = f"tool_choice: {choice[:40]!r} is not known: use auto, required, none, or name a function"
            raise invalid(words, "tool_choice")
        return _if_any(specs, MODES[choice])
    if choice.type == "function" and choice.function is not None:
        return _named(specs, choice.function.name, "tool_choice"), "required"
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        return _allowed(specs, choice.allowed_tools)
    if choice.type in ("function", "allowed_tools"):
        raise invalid(f"tool_choice.{choice.type}: missing: say which", f"tool_choice.{choice.type}")
    raise unsupported("tool_choice.type", f"{choice.type[:40]!r} is not known here: use function or allowed_tools")


def _allowed(specs: tuple[ToolSpec, ...], allowed: AllowedTools) -> Offer:
    place = "tool_choice.allowed_tools"
    if allowed.mode not in ("auto", "required"):
        raise invalid(f"{place}.mode: {allowed.mode[:40]!r} is not known: use auto or required", f"{place}.mode")
    names = []
    for number, tool in enumerate(allowed.tools):
        if tool.type != "function" or tool.function is None:
            raise unsupported(f"{place}.tools.{number}", "only functions are called here: name one of the tools")
        names.append(_named(specs, tool.function.name, f"{place}.tools.{number}")[0].name)
    return _if_any(tuple(spec for spec in specs if spec.name in names), MODES[allowed.mode])


def _if_any(specs: tuple[ToolSpec, ...], mode: ToolMode) -> Offer:
    if mode == "required" and not specs:
        raise invalid("tool_choice: a call is required, and there are no tools: give tools", "tool_choice")
    return specs, mode


def _named(specs: tuple[ToolSpec, ...], name: str, param: str) -> tuple[ToolSpec, ...]:
    """A tool may have the name of a mode, so that one alone is offered in place of being named."""
    found = tuple(spec for spec in specs if spec.name == name)
    if not found:
        known = ", ".join(spec.name for spec in specs[:20]) or "none"
        raise invalid(f"{param}: there is no tool {name[:64]!r}: tools are {known}", param)
    return found
