"""JSON Schemas as grammars: values that are let through, values that are not, and what is refused by name and place."""

from __future__ import annotations

import json
from itertools import islice, permutations, product
from typing import Any

import pytest

from orchard.core.errors import OrchardError
from orchard.generate.errors import UnsupportedSchema
from orchard.generate.json_schema import DEPTH, normalise, schema_grammar
from orchard.generate.json_schema.lexer import limits


class Follower:
    """Says whether a grammar accepts a text, byte by byte."""

    def __init__(self, schema: Any, **options: Any) -> None:
        from llguidance import LLMatcher, LLTokenizer

        grammar = schema_grammar(json.dumps(schema), **options)
        self.matcher = LLMatcher(LLTokenizer("byte", slices=[]), grammar, log_level=0, limits=limits())
        assert not self.matcher.is_error(), self.matcher.get_error()

    def accepts(self, text: str) -> bool:
        matcher = self.matcher.deep_copy()
        spelled = list(text.encode())
        return bool(matcher.try_consume_tokens(spelled) == len(spelled) and matcher.is_accepting())

    def lets_through(self, value: Any) -> bool:
        return any(self.accepts(text) for text in islice(spellings(value), 500))


def spellings(value: Any) -> Any:
    """Compact JSON with the keys in every order."""
    if isinstance(value, list):
        for items in product(*(list(islice(spellings(item), 24)) for item in value)):
            yield f"[{','.join(items)}]"
    elif isinstance(value, dict):
        for order in permutations(value.items()):
            for values in product(*(list(islice(spellings(item), 24)) for _, item in order)):
                pairs = zip(order, values, strict=True)
                yield "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{v}" for (k, _), v in pairs) + "}"
    else:
        yield json.dumps(value, ensure_ascii=False)


