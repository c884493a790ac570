"""Entries are values: checked when made, equal by content, and never changed."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given

from orchard.session.errors import TranscriptError
from orchard.session.transcript import (
    Instructions,
    Prompt,
    PromptEntry,
    Reasoning,
    Response,
    ResponseFormat,
    StructureSegment,
    TextSegment,
    ToolCall,
    ToolCalls,
    ToolDefinition,
    ToolOutput,
    new_id,
)
from tests.session.transcript.documents import JSON


def test_ids_are_uuids_of_version_4() -> None:
    made = {new_id() for _ in range(200)}
    assert len(made) == 200
    form = r"[0-9A-F]{8}-[0-9A-F]{4}-4[0-9A-F]{3}-[89AB][0-9A-F]{3}-[0-9A-F]{12}"
    assert all(re.fullmatch(form, each) for each in made)
    assert Prompt("a").id != Prompt("a").id and Prompt("a", id="x").id == "x"


def test_contents_in_every_form() -> None:
    assert Prompt is PromptEntry
    one = Response("Hello.")
    assert [type(segment) for segment in one.segments] == [TextSegment] and one.text == "Hello."
    both = Response(["Here:", StructureSegment("Point", {"x": 1, "y": [True, None]})])
    assert both.text == 'Here:\n{"x":1,"y":[true,null]}' and len(both.segments) == 2
    assert Response(TextSegment("a", "1")).segments == (TextSegment("a", "1"),)
    assert Response([]).text == "" and Instructions(()).segments == ()


def test_structure_keeps_a_copy_of_its_content() -> None:
    content = {"tags": ["a"]}
    segment = StructureSegment("Tags", content)
    content["tags"].append("b")
    assert segment.content == {"tags": ["a"]} and str(segment) == '{"tags":["a"]}'


@given(JSON)
def test_any_json_may_be_content(value: Any) -> None:
    assert StructureSegment("Any", value).content == value


def test_calls_take_json_or_a_dict() -> None:
    assert ToolCall("f", {"städte": ["Köln"]}).arguments == '{"städte":["Köln"]}'
    kept = ToolCall("f", '{ "a" : 1.50 }', "7")
    assert kept.arguments == '{ "a" : 1.50 }' and kept.values == {"a": 1.5} and kept.id == "7"
    calls = ToolCalls([kept, ToolCall("g", {})])
    assert [call.name for call in calls] == ["f", "g"] and calls.text == 'f({ "a" : 1.50 })\ng({})'


def test_an_output_shares_its_call_id() -> None:
    output = ToolOutput("f", "4", "call-1")
    assert (output.id, output.call_id) == ("call-1", "call-1")
    assert ToolOutput("f", "4", "call-1", "own").id == "own"
    assert ToolOutput("f", "4").call_id


def test_entries_are_frozen_and_replaced() -> None:
    entry = Response("a", ["m"], "1", {"later": 1})
    with pytest.raises(FrozenInstanceError):
        entry.segments = ()  # type: ignore[misc]
    changed = replace(entry, segments="b")  # type: ignore[arg-type]
    assert (changed.text, changed.id, changed.assets, changed.extra) == ("b", "1", ("m",), {"later": 1})
    assert entry.text == "a" and entry != changed and {each.name for each in fields(entry)} >= {"id", "extra"}


def test_equal_by_content() -> None:
    assert Prompt(TextSegment("a", "s"), {}, id="1") == Prompt(TextSegment("a", "s"), {}, id="1")
    assert Prompt(TextSegment("a", "s"), {}, id="1") != Response(TextSegment("a", "s"), id="1")
    assert Reasoning(TextSegment("a", "s"), id="1") != Reasoning(TextSegment("a", "s"), "signed", id="1")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TextSegment(5), "TextSegment.text is of type int"),
        (lambda: TextSegment("\udfff"), "not valid Unicode"),
        (lambda: TextSegment("a", id=5), "TextSegment.id is of type int"),
        (lambda: StructureSegment("A", {1, 2}), "a set that JSON"),
        (lambda: StructureSegment("A", {"a": float("inf")}), r"StructureSegment.content.a is the number inf"),
        (lambda: StructureSegment("A", {"a": "\ud800"}), "not valid Unicode"),
        (lambda: StructureSegment(None, {}), "StructureSegment.source"),
        (lambda: Response(5), "Response is not made from a int"),
        (lambda: Response({"a": 1}), "Response is not made from a dict"),
        (lambda: Response([5]), "segment of type int"),
        (lambda: Response("a", assets="m"), "Response.assets is of type str"),
        (lambda: Response("a", assets=[1]), r"Response.assets\[0\] is of type int"),
        (lambda: Response("a", extra=[]), "Response.extra is of type list"),
        (lambda: Prompt("a", options="x"), "PromptEntry.options"),
        (lambda: Prompt("a", response_format={}), "response_format"),
        (lambda: Instructions("a", tools=["f"]), r"Instructions.tools\[0\] is of type str"),
        (lambda: ToolDefinition("f", "d", "{}"), "ToolDefinition.parameters is of type str"),
        (lambda: ResponseFormat(5, {}), "ResponseFormat.name is of type int"),
        (lambda: ToolCall("f", "not json"), "ToolCall.arguments is not JSON"),
        (lambda: ToolCall("f", "5"), "ToolCall.arguments is of type int"),
        (lambda: ToolCall("f", {"a": object()}), "ToolCall.arguments.a is a object"),
        (lambda: ToolCall(None, {}), "ToolCall.name"),
        (lambda: ToolCalls("f"), "ToolCalls.calls is of type str"),
        (lambda: ToolOutput("f", "4", call_id=4), "ToolOutput.call_id"),
        (lambda: Reasoning("a", signature=b"x"), "Reasoning.signature is of type bytes"),
    ],
)
def test_what_no_transcript_can_hold(make: Any, says: str) -> None:
    with pytest.raises(TranscriptError, match=says) as caught:
        make()
    assert caught.value.hint
