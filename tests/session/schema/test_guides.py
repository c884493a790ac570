"""Guides: their shapes, which types they fit, and that the grammar enforces them."""

from __future__ import annotations

from typing import Any, Optional

import pytest

from orchard.session.errors import InvalidGenerationSchemaError, UnsupportedGuideError
from orchard.session.schema import GenerationGuide, GuideType, generable, guide, schema_for
from tests.session.schema.enforced import accepts


@generable
class Leaf:
    green: bool


def field_of(kind: Any, **guides: Any) -> Any:
    @generable
    class Thing:
        it: kind = guide(**guides)

    return Thing


ENFORCED: list[tuple[Any, dict[str, Any], list[str], list[str]]] = [
    (str, {"anyOf": ["a", "b"]}, ['"a"', '"b"'], ['"c"', '"ab"', '""']),
    (str, {"constant": "on"}, ['"on"'], ['"off"']),
    (str, {"regex": r"\d{3}"}, ['"123"'], ['"12"', '"x123"', '"1234"']),
    (str, {"regex": "^a|b$"}, ['"a"', '"b"'], ['"ab"', '"ac"']),
    (str, {"regex": "[ab]c?", "anyOf": ["ac", "d", "b"]}, ['"ac"', '"b"'], ['"d"', '"a"']),
    (int, {"minimum": 3}, ["3", "100"], ["2", "-3"]),
    (int, {"maximum": 3}, ["3", "-100"], ["4"]),
    (int, {"range": (2, 4)}, ["2", "4"], ["1", "5"]),
    (int, {"range": (1.5, 3.5)}, ["2", "3"], ["1", "4"]),
    (int, {"range": (0, 9), "minimum": 5}, ["5", "9"], ["4", "10"]),
    (float, {"range": (0.5, 0.75)}, ["0.5", "0.6", "0.75"], ["0.4", "0.76"]),
    (list[str], {"count": 2}, ['["a","b"]'], ['["a"]', '["a","b","c"]']),
    (list[str], {"count": (1, 2)}, ['["a"]', '["a","b"]'], ["[]", '["a","b","c"]']),
    (list[str], {"min_items": 1}, ['["a"]'], ["[]"]),
    (list[str], {"max_items": 1}, ["[]", '["a"]'], ['["a","b"]']),
    (list[str], {"max_items": 0}, ["[]"], ['["a"]']),
    (list[str], {"anyOf": ["x"]}, ['["x","x"]'], ['["y"]']),
    (list[str], {"element": GenerationGuide.regex("[a-c]+")}, ['["abc"]'], ['["abd"]']),
    (list[int], {"element": GenerationGuide.range((1, 5)), "count": 1}, ["[5]"], ["[6]", "[]"]),
    (list[float], {"element": GenerationGuide.minimum(0.5)}, ["[0.5]"], ["[0.25]"]),
    (list[Leaf], {"count": 1}, ['[{"green":true}]'], ["[]"]),
    (list[list[int]], {"element": GenerationGuide.count(2)}, ["[[1,2]]"], ["[[1]]"]),
    (Optional[int], {"range": (1, 2)}, ["1"], ["3", "null"]),  # noqa: UP045
    (int | None, {"minimum": 1}, ["1"], ["0"]),
    (bool, {"minimum": 1}, ["true", "false"], []),
]


@pytest.mark.parametrize("kind, guides, good, bad", ENFORCED, ids=[str(case[:2]) for case in ENFORCED])
def test_a_guide_is_enforced(kind: Any, guides: dict[str, Any], good: list[str], bad: list[str]) -> None:
    schema = schema_for(field_of(kind, **guides))
    for value in good:
        assert accepts(schema, f'{{"it":{value}}}'), value
        assert schema.instance(schema.read(f'{{"it":{value}}}')) is not None
    for value in bad:
        assert not accepts(schema, f'{{"it":{value}}}'), value


NUMERIC: list[dict[str, Any]] = [{"minimum": 1}, {"maximum": 1}, {"range": (1, 2)}]
TEXTUAL: list[dict[str, Any]] = [{"anyOf": ["a"]}, {"constant": "a"}, {"regex": "a"}]
COUNTS: list[dict[str, Any]] = [{"count": 1}, {"min_items": 1}, {"max_items": 1}]
ELEMENT = {"element": GenerationGuide.range((1, 2))}
ILLEGAL = [
    *[(str, one) for one in [*NUMERIC, *COUNTS, ELEMENT]],
    *[(kind, one) for kind in (int, float) for one in [*TEXTUAL, *COUNTS, ELEMENT]],
    *[(kind, one) for kind in (list[int], list[float]) for one in [*NUMERIC, *TEXTUAL]],
    *[(list[str], one) for one in [*NUMERIC, {"regex": "a"}, {"constant": "a"}, ELEMENT]],
    *[(list[Leaf], one) for one in [*NUMERIC, *TEXTUAL, ELEMENT]],
    *[(Leaf, one) for one in [*NUMERIC, *TEXTUAL, *COUNTS]],
]