OBJECT = {"type": "object"}
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [None, True, 0, -1.5, "x", [], {}, [[1], {"a": "b"}]], []),
    ({"type": ["integer", "null"]}, [0, -7, None, 10**30], [1.5, "1", True]),
    ({"type": "number"}, [0, -0.25, 3], ["3"]),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 2}, [-1.5, 0, 1.99, -0.001], [-1.51, 2, 3, 20]),
    ({"type": "integer", "exclusiveMinimum": 7, "maximum": 1200}, [8, 99, 1200], [7, 0, -8, 1201, 10000]),
    ({"multipleOf": 0.01}, [1, 0.05, 12.34, "x"], [0.001, 1.234]),
    ({"type": "integer", "multipleOf": 7}, [0, 7, -14, 700], [1, 8, 71]),
    ({"type": "integer", "multipleOf": 25, "minimum": 30}, [50, 100, 1025], [25, 30, 60]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é€😀", 'a"\\', "\n\t\x01"], ["a", "abcd", "😀" * 4]),
    ({"type": "string", "pattern": "^a+$|b"}, ["aa", "xbx", "b"], ["ac", "", "x"]),
    ({"type": "string", "pattern": r"^\d\w\s.$"}, ["1_\u00a0x", "0a\t-"], ["٣a x", "1é x", "1a\u0085x"]),
    ({"enum": ["a", 1, None, [1, {"b": True}], {"x": 0.5}]}, ["a", 1, None, [1, {"b": True}], {"x": 0.5}], ["b", 2, [1], {}]),
    ({"const": {"b": 1, "a": 2}}, [{"a": 2, "b": 1}], [{"a": 1, "b": 2}, {"a": 2, "b": 1, "c": 0}]),
    ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "minItems": 1},
     [["a"], ["a", 1]], [[], [1], ["a", 1, 2]]),
    ({"items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3], "x"], [[1], [1, 2, 3, 4], [1, "a"]]),
    ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
     [["a", "b"], ["c", "a", "b"]], [["a"], ["a", "a"], ["a", "b", "a"]]),
    ({"contains": {"type": "integer"}, "minContains": 2, "maxContains": 3}, [[1, "a", 2], [1, 2, 3]], [[1], ["a"], [1, 2, 3, 4]]),
    ({"properties": {"a": {"type": "integer"}}, "required": ["b"], "additionalProperties": {"type": "string"}},
     [{"b": "x"}, {"a": 1, "b": "x", "c": "y"}], [{"b": 1}, {"a": "x", "b": "y"}, {}]),
    ({**OBJECT, "patternProperties": {"^n": {"type": "number"}, "e$": {"minimum": 5}}, "additionalProperties": False},
     [{"n": 1}, {"ne": 7}, {"e": 5}, {}], [{"n": "x"}, {"ne": 4}, {"x": 1}]),
    ({**OBJECT, "propertyNames": {"maxLength": 2}}, [{}, {"ab": 1}], [{"abc": 1}]),
    ({**OBJECT, "propertyNames": {"enum": ["a", "b"]}, "minProperties": 1}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"c": 1}]),
    ({**OBJECT, "properties": {"a": True, "b": True, "c": True},
      "minProperties": 2, "maxProperties": 2, "additionalProperties": False},
     [{"a": 1, "b": 2}, {"a": 1, "c": 2}, {"b": 1, "c": 2}], [{"a": 1}, {"a": 1, "b": 2, "c": 3}]),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}, {"c": 1}], [{"a": 1}]),
    ({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"minimum": 3}}, "required": ["a"]}]},
     [{"a": 3}, 1], [{"a": 2}, {}, {"a": 3.5}]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "x"], [1.5, 3]),
    ({"oneOf": [{"properties": {"k": {"const": "x"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
                {"properties": {"k": {"const": "y"}}, "required": ["k"]}]},
     [{"k": "x", "v": 1}, {"k": "y"}], [{"k": "x"}, {"k": "z"}, {}]),
    ({"not": {"type": ["string", "object"]}}, [1, None, []], ["a", {}]),
    ({"type": "string", "not": {"enum": ["no", "never"]}}, ["yes", "n", "nope", "nevermore"], ["no", "never"]),
    ({"type": "string", "not": {"pattern": "^x"}}, ["ax", ""], ["x", "xy"]),
    ({"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["a"]}, "else": {"required": ["b"]}},
     [{"k": 1, "a": 0}, {"k": 2, "b": 0}, {"b": 0}], [{"k": 1, "b": 0}, {"k": 2, "a": 0}, {}]),
    ({"$defs": {"tree": {**OBJECT, "properties": {"v": {"type": "integer"},
                                                  "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                         "required": ["v"], "additionalProperties": False}}, "$ref": "#/$defs/tree"},
     [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3}]}], [{}, {"v": 1, "kids": [{}]}, {"v": "x"}]),
    ({**OBJECT, "properties": {"a": True}, "allOf": [{"properties": {"b": True}}], "unevaluatedProperties": False},
     [{"a": 1, "b": 2}, {}], [{"c": 1}]),
    ({"anyOf": [{"properties": {"a": True}, "required": ["a"]}, {"properties": {"b": True}, "required": ["b"]}],
      "unevaluatedProperties": False},
     [{"a": 1}, {"a": 1, "b": 2}], [{}, {"a": 1, "c": 2}]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"], ["2023-02-29", "2024-13-01", "2024-1-1", "1900-02-29"]),
    ({"type": "string", "format": "date-time"},
     ["2024-02-29T23:59:59.5Z", "2024-01-01T00:00:00+05:30"], ["2024-01-01", "2024-01-01T24:00:00Z"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"type": "string", "format": "ipv6"},
     ["::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "fe80::"], ["1::2::3", "12345::", "1:2:3"]),
    ({"type": "string", "format": "email"}, ["a.b@example.com"], ["a@", "@b", "a b@c", "a..b@c"]),
    ({"type": "string", "format": "uri"}, ["https://example.com/a?b#c", "urn:a:b"], ["/a", "not a uri", "http://[::1"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=lambda value: None)
def test_values(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    follower = Follower(schema)
    assert [value for value in valid if not follower.lets_through(value)] == []
    assert [value for value in invalid if follower.lets_through(value)] == []


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"minLenght": 1}, "minLenght", ""),
        ({"properties": {"a": {"nullable": True}}}, "nullable", "/properties/a"),
        ({"items": {"type": "strin"}}, "type", "/items"),
        ({"properties": {"a/b": {"pattern": "(?!x)"}}}, "pattern", "/properties/a~1b"),
        ({"pattern": r"\bword\b"}, "pattern", ""),
        ({"format": "idn-hostname"}, "format", ""),
        ({"uniqueItems": True, "items": {"type": "string"}}, "uniqueItems", ""),
        ({"properties": {"x": {"uniqueItems": True}}}, "uniqueItems", "/properties/x"),
        ({"minProperties": 3}, "minProperties", ""),
        ({"$ref": "https://example.com/other.json"}, "$ref", ""),
        ({"$ref": "#/$defs/nothing"}, "$ref", ""),
        ({"allOf": [{"$ref": "#"}, {"minimum": 1}]}, "allOf", ""),
        ({"items": [{"type": "string"}]}, "items", ""),
        ({"required": "a"}, "required", ""),
        ({"minimum": "3"}, "minimum", ""),
        ({"maxLength": -1}, "maxLength", ""),
        ({"multipleOf": 0}, "multipleOf", ""),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$schema", ""),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [True]}, "prefixItems", ""),
        ({"not": {"multipleOf": 3}}, "not", ""),
        ({"anyOf": []}, "anyOf", ""),
        ({"properties": []}, "properties", ""),
        ({"enum": "abc"}, "enum", ""),
        ({"if": {"additionalProperties": {"type": "string"}}, "then": False}, "if", ""),
    ],
)
def test_what_cannot_be_held_to_is_refused_by_name_and_place(schema: Any, keyword: str, pointer: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        normalise(schema)
    assert (caught.value.keyword, caught.value.pointer) == (keyword, pointer)
    assert f"`{keyword}`" in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "string", "enum": [1]},
        {"minimum": 3, "maximum": 2, "type": "number"},
        {"allOf": [{"type": "null"}, {"type": "array"}]},
    ],
)
def test_contradictions_are_said_before_any_token(schema: Any) -> None:
    with pytest.raises(UnsupportedSchema, match="no value can be valid"):
        normalise(schema)


def test_a_tree_without_leaves_has_no_value_and_an_optional_one_is_left_out() -> None:
    endless = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}
    with pytest.raises(UnsupportedSchema, match="no value"):
        normalise({"$defs": {"n": endless}, "$ref": "#/$defs/n"})
    follower = Follower(
        {"$defs": {"n": endless}, "properties": {"a": {"$ref": "#/$defs/n"}, "b": True}, "type": "object"}
    )
    assert follower.accepts('{"b":1}') and not follower.accepts('{"a')


def test_numbers_that_no_digits_are_left_for_are_no_trap() -> None:
    with pytest.raises(UnsupportedSchema, match="no value"):
        normalise({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-25})
    follower = Follower({"anyOf": [{"type": "integer", "minimum": 10**350}, {"const": "x"}]})
    assert follower.accepts('"x"') and not follower.accepts("1")
    assert Follower({"const": 1e-25}).accepts(f"0.{'0' * 24}1")


def test_parts_inside_themselves_are_so_deep_and_no_deeper() -> None:
    tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}

    def nested(levels: int) -> str:
        return "[" * levels + "]" * levels

    depth = max(n for n in range(1, 12) if Follower(tree).accepts(nested(n)))
    assert depth in (DEPTH, DEPTH + 1) and not Follower(tree).accepts(nested(depth + 1))
    assert Follower({**tree, "x-depth": 20}).accepts(nested(20)) and Follower({**tree, "x-depth": 1}).accepts("[[]]")
    assert Follower({}).accepts(nested(DEPTH)) and not Follower({}).accepts(nested(DEPTH + 2))
    for wrong in (0, 65, "3", True):
        with pytest.raises(UnsupportedSchema) as caught:
            normalise({**tree, "x-depth": wrong})
        assert caught.value.keyword == "x-depth"


def test_what_only_ends_deep_down_may_go_as_deep_as_it_must() -> None:
    parts: dict[str, Any] = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}], "minItems": 1} for i in range(20)
    }
    follower = Follower({"$defs": {**parts, "d20": {"const": 0}}, "$ref": "#/$defs/d0"})
    assert follower.accepts("[" * 20 + "0" + "]" * 20)


