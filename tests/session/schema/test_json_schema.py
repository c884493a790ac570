"""JSON Schemas that come as dicts: kept as they are, ordered, checked, and taken into other schemas."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from orchard.session.errors import DecodingFailureError, InvalidGenerationSchemaError
from orchard.session.schema import GenerationSchema, Property, schema_for
from orchard.session.schema.check import check
from tests.session.schema.enforced import accepts, compiles

TREE: dict[str, Any] = {
    "title": "Tree",
    "type": "object",
    "properties": {
        "kids": {"type": "array", "items": {"$ref": "#"}},
        "title": {"type": "string", "title": "A title"},
        "leaf": {"$ref": "#/$defs/Leaf"},
    },
    "required": ["title"],
    "additionalProperties": False,
    "x-order": ["title", "leaf", "kids"],
    "$defs": {"Leaf": {"title": "Leaf", "type": "object", "properties": {"b": {}, "a": {}}, "x-order": ["a", "b"]}},
}


def test_a_dict_is_kept_as_it_is() -> None:
    schema = schema_for(TREE)
    assert schema.to_dict() == TREE and schema.to_dict() is not TREE
    assert schema.name == "Tree"
    content = schema.read('{"title":"t","kids":[{"title":"u"}]}')
    assert schema.instance(content) is content


def test_x_order_is_the_order_of_the_answer() -> None:
    source = json.loads(schema_for(TREE).constraint().source)
    assert list(source["properties"]) == ["title", "leaf", "kids"]
    assert list(source["$defs"]["Leaf"]["properties"]) == ["a", "b"]
    assert "x-order" not in source and "title" not in source
    assert "title" in source["properties"] and "title" not in source["properties"]["title"]
    assert accepts(schema_for(TREE), '{"title":"t","leaf":{"a":1,"b":2},"kids":[]}')
    assert not accepts(schema_for(TREE), '{"kids":[],"title":"t"}')


def test_a_dict_inside_another_schema_keeps_its_references() -> None:
    schema = GenerationSchema("Wood", properties=[Property("one", TREE), Property("many", list[str])])
    assert compiles(schema)
    assert schema.to_dict()["$defs"]["Tree"]["properties"]["leaf"] == {"$ref": "#/$defs/Tree/$defs/Leaf"}
    assert accepts(schema, '{"one":{"title":"t","leaf":{"a":1},"kids":[{"title":"u"}]},"many":[]}')
    assert not accepts(schema, '{"one":{"title":"t","kids":[{}]},"many":[]}')


@dataclass
class Note:
    text: str


def test_a_schema_inside_another() -> None:
    schema = GenerationSchema("Book", properties=[Property("first", schema_for(Note)), Property("rest", list[Note])])
    content = schema.read('{"first":{"text":"a"},"rest":[{"text":"b"}]}')
    assert schema.values(content) == {"first": Note("a"), "rest": [Note("b")]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": {1, 2}},
        {"minimum": float("nan")},
        {"properties": []},
        {"required": "a"},
        {"x-order": {}},
        {"a": object},
    ],
    ids=str,
)
def test_a_dict_that_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidGenerationSchemaError) as caught:
        schema_for(schema)
    assert caught.value.hint


GOOD_AND_BAD: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "integer"}, [1, 2.0], [1.5, "1", True]),
    ({"type": ["string", "null"]}, ["a", None], [1]),
    ({"const": {"a": 1}}, [{"a": 1}], [{"a": True}, {"a": 2}]),
    ({"enum": [1, "a", None]}, [1, None], [True, "b"]),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 2}, [2, 1.5], [1, 2.5]),
    ({"type": "integer", "multipleOf": 3}, [9], [10]),
    ({"type": "string", "minLength": 2, "maxLength": 3, "pattern": "b"}, ["ab", "abc"], ["b", "aaa", "abcd"]),
    ({"type": "array", "prefixItems": [{"type": "string"}], "items": False}, [["a"], []], [["a", 1], [1]]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1]], [[], ["a"], [1, 2, 3]]),
    ({"required": ["a"], "properties": {"a": {"type": "null"}}}, [{"a": None, "b": 1}], [{}, {"a": 1}]),
    ({"additionalProperties": {"type": "string"}}, [{"a": "b"}], [{"a": 1}]),
    (
        {"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False},
        [{"ab": None}],
        [{"b": None}, {"a": 1}],
    ),
    ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, ["a", 4], [2]),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [2]),
    ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1, 2], [0, 3]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, [None], [1]),
    (
        {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        [{"next": {"next": {}}}],
        [{"next": {"a": 1}}],
    ),
    ({"minProperties": 1, "maxProperties": 1}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
    ({"pattern": "(?<broken"}, ["anything"], []),
]


@pytest.mark.parametrize("schema, good, bad", GOOD_AND_BAD, ids=[str(case[0]) for case in GOOD_AND_BAD])
def test_answers_are_checked_against_the_schema(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check(schema, value)
    for value in bad:
        with pytest.raises(DecodingFailureError):
            check(schema, value)


def test_the_error_says_where_it_went_wrong() -> None:
    with pytest.raises(DecodingFailureError, match=r"kids\[1\]\.title"):
        schema_for(TREE).read('{"title":"t","kids":[{"title":"u"},{"title":3}]}')
