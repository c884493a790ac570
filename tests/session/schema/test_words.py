"""The description of a schema in a prompt: short, complete where it can be, and bounded."""

from __future__ import annotations

from datetime import date
from typing import Literal

from orchard.session.schema import generable, guide, schema_for
from orchard.session.schema.words import LONGEST


@generable("A pet in the shop")
class Pet:
    name: str = guide("A funny name")
    age: int = guide("In years", range=(0, 20))
    food: Literal["fish", "hay"]
    tags: list[str] = guide(count=3)
    since: date | None
    parents: list[Pet] = guide(max_items=2)


def test_names_types_choices_bounds_and_descriptions_are_there() -> None:
    words = schema_for(Pet).for_prompt()
    outline = (
        '{"name": text, "age": whole number from 0 to 20, "food": "fish" | "hay", "tags": [text, ...] (3 items), '
        '"since": date (optional), "parents": [{Pet again}, ...] (at most 2 items)}'
    )
    assert outline in words
    for line in ("A pet in the shop", "name: A funny name", "age: In years"):
        assert f"- {line}" in words
    assert "$ref" not in words and "additionalProperties" not in words


def test_roots_that_are_no_objects() -> None:
    assert schema_for(list[int]).for_prompt().endswith("[whole number, ...]")
    assert schema_for(int | None).for_prompt().endswith("whole number | null")
    assert schema_for(tuple[int, str]).for_prompt().endswith("[whole number, text]")
    assert schema_for(dict[str, bool]).for_prompt().endswith('{"name": true or false, ...}')
    assert schema_for(Literal["a", "b"]).for_prompt().endswith('"a" | "b"')


def test_json_schemas_are_described_in_their_order() -> None:
    schema = {
        "properties": {"b": {"type": "string"}, "a": {"type": "null"}},
        "required": ["a", "b"],
        "x-order": ["a", "b"],
    }
    assert schema_for(schema).for_prompt().endswith('{"a": null, "b": text}')


def test_the_length_is_bounded() -> None:
    wide = {"type": "object", "properties": {f"field_{place}": {"type": "string"} for place in range(500)}}
    deep: dict[str, object] = {"type": "string"}
    for place in range(40):
        deep = {"type": "object", "properties": {f"level_{place}": deep, "other": deep}}
    many = {"type": "string", "enum": [f"choice {place}" for place in range(1000)]}
    told = {"type": "object", "properties": {"a": {"type": "string", "description": "words " * 1000}}}
    for schema in (wide, many, told):
        assert len(schema_for(schema).for_prompt()) <= LONGEST
    assert "words" in schema_for(told).for_prompt()
    assert len(schema_for(Pet).for_prompt(120)) <= 120