def test_notes_are_no_constraints() -> None:
    notes = {"title": "t", "description": "d", "default": 3, "examples": [1], "$comment": "c", "deprecated": True}
    notes |= {"readOnly": True, "x-anything": [1], "contentMediaType": "text/html"}
    assert normalise(notes) == normalise({})


def test_properties_come_in_the_order_of_the_schema_or_of_x_order() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    assert Follower(schema).accepts('{"a":1,"b":2}') and not Follower(schema).accepts('{"b":2,"a":1}')
    ordered = Follower({**schema, "x-order": ["b", "a"]})
    assert ordered.accepts('{"b":2,"a":1}') and not ordered.accepts('{"a":1,"b":2}')


def test_json_is_compact_and_every_text_has_one_spelling() -> None:
    follower = Follower({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    for text in ('{ "a":"x"}', '{"a": "x"}', '{"a":"\\u0078"}', '{"a":"x","\\u0061":"y"}', '{"a":"\\/"}', '{"a":"x"} '):
        assert not follower.accepts(text), text
    assert follower.accepts('{"a":"/\\u0000\\n\\"\x7f","b":1}')


def test_a_key_cannot_come_again_under_another_spelling_or_schema() -> None:
    follower = Follower({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert follower.accepts('{"a":1,"ab":"x"}') and not follower.accepts('{"a":1,"a":"x"}')


def test_formats_can_be_read_as_notes() -> None:
    assert not Follower({"format": "date"}).lets_through("someday")
    assert Follower({"format": "date"}, formats="ignore").lets_through("someday")
    assert Follower({"type": "integer", "format": "int32"}).lets_through(2**31 - 1)
    assert not Follower({"type": "integer", "format": "int32"}).lets_through(2**31)


def test_references_by_anchor_and_address() -> None:
    schema = {
        "$id": "https://example.com/root",
        "$defs": {
            "a": {"$anchor": "here", "type": "integer"},
            "b": {"$id": "inner", "$defs": {"c": {"const": "deep"}}},
        },
        "prefixItems": [{"$ref": "#here"}, {"$ref": "inner#/$defs/c"}, {"$dynamicRef": "#here"}],
        "minItems": 3,
        "items": False,
        "type": "array",
    }
    follower = Follower(schema)
    assert follower.accepts('[1,"deep",2]') and not follower.accepts('[1,"x",2]')


@pytest.mark.parametrize(
    "schema",
    [
        {"a" * 10: 1},
        "no schema",
        {"type": "string", "pattern": "a" * 20_000},
        {"maxItems": 10**9},
        {"properties": {str(i): True for i in range(1500)}},
        {"oneOf": [{"required": [str(i)], "properties": {str(i): {"type": "integer"}}} for i in range(12)]},
        {"patternProperties": {f"^{i}": True for i in range(9)}},
        {"minimum": float("1e400")},
        {"enum": ["\ud800"]},
        {"properties": {"\udfff": True}},
    ],
)  # fmt: skip
def test_bad_and_oversized_schemas_are_typed_errors(schema: Any) -> None:
    with pytest.raises(OrchardError) as caught:
        normalise(schema)
    assert caught.value.hint


def test_deep_schemas_are_typed_errors_and_not_crashes() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(70):
        deep = {"items": deep, "type": "array"}
    with pytest.raises(UnsupportedSchema, match="deep"):
        normalise(deep)
    chain = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {"type": "integer"}}}
    with pytest.raises(UnsupportedSchema):
        normalise({**chain, "allOf": [{"$ref": "#/$defs/d0"}, {"minimum": 1}]})
