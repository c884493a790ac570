"""Every kind of type: its schema compiles, lets the right texts through and no wrong ones, and gives the exact Python value."""

from __future__ import annotations

import dataclasses
import enum
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import (  # noqa: UP035
    Annotated,
    Any,
    Generic,
    List,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    Required,
    TypedDict,
    TypeVar,
    Union,
)
from uuid import UUID

import annotated_types
import pytest

from orchard.session.errors import DecodingFailureError, InvalidGenerationSchemaError
from orchard.session.schema import GenerationGuide, UnsupportedTypeError, guide, schema_for
from tests.session.schema.enforced import accepts, compiles


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Corner(enum.Enum):
    TOP = (0, 1)
    LEFT = (1, 0)


class Point(NamedTuple):
    x: int
    y: str = "up"


class Movie(TypedDict):
    title: str
    year: NotRequired[int]
    rating: float | None


class Series(Movie, total=False):
    seasons: Required[int]
    parts: list[Movie]


@dataclasses.dataclass(frozen=True)
class Plain:
    """A plain dataclass.

    With more words.
    """

    name: str
    size: float = 1.5
    tags: list[str] = dataclasses.field(default_factory=list)
    parent: Plain | None = None
    score: int | None = 5
    derived: int = dataclasses.field(init=False, default=0)


T = TypeVar("T")


@dataclasses.dataclass
class Box(Generic[T]):
    inside: T
    spare: list[T]


UserId = NewType("UserId", int)


class Word(str):
    pass


GOOD: list[tuple[Any, str, Any]] = [
    (str, '"a\\"b"', 'a"b'),
    (int, "-3", -3),
    (float, "2", 2.0),
    (bool, "true", True),
    (None, "null", None),
    (Any, '{"a":[1]}', {"a": [1]}),
    (list[int], "[1,2]", [1, 2]),
    (List[str], '["a"]', ["a"]),  # noqa: UP006
    (list[list[int]], "[[1],[]]", [[1], []]),
    (tuple[int, str], '[1,"a"]', (1, "a")),
    (tuple[int, ...], "[1,2,3]", (1, 2, 3)),
    (set[int], "[1,2]", {1, 2}),
    (frozenset[str], '["a"]', frozenset({"a"})),
    (Sequence[bool], "[true]", [True]),
    (Optional[int], "null", None),  # noqa: UP045
    (int | None, "4", 4),
    (Union[int, str], '"x"', "x"),  # noqa: UP007
    (int | float, "2", 2),
    (float | int, "2", 2),
    (int | float, "2.5", 2.5),
    (date | str, '"2024-02-29"', date(2024, 2, 29)),
    (date | str, '"soon"', "soon"),
    (list[int | None], "[1,null]", [1, None]),
    (Literal["a", "b"], '"b"', "b"),
    (Literal[1, "1", True, None], "1", 1),
    (Literal[1, "1", True, None], "true", True),
    (Literal[Colour.RED], '"red"', Colour.RED),
    (Colour, '"blue"', Colour.BLUE),
    (Level, "3", Level.HIGH),
    (Corner, '"LEFT"', Corner.LEFT),
    (dict[str, int], '{"a":1}', {"a": 1}),
    (Mapping[str, list[int]], '{"a":[1]}', {"a": [1]}),
    (dict, '{"a":[1]}', {"a": [1]}),
    (dict[int, str], '{"12":"x"}', {12: "x"}),
    (dict[Colour, int], '{"red":2}', {Colour.RED: 2}),
    (date, '"2000-02-29"', date(2000, 2, 29)),
    (datetime, '"2024-12-31T23:59:59Z"', datetime(2024, 12, 31, 23, 59, 59, tzinfo=UTC)),
    (datetime, '"2024-12-31T23:59:59.5"', datetime(2024, 12, 31, 23, 59, 59, 500000)),
    (time, '"09:30:00"', time(9, 30)),
    (timedelta, '"P1DT2H30M"', timedelta(days=1, hours=2, minutes=30)),
    (timedelta, '"-PT0.5S"', timedelta(seconds=-0.5)),
    (UUID, '"12345678-1234-1234-1234-123456789abc"', UUID("12345678-1234-1234-1234-123456789abc")),
    (Decimal, "19.99", Decimal("19.99")),
    (Path, '"a/b"', Path("a/b")),
    (UserId, "7", 7),
    (Word, '"w"', Word("w")),
    (Annotated[int, "An age", GenerationGuide.range((1, 5))], "5", 5),
    (Annotated[int, guide("An age", minimum=3)], "3", 3),
    (Annotated[int, annotated_types.Ge(1), annotated_types.Lt(5)], "4", 4),
    (Annotated[str, annotated_types.Len(2, 3)], '"abc"', "abc"),
    (Annotated[list[int], annotated_types.MinLen(1)], "[1]", [1]),
    (Annotated[int | None, annotated_types.Ge(1)], "null", None),
    (Point, '{"x":1}', Point(1)),
    (Movie, '{"title":"t","rating":null}', {"title": "t", "rating": None}),
    (Series, '{"title":"t","rating":1.0,"seasons":2}', {"title": "t", "rating": 1.0, "seasons": 2}),
    (Plain, '{"name":"a"}', Plain("a")),
    (Plain, '{"name":"a","parent":{"name":"b","tags":["c"]}}', Plain("a", parent=Plain("b", tags=["c"]))),
    (Plain, '{"name":"a","score":null}', Plain("a", score=None)),
    (Box[int], '{"inside":1,"spare":[2]}', Box(1, [2])),
    (list[Box[str]], '[{"inside":"a","spare":[]}]', [Box("a", [])]),
]


