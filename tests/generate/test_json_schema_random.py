"""Random schemas and values: a grammar lets a value through exactly where a plain checker, which knows nothing of grammars,
finds it valid. And whatever is generated at random from a grammar is valid."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchard.generate.constraint import Constraint
from orchard.generate.errors import UnsupportedSchema
from orchard.generate.grammar import grammar_for
from orchard.generate.json_schema.formats import FORMATS, format_strings
from orchard.generate.json_schema.numbers import Numbers, Unsayable, decimal
from orchard.generate.protocol import State
from orchard.text.tokenizer import Tokenizer
from tests.generate.test_json_schema import Follower

KINDS = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def same(a: Any, b: Any) -> bool:
    """Equality of JSON, where true is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def valid(schema: Any, v: Any, root: Any) -> bool:
    """The rules of the draft, one line each."""
    if isinstance(schema, bool):
        return schema
    number, text, items, thing = KINDS["number"](v), isinstance(v, str), isinstance(v, list), isinstance(v, dict)
    s = schema
    known = s.get("properties", {})
    patterns = s.get("patternProperties", {})
    rest = [k for k in v if k not in known and not any(re.search(p, k) for p in patterns)] if thing else []
    prefix = s.get("prefixItems", [])
    checks = {
        "$ref": lambda: valid(root["$defs"][s["$ref"].rpartition("/")[2]], v, root),
        "type": lambda: any(KINDS[t](v) for t in ([s["type"]] if isinstance(s["type"], str) else s["type"])),
        "const": lambda: same(s["const"], v),
        "enum": lambda: any(same(one, v) for one in s["enum"]),
        "minimum": lambda: not number or v >= s["minimum"],
        "maximum": lambda: not number or v <= s["maximum"],
        "exclusiveMinimum": lambda: not number or v > s["exclusiveMinimum"],
        "exclusiveMaximum": lambda: not number or v < s["exclusiveMaximum"],
        "multipleOf": lambda: not number or v % s["multipleOf"] == 0,
        "minLength": lambda: not text or len(v) >= s["minLength"],
        "maxLength": lambda: not text or len(v) <= s["maxLength"],
        "pattern": lambda: not text or re.search(s["pattern"], v) is not None,
        "prefixItems": lambda: not items or all(valid(p, i, root) for p, i in zip(prefix, v, strict=False)),
        "items": lambda: not items or all(valid(s["items"], i, root) for i in v[len(prefix) :]),
        "minItems": lambda: not items or len(v) >= s["minItems"],
        "maxItems": lambda: not items or len(v) <= s["maxItems"],
        "uniqueItems": lambda: not items or all(not same(a, b) for i, a in enumerate(v) for b in v[:i]),
        "contains": lambda: not items or any(valid(s["contains"], i, root) for i in v),
        "properties": lambda: not thing or all(valid(p, v[k], root) for k, p in known.items() if k in v),
        "patternProperties": lambda: (
            not thing or all(valid(q, v[k], root) for p, q in patterns.items() for k in v if re.search(p, k))
        ),
        "additionalProperties": lambda: not thing or all(valid(s["additionalProperties"], v[k], root) for k in rest),
        "required": lambda: not thing or all(k in v for k in s["required"]),
        "minProperties": lambda: not thing or len(v) >= s["minProperties"],
        "maxProperties": lambda: not thing or len(v) <= s["maxProperties"],
        "propertyNames": lambda: not thing or all(valid(s["propertyNames"], k, root) for k in v),
        "dependentRequired": lambda: (
            not thing or all(n in v for k, names in s["dependentRequired"].items() if k in v for n in names)
        ),
        "allOf": lambda: all(valid(one, v, root) for one in s["allOf"]),
        "anyOf": lambda: any(valid(one, v, root) for one in s["anyOf"]),
        "oneOf": lambda: sum(valid(one, v, root) for one in s["oneOf"]) == 1,
        "not": lambda: not valid(s["not"], v, root),
        "if": lambda: valid(s.get("then" if valid(s["if"], v, root) else "else", True), v, root),
    }
    return all(checks[keyword]() for keyword in s if keyword in checks)


names = st.sampled_from(["a", "b", "c", "ab"])
words = st.sampled_from(["", "a", "b", "ab", "aa", "é", 'x"y', "abc"])
whole = st.integers(-4, 8)
scalars = st.one_of(st.none(), st.booleans(), whole, st.sampled_from([0.5, -1.5, 2.25]), words)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)


def fields(**kinds: Any) -> Any:
    return st.fixed_dictionaries({}, optional=kinds)


def containers(inner: Any) -> Any:
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        fields(
            type=st.just("array"),
            items=inner,
            prefixItems=some,
            minItems=st.integers(0, 2),
            maxItems=st.integers(0, 3),
            contains=inner,
        ),
        fields(
            type=st.just("object"),
            properties=st.dictionaries(names, inner, max_size=3),
            required=st.lists(names, max_size=2, unique=True),
            additionalProperties=inner,
            patternProperties=st.dictionaries(st.sampled_from(["^a", "b$", "c"]), inner, max_size=2),
            maxProperties=st.integers(0, 3),
            minProperties=st.integers(0, 2),
            propertyNames=st.sampled_from([{"maxLength": 1}, {"pattern": "^a"}, {"enum": ["a", "c"]}]),
            dependentRequired=st.dictionaries(names, st.lists(names, max_size=2), max_size=1),
        ),
        fields(allOf=some),
        fields(anyOf=some),
        fields(oneOf=some),
        st.builds(lambda one: {"not": one}, inner),
        fields(**{"if": inner, "then": inner, "else": inner}),
        st.builds(lambda one, other: {**one, **other}, inner.filter(lambda s: isinstance(s, dict)), fields(anyOf=some)),
    )


