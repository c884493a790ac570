"""Tools that are classes, as the SDK has them: checked when an instance is made, called with typed arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import orchard.session.schema as schema
from orchard.session.tools import BadToolError, Tool, ToolBox, tool_of


@schema.generable("Parameters")
class Params:
    a: float = schema.guide("First number")
    op: str = schema.guide("What to do", anyOf=["add", "halve"])


class Calculator(Tool):
    name = "calculator"
    description = "Calculates"
    reads = 0

    @property
    def arguments_schema(self) -> schema.GenerationSchema:
        Calculator.reads += 1
        return Params.generation_schema()  # type: ignore[attr-defined, no-any-return]

    async def call(self, args: schema.GeneratedContent) -> str:
        a = args.value(float, for_property="a")
        return str(a / 2 if args.value(str, for_property="op") == "halve" else a)


def test_a_tool_of_the_sdk() -> None:
    box = ToolBox([Calculator()])
    spec = box.specs()[0]
    assert (spec.name, spec.description, spec.in_prompt) == ("calculator", "Calculates", True)
    assert spec.parameters["properties"]["op"]["enum"] == ["add", "halve"]
    assert box.call("calculator", '{"a": 5, "op": "halve"}').content == "2.5"
    assert box.call("calculator", '{"a": 5, "op": "drop"}').error is not None


def test_the_schema_is_read_once() -> None:
    before = Calculator.reads
    box = ToolBox([Calculator()])
    box.call("calculator", '{"a": 5, "op": "add"}')
    assert Calculator.reads == before + 1


def variant(**changes: Any) -> type[Tool]:
    body = {"name": "t", "description": "d", "arguments_schema": Calculator.arguments_schema, "call": Calculator.call}
    body |= changes
    return type("Variant", (Tool,), {key: value for key, value in body.items() if value is not ...})


def sync_call(self: Any, args: Any) -> str:
    return ""


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"name": ...}, AssertionError),
        ({"description": ...}, AssertionError),
        ({"name": 3}, TypeError),
        ({"description": None}, TypeError),
        ({"arguments_schema": ...}, TypeError),
        ({"call": ...}, TypeError),
        ({"call": sync_call}, TypeError),
        ({"arguments_schema": property(lambda self: {"type": "object"})}, TypeError),
    ],
)
def test_a_wrong_class_is_found_when_an_instance_is_made(changes: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        variant(**changes)()
    variant()()


def test_a_class_is_no_tool_but_its_instance_is() -> None:
    with pytest.raises(BadToolError, match="class") as caught:
        tool_of(Calculator)
    assert "Calculator()" in caught.value.hint


def test_a_tool_that_forgot_its_base_is_checked_when_used() -> None:
    class Forgetful(Calculator):
        name = "forgetful"

        def __init__(self) -> None:
            self.ready = True

    assert ToolBox([Forgetful()]).call("forgetful", '{"a": 4, "op": "halve"}').content == "2.0"


class Weather(Tool):
    name = "weather"
    description = "The weather"
    includes_schema_in_instructions = False

    @dataclasses.dataclass
    class Arguments:
        city: str
        days: int = 1

    def call(self, arguments: Arguments) -> dict[str, Any]:
        return {"city": arguments.city, "days": arguments.days, "kind": type(arguments).__name__}


def test_typed_arguments_sync() -> None:
    box = ToolBox([Weather()])
    assert box.specs()[0].in_prompt is False
    assert box.call("weather", '{"city": "Oslo"}').value == {"city": "Oslo", "days": 1, "kind": "Arguments"}


def test_typed_arguments_async_inherited_and_without_the_base() -> None:
    class Later(Weather):
        name = "later"

        async def call(self, arguments: Any) -> str:  # type: ignore[override]
            return f"{arguments.city} later"

    class Plain:
        name = "plain"
        description = "No base class"
        Arguments = Weather.Arguments

        def call(self, arguments: Any) -> int:
            return int(arguments.days)

    box = ToolBox([Later(), Plain()])
    assert box.call("later", '{"city": "Oslo"}').content == "Oslo later"
    assert box.call("plain", '{"city": "Oslo", "days": 3}').value == 3


def test_arguments_that_are_no_object_are_refused() -> None:
    class Single(Tool):
        name = "single"
        description = "One number"

        @property
        def arguments_schema(self) -> schema.GenerationSchema:
            return schema.schema_for(list[int])

        async def call(self, args: Any) -> str:
            return ""

    with pytest.raises(BadToolError, match="no object"):
        ToolBox([Single()])