@pytest.mark.parametrize(
    "kind, text, value", GOOD, ids=[f"{place}-{text[:20]}" for place, (_, text, _) in enumerate(GOOD)]
)
def test_a_type_is_generated_and_read_apple_fails_most(kind: Any, text: str, value: Any) -> None:
    schema = schema_for(kind)
    assert compiles(schema)
    assert accepts(schema, text)
    made = schema.instance(schema.read(text))
    assert made == value
    assert type(made) is type(value)
    assert schema.read(schema_text(schema, made)) == schema.read(schema_text(schema, value))


def schema_text(schema: Any, value: Any) -> str:
    return json.dumps(schema.shape.write(value))


BAD: list[tuple[Any, str]] = [
    (str, "1"),
    (int, "1.5"),
    (int, "true"),
    (float, '"1"'),
    (bool, "0"),
    (list[int], '["a"]'),
    (tuple[int, str], "[1]"),
    (tuple[int, str], '[1,"a",2]'),
    (int | None, '"x"'),
    (Literal["a", 1], '"b"'),
    (Literal[1], "true"),
    (Colour, '"green"'),
    (Level, "2"),
    (dict[str, int], '{"a":"b"}'),
    (dict[int, str], '{"a":"b"}'),
    (dict[Colour, int], '{"green":1}'),
    (date, '"2023-02-29"'),
    (date, '"2024-04-31"'),
    (date, '"1900-02-29"'),
    (date, '"24-01-01"'),
    (datetime, '"2024-01-01"'),
    (datetime, '"2024-01-01T25:00:00"'),
    (time, '"9:30"'),
    (timedelta, '"P"'),
    (timedelta, '"PT"'),
    (timedelta, '"1 day"'),
    (UUID, '"1234"'),
    (Decimal, '"x"'),
    (Annotated[int, GenerationGuide.range((1, 5))], "6"),
    (Annotated[int, annotated_types.Gt(1)], "1"),
    (Annotated[str, annotated_types.Len(2, 3)], '"a"'),
    (Movie, '{"title":"t"}'),
    (Series, '{"title":"t","rating":1.0}'),
    (Plain, '{"size":2.0}'),
    (Plain, '{"name":"a","derived":3}'),
]


@pytest.mark.parametrize("kind, text", BAD, ids=[f"{place}-{text[:20]}" for place, (_, text) in enumerate(BAD)])
def test_a_wrong_value_is_neither_generated_nor_read(kind: Any, text: str) -> None:
    schema = schema_for(kind)
    assert not accepts(schema, text)
    with pytest.raises(DecodingFailureError) as caught:
        schema.read(text)
    assert caught.value.raw == text
    assert caught.value.hint


@pytest.mark.parametrize(
    "kind, wanted",
    [
        (date, {"type": "string", "format": "date"}),
        (UUID, {"type": "string", "format": "uuid"}),
        (Level, {"type": "integer", "enum": [1, 3]}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (list[Colour], {"type": "array", "items": {"type": "string", "enum": ["red", "blue"]}}),
    ],
    ids=str,
)
def test_the_dialect_of_what_the_sdk_has_no_type_for_apple_fails(kind: Any, wanted: dict[str, Any]) -> None:
    assert schema_for(kind).to_dict() == wanted


def test_defaults_of_plain_dataclasses_may_be_left_out() -> None:
    written = schema_for(Plain).to_dict()
    assert written["required"] == ["name"]
    assert written["description"] == "A plain dataclass."
    assert written["x-order"] == ["name", "size", "tags", "parent", "score"]
    assert written["properties"]["parent"] == {"$ref": "#"}
    assert written["properties"]["score"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}


def test_plain_dataclasses_refer_to_each_other_in_any_order() -> None:
    schema = schema_for(Early)
    made = schema.instance(schema.read('{"later":[{"early":{"later":[]}}]}'))
    assert made == Early([Later(Early([]))])
    assert schema.to_dict()["$defs"]["Later"]["properties"]["early"] == {"$ref": "#"}


@dataclasses.dataclass
class Early:
    later: list[Later]


@dataclasses.dataclass
class Later:
    early: Early


class Strange:
    pass


@dataclasses.dataclass
class Holder:
    strange: Strange


@pytest.mark.parametrize(
    "kind, words",
    [
        (list, "list does not say"),
        (set, "set does not say"),
        (tuple, "tuple does not say"),
        (complex, "complex"),
        (bytes, "bytes"),
        (Strange, "Strange"),
        (Holder, r"Holder\.strange: Strange"),
        (dict[float, int], "keys"),
        (Literal[b"x"], "b'x'"),
        (3, "3"),
        (list[Strange], "Strange"),
    ],
    ids=str,
)
def test_an_unsupported_type_is_named_before_any_token(kind: Any, words: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=words) as caught:
        schema_for(kind)
    assert isinstance(caught.value, InvalidGenerationSchemaError) and isinstance(caught.value, TypeError)
    assert caught.value.hint


def test_an_enum_without_members_is_refused() -> None:
    with pytest.raises(InvalidGenerationSchemaError, match="Empty has no members"):
        schema_for(enum.Enum("Empty", []))


def test_importing_schemas_brings_in_nothing_heavy() -> None:
    heavy = "[name for name in ('torch', 'numpy', 'pydantic', 'llguidance') if name in sys.modules]"
    program = f"import sys, orchard.session.schema; print({heavy})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
