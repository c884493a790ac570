"""Python functions as tools: names, words, schemas, and calls that arrive as they were meant."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import typing
from datetime import date
from typing import Annotated, Any, Literal, Optional, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import OrchardError
from orchard.session.schema import guide
from orchard.session.tools import BadToolError, ToolBox, tool_of
from orchard.session.tools.docstrings import described


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Options(TypedDict):
    deep: bool


def weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> dict[str, Any]:
    """The weather in a city.

    More words that nobody is told.

    Args:
        city: Name of the city,
            as people write it
        unit (str): Unit of the temperature
    """
    return {"city": city, "unit": unit}


def spec_of(function: Any) -> Any:
    return tool_of(function).spec


def test_name_words_and_schema() -> None:
    spec = spec_of(weather)
    assert (spec.name, spec.description) == ("weather", "The weather in a city.")
    assert spec.parameters["required"] == ["city"]
    assert spec.parameters["properties"]["city"] == {
        "type": "string",
        "description": "Name of the city, as people write it",
    }
    assert spec.parameters["properties"]["unit"]["enum"] == ["celsius", "fahrenheit"]
    assert spec.parameters["properties"]["unit"]["description"] == "Unit of the temperature"
    assert spec.parameters["additionalProperties"] is False
    assert spec.parameters["x-order"] == ["city", "unit"]


def test_the_functions_own_default_counts() -> None:
    box = ToolBox([weather])
    assert box.call("weather", '{"city": "Oslo"}').value == {"city": "Oslo", "unit": "celsius"}
    assert box.call("weather", '{"city": "Oslo", "unit": "fahrenheit"}').value["unit"] == "fahrenheit"


def test_sphinx_numpy_and_missing_docstrings() -> None:
    def sphinx(a: int, b: str) -> None:
        """Do it.
        :param a: the first
           and more
        :param str b: the second
        :return: nothing
        """

    def numpy(a: int, b: str) -> None:
        """Do it.

        Parameters
        ----------
        a : int
            the first
        b : str
            the second

        Returns
        -------
        c : int
            not a parameter
        """

    def bare(a: int) -> None: ...

    assert described(sphinx) == ("Do it.", {"a": "the first and more", "b": "the second"})
    assert described(numpy) == ("Do it.", {"a": "the first", "b": "the second"})
    assert described(bare) == ("", {})
    assert spec_of(bare).description == ""


def test_annotated_words_win_over_the_docstring() -> None:
    def f(a: Annotated[int, "from the type"], b: Annotated[str, guide("guided", anyOf=["x", "y"])] = "x") -> None:
        """F.

        Args:
            a: from the docstring
        """

    properties = spec_of(f).parameters["properties"]
    assert properties["a"]["description"] == "from the type"
    assert properties["b"]["enum"] == ["x", "y"]


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int, "3", 3),
        (float, "3", 3.0),
        (bool, "true", True),
        (str, '"é\\n"', "é\n"),
        (list[int], "[1,2]", [1, 2]),
        (tuple[int, str], '[1,"a"]', (1, "a")),
        (set[int], "[1]", {1}),
        (dict[str, float], '{"a":1}', {"a": 1.0}),
        (Color, '"red"', Color.RED),
        (Literal["a", 1], "1", 1),
        (Optional[int], "4", 4),  # noqa: UP045
        (int | str, '"a"', "a"),
        (Point, '{"x":1}', Point(1, 0)),
        (list[Point], '[{"x":1,"y":2}]', [Point(1, 2)]),
        (Options, '{"deep":true}', {"deep": True}),
        (date, '"2024-02-29"', date(2024, 2, 29)),
    ],
)
def test_arguments_of_every_type_arrive_as_that_type(hint: Any, text: str, value: Any) -> None:
    seen = []

    def tool(given: Any) -> None:
        seen.append(given)

    tool.__annotations__["given"] = hint
    result = ToolBox([tool]).call("tool", f'{{"given": {text}}}')
    assert result.error is None, result.error
    assert seen == [value] and type(seen[0]) is type(value)


def test_none_stands_for_an_argument_that_was_left_out() -> None:
    def tool(a: int | None, b: int | None = 7, c: int = 3) -> list[Any]:
        return [a, b, c]

    box = ToolBox([tool])
    assert box.call("tool", "{}").value == [None, 7, 3]
    assert box.call("tool", '{"b": null, "a": 1}').value == [1, None, 3]


def test_arguments_by_position_and_by_name_only() -> None:
    def tool(a: int, b: int = 2, /, c: int = 3, *, d: int) -> list[int]:
        return [a, b, c, d]

    assert ToolBox([tool]).call("tool", '{"a": 1, "d": 4}').value == [1, 2, 3, 4]
    assert ToolBox([tool]).call("tool", '{"a": 1, "b": 5, "c": 6, "d": 4}').value == [1, 5, 6, 4]


def test_methods_partials_and_objects() -> None:
    class Shop:
        """A shop."""

        def price(self, item: str) -> str:
            """The price of an item."""
            return f"{item}: 3"

        def __call__(self, item: str) -> str:
            return item

    assert ToolBox([Shop().price]).call("price", '{"item": "tea"}').value == "tea: 3"
    assert spec_of(Shop().price).parameters["required"] == ["item"]
    fixed = functools.partial(weather, unit="fahrenheit")
    assert list(spec_of(fixed).parameters["properties"]) == ["city"]
    assert ToolBox([fixed]).call("weather", '{"city": "X"}').value["unit"] == "fahrenheit"
    assert ToolBox([Shop()]).call("Shop", '{"item": "tea"}').value == "tea"


def test_a_default_says_the_type_where_no_annotation_does() -> None:
    def tool(a=1, b="x", c=True):  # type: ignore[no-untyped-def]
        return [a, b, c]

    kinds = {name: part["type"] for name, part in spec_of(tool).parameters["properties"].items()}
    assert kinds == {"a": "integer", "b": "string", "c": "boolean"}


def test_mutable_defaults_are_no_trouble() -> None:
    def tool(a: list[int] = []) -> int:  # noqa: B006
        return len(a)

    assert ToolBox([tool]).call("tool", "{}").value == 0


def any_number(*args: int) -> None: ...


def any_names(**names: int) -> None: ...


def no_type(a) -> None: ...  # type: ignore[no-untyped-def]


def unknown_type(a: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def bare_list(a: list) -> None: ...  # type: ignore[type-arg]


@pytest.mark.parametrize("thing", [any_number, any_names, no_type, unknown_type, lambda a: a, 3, "text", None, Point])
def test_what_cannot_be_a_tool_says_why(thing: Any) -> None:
    with pytest.raises(BadToolError) as caught:
        tool_of(thing)
    assert caught.value.hint and isinstance(caught.value, TypeError)


def test_a_type_that_cannot_be_generated_says_which() -> None:
    with pytest.raises(OrchardError, match=r"BareListArguments\.a") as caught:
        tool_of(bare_list)
    assert caught.value.hint


KINDS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(10**9), 10**9),
    str: st.text(max_size=20),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False, width=32),
    list[int]: st.lists(st.integers(-99, 99), max_size=4),
    Literal["a", "b"]: st.sampled_from(["a", "b"]),
    dict[str, bool]: st.dictionaries(st.sampled_from(["k", "l"]), st.booleans()),
}
NAMES = st.lists(
    st.sampled_from(["a", "b2", "item", "from_", "class_", "self_", "x_order", "id"]), unique=True, max_size=5
)


@given(data=st.data())
def test_any_signature_round_trips(data: st.DataObject) -> None:
    """A signature becomes a schema; values of its types, as JSON, become a call with those very values."""
    names = data.draw(NAMES)
    kinds = [data.draw(st.sampled_from(list(KINDS))) for _ in names]
    optional = [data.draw(st.booleans()) for _ in names]
    got: dict[str, Any] = {}

    def record(**values: Any) -> str:
        got.update(values)
        return "done"

    import inspect

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default="left out" if may else inspect.Parameter.empty,
        )
        for name, kind, may in zip(names, kinds, optional, strict=True)
    ]
    record.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    record.__annotations__ = dict(zip(names, kinds, strict=True))
    entry = tool_of(record)
    assert entry.spec.parameters.get("required", []) == [n for n, may in zip(names, optional, strict=True) if not may]
    values = {
        name: data.draw(KINDS[kind])
        for name, kind, may in zip(names, kinds, optional, strict=True)
        if not may or data.draw(st.booleans())
    }
    result = ToolBox([entry]).call("record", json.dumps(values))
    assert result.error is None and result.content == "done"
    assert got == values


@given(
    st.from_regex(r"[a-z_][a-z0-9_]{0,10}", fullmatch=True),
    st.text(st.characters(categories=["L", "N", "Zs"]), max_size=60),
)
def test_any_docstring_is_read_without_trouble(name: str, words: str) -> None:
    def tool() -> None: ...

    tool.__doc__ = f"First line.\n\nArgs:\n    {name}: {words}\n"
    summary, found = described(tool)
    assert summary == "First line."
    assert found.get(name, "") == " ".join(words.split())


def test_hints_are_resolved_in_the_functions_own_module() -> None:
    assert typing.get_type_hints(weather)["city"] is str
    assert spec_of(weather).parameters["type"] == "object"