simple = st.one_of(
    st.booleans(),
    st.just({"$ref": "#/$defs/d"}),
    st.builds(
        lambda types: {"type": types}, st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True)
    ),
    st.builds(lambda one: {"const": one}, values),
    st.builds(lambda some: {"enum": some}, st.lists(values, min_size=1, max_size=4)),
    fields(
        type=st.sampled_from(["integer", "number"]),
        minimum=whole,
        maximum=whole,
        multipleOf=st.sampled_from([2, 3, 0.5]),
    ),
    fields(exclusiveMinimum=whole, exclusiveMaximum=st.sampled_from([3, 0.5, 2.25])),
    fields(
        type=st.just("string"),
        minLength=st.integers(0, 2),
        maxLength=st.integers(0, 3),
        pattern=st.sampled_from(["^a", "b|x", "^[ab]*$"]),
    ),
)
schemas = st.recursive(simple, containers, max_leaves=5)


@settings(max_examples=120, deadline=None)
@given(schema=schemas, inner=simple, given_values=st.lists(values, min_size=4, max_size=12))
def test_a_grammar_lets_through_exactly_what_is_valid(schema: Any, inner: Any, given_values: list[Any]) -> None:
    assume(inner != {"$ref": "#/$defs/d"})
    root = {"$defs": {"d": inner}, "allOf": [schema]}
    try:
        follower = Follower(root)
    except UnsupportedSchema as error:
        if "no value can be valid" in str(error):
            assert not any(valid(schema, value, root) for value in given_values)
        return
    for value in given_values:
        assert follower.lets_through(value) == valid(schema, value, root), (schema, value)


@settings(max_examples=60, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**16))
def test_what_is_generated_at_random_is_valid(tokenizer: Tokenizer, schema: Any, seed: int) -> None:
    root = {"$defs": {"d": {"type": "integer"}}, "allOf": [schema]}
    try:
        rule = grammar_for(tokenizer, Constraint.json_schema(root)).rule()
    except UnsupportedSchema:
        return
    chance, state = random.Random(seed), State((1,))
    for _ in range(150):
        options = np.flatnonzero(np.isfinite(rule(np.zeros(tokenizer.vocab_size, np.float32), state)))
        token = int(tokenizer.eos_id) if tokenizer.eos_id in options else int(chance.choice(options))  # type: ignore[arg-type]
        if token == tokenizer.eos_id:
            text = b"".join(tokenizer.token_bytes(i) for i in state.output).decode()
            assert valid(schema, json.loads(text), root), text
            return
        state = state.plus(token)


bounds = st.one_of(st.none(), st.integers(-40, 40), st.decimals(-9, 9, places=2), st.integers(-(10**20), 10**20))


@settings(max_examples=120, deadline=None)
@given(low=bounds, high=bounds, opens=st.tuples(st.booleans(), st.booleans()), data=st.data())
def test_ranges_of_numbers(low: Any, high: Any, opens: tuple[bool, bool], data: Any) -> None:
    from fractions import Fraction

    ends = [None if end is None else Fraction(end) for end in (low, high)]
    kind = data.draw(st.sampled_from(["any", "whole", "fraction"]))
    step = data.draw(st.sampled_from([None, None, Fraction(2), Fraction(1, 4), Fraction(5), Fraction(1, 100)]))
    numbers = Numbers(
        kind, ends[0], ends[1], opens[0] and low is not None, opens[1] and high is not None, step
    ).settled()
    try:
        expression = "" if numbers.never() else numbers.expression()
    except Unsayable:
        return
    near = [end for end in ends if end is not None] or [Fraction(0)]
    for _ in range(12):
        close = data.draw(st.sampled_from(near)) + data.draw(
            st.sampled_from([Fraction(n, 100) for n in (-100, -25, -1, 0, 1, 50, 100)])
        )
        number = data.draw(
            st.sampled_from([close, close * -1, Fraction(0), (step or Fraction(1)) * data.draw(st.integers(-30, 30))])
        )
        wanted = (
            (numbers.low is None or number > numbers.low or (number == numbers.low and not numbers.low_open))
            and (numbers.high is None or number < numbers.high or (number == numbers.high and not numbers.high_open))
            and (kind == "any" or (number.denominator == 1) == (kind == "whole"))
            and (step is None or (number / step).denominator == 1)
        )
        assert bool(expression and _python(expression, decimal(number))) == wanted, (numbers, decimal(number))


def _python(definition: str, text: str) -> bool:
    """The definition of a lexeme without `~`, by Python's own expressions."""
    if definition.startswith('"'):
        return text in [one.strip('"') for one in definition.split(" | ")]
    return all(re.fullmatch(part.strip()[1:-1], text) for part in re.split(r"(?<=/) & (?=/)", definition))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_has_texts(name: str) -> None:
    assert not format_strings(name).never()
    assert not format_strings(name).holds("\n")