@pytest.mark.parametrize("kind, guides", ILLEGAL, ids=str)
def test_a_guide_on_the_wrong_type_is_refused_when_the_schema_is_made(kind: Any, guides: dict[str, Any]) -> None:
    made = field_of(kind, **guides)  # not yet
    schema = made.generation_schema()  # nor here
    with pytest.raises(UnsupportedGuideError, match=r"Thing\.it") as caught:
        schema.to_dict()
    assert caught.value.hint
    with pytest.raises(UnsupportedGuideError):
        schema_for(made)


@pytest.mark.parametrize(
    "guides",
    [
        {"anyOf": "abc"},
        {"anyOf": [1]},
        {"anyOf": ("a",)},
        {"constant": 3},
        {"count": 0},
        {"count": -1},
        {"count": 1.5},
        {"count": True},
        {"count": (2, 1)},
        {"element": "x"},
        {"max_items": -1},
        {"max_items": "3"},
        {"min_items": -2},
        {"maximum": "3"},
        {"minimum": [1]},
        {"range": [1, 2]},
        {"range": (1, 2, 3)},
        {"range": ("a", "b")},
        {"regex": 3},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_refused_at_once(guides: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(guides))):
        guide("words", **guides)


@pytest.mark.parametrize(
    "kind, guides, words",
    [
        (int, {"range": (5, 1)}, "at least 5 and at most 1"),
        (float, {"minimum": 2.0, "maximum": 1.0}, "at least 2.0"),
        (int, {"range": (1.2, 1.8)}, "at least 2 and at most 1"),
        (float, {"minimum": float("nan")}, "nan"),
        (float, {"maximum": float("inf")}, "inf"),
        (list[str], {"min_items": 3, "max_items": 2}, "at least 3"),
        (list[str], {"count": 3, "max_items": 2}, "at least 3"),
        (str, {"anyOf": []}, "nothing to choose"),
        (str, {"anyOf": ["a"], "constant": "b"}, "leave no text"),
        (str, {"anyOf": ["a"], "regex": "b"}, "none of its choices"),
        (str, {"regex": "[a"}, "pattern"),
        (str, {"regex": "(?=a)b"}, "looks ahead"),
        (str, {"regex": r"(a)\1"}, "pattern"),
        (list[str], {"element": GenerationGuide.regex("(")}, "pattern"),
        (list[str], {"element": GenerationGuide.element(GenerationGuide.count(-1))}, "element"),
    ],
    ids=str,
)
def test_guides_that_leave_nothing_are_refused_by_name(kind: Any, guides: dict[str, Any], words: str) -> None:
    expected = (InvalidGenerationSchemaError, UnsupportedGuideError)
    with pytest.raises(expected, match=r"Thing\.it") as caught:
        schema_for(field_of(kind, **guides))
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "made, kind, value",
    [
        (GenerationGuide.anyOf(["a"]), GuideType.anyOf, ["a"]),
        (GenerationGuide.constant("a"), GuideType.constant, "a"),
        (GenerationGuide.count(5), GuideType.count, 5),
        (GenerationGuide.max_items(5), GuideType.maxItems, 5),
        (GenerationGuide.min_items(5), GuideType.minItems, 5),
        (GenerationGuide.maximum(1.5), GuideType.maximum, 1.5),
        (GenerationGuide.minimum(1.5), GuideType.minimum, 1.5),
        (GenerationGuide.range((1, 2)), GuideType.range, (1, 2)),
        (GenerationGuide.regex("a"), GuideType.regex, "a"),
        (GenerationGuide.element(GenerationGuide.count(1)), GuideType.element, GenerationGuide.count(1)),
    ],
    ids=str,
)
def test_the_factories(made: GenerationGuide, kind: GuideType, value: Any) -> None:
    assert (made.guide_type, made.value) == (kind, value)
    assert made == GenerationGuide(kind, value)
    assert hash(made) == hash(GenerationGuide(kind, value))


def test_the_names_and_values_of_guide_types() -> None:
    values = {one.name: one.value for one in GuideType}
    assert values.pop("anyOf") == "enum"
    assert values == {name: name for name in values}
    assert len(values) == 9


def test_a_guide_made_without_guide_is_checked_with_the_schema() -> None:
    from orchard.session.schema import GenerationSchema, Property

    schema = GenerationSchema("T", properties=[Property("a", list[int], guides=[GenerationGuide.count(-1)])])
    with pytest.raises(InvalidGenerationSchemaError, match=r"T\.a.*count.*-1"):
        schema.to_dict()
