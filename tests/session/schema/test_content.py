"""Generated content: JSON in and out, and typed values with checks."""

from __future__ import annotations

import dataclasses
import enum
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, List, Literal, NamedTuple, Optional  # noqa: UP035
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.session.errors import DecodingFailureError
from orchard.session.schema import GeneratedContent, GenerationID, generable
from orchard.session.schema.texts import read_duration, write_duration

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@generable
class Seed:
    size: int


class Colour(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    a: int
    b: str


@dataclasses.dataclass
class Plain:
    seed: Seed
    when: date


@given(JSON)
def test_json_goes_in_and_out_unchanged(value: Any) -> None:
    content = GeneratedContent.from_json(GeneratedContent.made(value).to_json())
    assert content.value() == value
    assert content == GeneratedContent.made(value)


def test_nothing_is_an_empty_object_apple_fails() -> None:
    for content in (GeneratedContent({}), GeneratedContent()):
        assert content.value() == {}
        assert content.to_json() == "{}"
        assert content.is_complete
        assert content.value(str, for_property="a") is None


def test_values_by_property() -> None:
    content = GeneratedContent({"name": "a", "n": 3, "list": [1], "seed": {"size": 2}, "none": None})
    assert content.value() == {"name": "a", "n": 3, "list": [1], "seed": {"size": 2}, "none": None}
    assert content.value(for_property="name") == "a"
    assert content.value(str, for_property="name") == "a"
    assert content.value(dict, for_property="seed") == {"size": 2}
    assert content.value(list, for_property="list") == [1]
    assert content.value(List[int], for_property="list") == [1]  # noqa: UP006
    assert content.value(Seed, for_property="seed") == Seed(2)
    assert content.value(for_property="absent") is None
    assert content.value(int, for_property="absent") is None
    assert content.value(Optional[int], for_property="none") is None  # noqa: UP045
    assert content.value(list[Seed], for_property="absent") == []


@pytest.mark.parametrize(
    "kind, stored, value",
    [
        (float, 3, 3.0),
        (int, 3.0, 3),
        (date, "2024-01-02", date(2024, 1, 2)),
        (Colour, "red", Colour.RED),
        (Literal["a"], "a", "a"),
        (list[list[int]], [[1]], [[1]]),
        (dict[str, Seed], {"a": {"size": 1}}, {"a": Seed(1)}),
        (int | str, "x", "x"),
        (tuple[int, str], [1, "a"], (1, "a")),
    ],
    ids=str,
)
def test_typed_values_are_converted_apple_fails(kind: Any, stored: Any, value: Any) -> None:
    made = GeneratedContent({"x": stored}).value(kind, for_property="x")
    assert made == value and type(made) is type(value)
    assert GeneratedContent(stored).value(kind) == value


@pytest.mark.parametrize(
    "kind, stored",
    [(int, "3"), (int, 3.5), (int, True), (str, 3), (bool, 1), (list[int], ["a"]), (Seed, {"size": "x"}), (Seed, [1])],
    ids=str,
)
def test_a_value_of_another_type_is_refused_apple_fails(kind: Any, stored: Any) -> None:
    with pytest.raises(DecodingFailureError, match="x") as caught:
        GeneratedContent({"x": stored}).value(kind, for_property="x")
    assert caught.value.raw.startswith('{"x":')
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("text", ["", "{", "nope", '{"a":1} x', '{"a":NaN}', "[1,]", '{"a":Infinity}', "[" * 100_000])
def test_what_is_no_json_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(DecodingFailureError) as caught:
        GeneratedContent.from_json(text)
    assert caught.value.raw == text


@pytest.mark.parametrize(
    "value, written",
    [
        ({"s": Seed(1)}, {"s": {"size": 1}}),
        ([Plain(Seed(1), date(2024, 1, 2))], [{"seed": {"size": 1}, "when": "2024-01-02"}]),
        ({"c": Colour.RED, "t": (1, 2)}, {"c": "red", "t": [1, 2]}),
        (Pair(1, "x"), {"a": 1, "b": "x"}),
        ({1: "a"}, {"1": "a"}),
        ([Decimal("1.5"), Decimal(3)], [1.5, 3]),
        ([UUID(int=0), Path("a"), timedelta(minutes=90)], ["00000000-0000-0000-0000-000000000000", "a", "PT1H30M"]),
        (GeneratedContent({"a": 1}), {"a": 1}),
    ],
    ids=str,
)
def test_python_values_are_written_as_json_apple_fails(value: Any, written: Any) -> None:
    assert GeneratedContent(value).value() == written


@pytest.mark.parametrize("value", [{"a": object()}, {"a": float("nan")}, {(1, 2): 3}, [b"x"], {"a": {"b": {3 + 4j}}}])
def test_what_json_cannot_hold_is_named(value: Any) -> None:
    with pytest.raises(UsageError, match="content") as caught:
        GeneratedContent(value)
    assert caught.value.hint


def test_content_does_not_change_with_what_it_was_made_of() -> None:
    source = {"a": [1]}
    content = GeneratedContent(source)
    source["a"].append(2)
    assert content.value() == {"a": [1]}


def test_identities() -> None:
    one, other = GenerationID(), GenerationID()
    assert one != other and one == one and len({one, other, one}) == 2
    assert str(UUID(str(one))) == str(one)
    assert GeneratedContent({}, id=one).id is one
    assert GeneratedContent({}).id != GeneratedContent({}).id


@given(st.timedeltas(min_value=timedelta(days=-99_999), max_value=timedelta(days=99_999)))
def test_durations_go_in_and_out_unchanged(length: timedelta) -> None:
    assert read_duration(write_duration(length)) == length
