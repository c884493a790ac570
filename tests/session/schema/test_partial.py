"""Unfinished answers: snapshots that only ever grow, at a cost that grows with the text."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from datetime import date
from typing import Any, Literal, NamedTuple, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.session.errors import DecodingFailureError
from orchard.session.schema import GenerationID, generable, guide, schema_for
from orchard.session.schema.partial import GrowingJson
from orchard.session.schema.shapes import NOTHING
from tests.session.schema.test_content import JSON


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


@generable
class Leaf:
    word: str
    size: int


@generable
class Plant:
    name: str
    age: int
    mood: Mood
    since: date
    leaves: list[Leaf]
    best: Leaf | None
    kind: str = guide(anyOf=["tree", "herb"])
    notes: dict[str, float]


PLANT = (
    '{"name":"Fig \\u00e9\\ud83c\\udf33\\n","age":12,"mood":"good","since":"2020-01-02","leaves":[{"word":"a","size":1},'
    '{"word":"bb","size":22}],"best":{"word":"z","size":3},"kind":"tree","notes":{"x":1.5,"y":2}}'
)


def grows(before: Any, after: Any) -> bool:
    """Whether nothing of `before` is missing or different in `after`, but for what was still open."""
    if before is None:
        return True
    if isinstance(before, str) and isinstance(after, str):
        return after.startswith(before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) <= len(after) and all(map(grows, before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        same_order = list(after)[: len(before)] == list(before)
        return same_order and all(grows(item, after[key]) for key, item in before.items())
    if dataclasses.is_dataclass(before) and type(before) is type(after):
        names = [field.name for field in dataclasses.fields(before) if field.name != "id"]
        return all(grows(getattr(before, name), getattr(after, name)) for name in names)
    return type(before) is type(after) and before == after


@given(JSON, st.booleans(), st.integers(1, 7))
def test_every_prefix_of_any_json_shows_a_prefix_of_its_value(value: Any, ascii: bool, step: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=None if step % 2 else 1)
    reader = schema_for(Any).reader()
    before: Any = None
    shown = json.dumps(None)
    for place in range(0, len(text), step):
        if shown != json.dumps(before):
            raise AssertionError("a snapshot changed under its reader")
        found = reader.push(text[place : place + step])
        if found is not None:
            assert grows(before, found.raw.value()), (before, found.raw.value())
            before = found.raw.value()
            shown = json.dumps(before)
            assert found.content == before
            assert grows(before, value)
    last = reader.finish()
    assert last is not None and last.complete and last.raw.is_complete
    assert last.raw.value() == value
    assert json.dumps(last.raw.value()) == json.dumps(value)


@given(JSON, st.data())
def test_pieces_and_wholes_show_the_same(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    end = data.draw(st.integers(0, len(text)))
    whole, pieces = GrowingJson(), GrowingJson()
    whole.push(text[:end])
    for character in text[:end]:
        pieces.push(character)
    assert (whole.root, whole.depth, whole.complete) == (pieces.root, pieces.depth, pieces.complete)


def test_typed_snapshots_grow_field_by_field() -> None:
    reader = schema_for(Plant).reader()
    before: Any = None
    identity = None
    order: list[str] = []
    for character in PLANT:
        found = reader.push(character)
        if found is None:
            continue
        assert isinstance(found.content, Plant.PartiallyGenerated)
        assert grows(before, found.content)
        identity = identity or found.content.id
        assert found.content.id == identity == found.raw.id
        before = found.content
        filled = [field.name for field in dataclasses.fields(before) if getattr(before, field.name) is not None]
        order += [name for name in filled if name not in order and name != "id"]
    assert order == ["name", "age", "mood", "since", "leaves", "best", "kind", "notes"]
    assert before.name == "Fig é🌳\n"
    assert (before.mood, before.since) == (Mood.GOOD, date(2020, 1, 2))
    assert [type(leaf) for leaf in before.leaves] == [Leaf.PartiallyGenerated] * 2
    assert before.notes == {"x": 1.5, "y": 2.0}
    last = reader.finish()
    assert last is not None and last.complete and last.content == before


PREFIXES: list[tuple[Any, str, Any]] = [
    (Leaf, '{"wo', {"word": None, "size": None}),
    (Leaf, '{"word"', {"word": None, "size": None}),
    (Leaf, '{"word":"', {"word": "", "size": None}),
    (Leaf, '{"word":"a\\', {"word": "a", "size": None}),
    (Leaf, '{"word":"a\\u00', {"word": "a", "size": None}),
    (Leaf, '{"word":"a\\ud83c', {"word": "a", "size": None}),
    (Leaf, '{"word":"a","size":12', {"word": "a", "size": None}),
    (Leaf, '{"word":"a","size":12 ', {"word": "a", "size": 12}),
    (Leaf, '{"word":"a","size":12}', {"word": "a", "size": 12}),
]


@pytest.mark.parametrize("kind, text, wanted", PREFIXES, ids=[text for _, text, _ in PREFIXES])
def test_what_a_prefix_shows(kind: Any, text: str, wanted: dict[str, Any]) -> None:
    found = schema_for(kind).partial(text)
    assert found is not None
    assert {name: getattr(found.content, name) for name in wanted} == wanted


class Movie(TypedDict):
    title: str
    year: int


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    "kind, text, content",
    [
        (list[int], "[1,2", [1]),
        (list[int], "[1,2,", [1, 2]),
        (list[str], '["a","b', ["a", "b"]),
        (list[Mood], '["good","ba', [Mood.GOOD]),
        (list[list[int]], "[[1,2],[3,", [[1, 2], [3]]),
        (set[int], "[1,1", [1]),
        (tuple[int, str], '[1,"a', [1, "a"]),
        (dict[str, int], '{"a":1,"b":2', {"a": 1}),
        (dict[str, list[int]], '{"a":[1,', {"a": [1]}),
        (Movie, '{"title":"Up","ye', {"title": "Up"}),
        (str, '"hel', "hel"),
        (bool, "tru", None),
        (bool, "true", True),
        (Literal["yes", "no"], '"ye', None),
        (Literal["yes", "no"], '"yes"', "yes"),
        (date, '"2020-01-0', None),
        (int | str, '"ab', "ab"),
        (date | str, '"2020-', None),
        (list[date | str], '["2020-01-01","x', [date(2020, 1, 1)]),
        (Any, '{"a":[{"b":"c', {"a": [{"b": "c"}]}),
        ({"type": "object"}, '{"a":[1,2', {"a": [1]}),
    ],
    ids=str,
)
def test_snapshots_of_other_types(kind: Any, text: str, content: Any) -> None:
    found = schema_for(kind).partial(text)
    assert (None if found is None else found.content) == content


@pytest.mark.parametrize("text", ["", " ", "12", "-", "tr", "n", "  \n"])
def test_nothing_to_show_yet(text: str) -> None:
    assert schema_for(Any).partial(text) is None


def test_a_number_alone_shows_at_the_end() -> None:
    reader = schema_for(int).reader()
    assert reader.push("1") is None and reader.push("2") is None
    last = reader.finish()
    assert last is not None and last.content == 12 and last.complete


@pytest.mark.parametrize(
    "text", ['{"a":1}}', '{"a":tru1', "[1 2]", '{"a" 1', "{a", '["\x01"]', '["\\x"]', "[1,]", "[01x]"]
)
def test_what_is_no_json_stops_growing_and_never_raises(text: str) -> None:
    grown = GrowingJson()
    grown.push(text)
    shown = json.dumps(grown.root, default=str)
    grown.push('"more"]}')
    assert grown.broken
    assert json.dumps(grown.root, default=str) == shown


def test_an_answer_nested_too_deeply_never_breaks_a_stream() -> None:
    schema = schema_for(Any)
    reader = schema.reader()
    reader.push("[1," + "[" * 20_000)
    reader.push("]" * 10)
    last = reader.finish()
    assert last is None or not last.complete
    with pytest.raises(DecodingFailureError, match="deeply") as caught:
        schema_for(Nest).instance(schema_for(Nest).read('{"n":' * 900 + "{}" + "}" * 900))
    assert caught.value.raw.startswith('{"n":')
    assert schema.read("[" * 900 + "]" * 900).value() is not None


@dataclasses.dataclass
class Nest:
    n: Nest | None = None


def test_a_cut_answer_is_not_complete() -> None:
    reader = schema_for(Leaf).reader()
    reader.push('{"word":"a')
    last = reader.finish()
    assert last is not None and not last.complete and not last.raw.is_complete
    assert last.raw.value() == {"word": "a"}


def test_a_piece_that_shows_nothing_new_gives_none() -> None:
    reader = schema_for(Leaf).reader()
    assert reader.push("{") is not None
    assert reader.push('"wo') is None
    assert reader.push('rd": ') is None
    assert reader.latest is not None and reader.latest.raw.value() == {}


@generable
class Cat:
    name: str


@generable
class Dog:
    name: str


@generable
class Fish:
    name: str
    scales: bool


def test_a_union_shows_when_it_is_decided() -> None:
    tagged = schema_for(list[Cat | Dog])
    assert tagged.partial('[{"Dog":{"na').content == [Dog.PartiallyGenerated()]  # type: ignore[union-attr]
    plain = schema_for(Cat | Fish)
    undecided = plain.partial('{"name":"a"')
    assert undecided is not None and undecided.content is None and undecided.raw.value() == {"name": "a"}
    assert plain.partial('{"name":"a","scales":tr').content is None  # type: ignore[union-attr]
    assert plain.partial('{"name":"a","scales":true').content == Fish.PartiallyGenerated("a", True)  # type: ignore[union-attr]


def test_parts_keep_their_identity_from_snapshot_to_snapshot() -> None:
    reader = schema_for(list[Leaf]).reader()
    seen: list[set[GenerationID]] = [set(), set()]
    for character in '[{"word":"a","size":1},{"word":"b","size":2}]':
        found = reader.push(character)
        for place, leaf in enumerate(found.content if found else ()):
            seen[place].add(leaf.id)
    assert [len(ids) for ids in seen] == [1, 1]
    assert seen[0] != seen[1]


def test_the_cost_of_a_stream_grows_with_its_length() -> None:
    @generable
    class Row:
        word: str
        numbers: list[int]

    def steps(rows: int) -> int:
        """Calls of Python functions, which do not depend on how busy the machine is."""
        text = json.dumps([{"word": "some words", "numbers": [1, 2, 3]}] * rows)
        reader = schema_for(list[Row]).reader()
        taken = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal taken
            taken += event == "call"

        sys.setprofile(count)
        try:
            for place in range(0, len(text), 4):
                reader.push(text[place : place + 4])
        finally:
            sys.setprofile(None)
        assert reader.latest is not None and len(reader.latest.content) == rows
        return taken

    assert steps(400) < 8.5 * steps(50)  # eight times the text; every part anew each time would be 64 times the work


def test_nothing_is_falsy_and_has_a_name() -> None:
    assert not NOTHING and repr(NOTHING) == "NOTHING"
