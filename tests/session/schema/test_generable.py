"""The decorator: what it makes of a class, and what it says where it cannot."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal, Optional

import pydantic
import pytest

from orchard.session.errors import DecodingFailureError, InvalidGenerationSchemaError
from orchard.session.schema import (
    Generable,
    GenerableDecoratorError,
    GeneratedContent,
    GenerationGuide,
    GenerationID,
    GenerationSchema,
    Property,
    generable,
    guide,
    schema_for,
)
from tests.session.schema.enforced import accepts


@generable("Something with a seed")
class Fruit:
    name: str = guide("What it is called")
    seeds: int = guide(range=(0, 10))


@generable
class Bowl:
    fruit: Fruit
    more: list[Fruit]
    since: Optional[date] = None  # noqa: UP045


def bare() -> Any:
    @generable
    class Pip:
        size: int

    return Pip


def called() -> Any:
    @generable()
    class Pip:
        size: int

    return Pip


def described() -> Any:
    @generable("Small")
    class Pip:
        size: int

    return Pip


def over_dataclass() -> Any:
    @generable
    @dataclass(frozen=True, slots=True)
    class Pip:
        size: int

    return Pip


def under_dataclass() -> Any:
    @dataclass
    @generable("Small")
    class Pip:
        size: int

    return Pip


@pytest.mark.parametrize("make", [bare, called, described, over_dataclass, under_dataclass])
def test_every_way_to_write_the_decorator(make: Any) -> None:
    kind = make()
    assert dataclasses.is_dataclass(kind)
    assert isinstance(kind, Generable) and isinstance(kind(3), Generable)
    assert kind(3).generated_content.value() == {"size": 3}
    assert kind._from_generated_content(GeneratedContent({"size": 4})) == kind(4)
    assert kind._generable is True
    assert kind._generable_description == ("Small" if make in (described, under_dataclass) else None)
    assert kind.generation_schema().to_dict().get("description") == kind._generable_description


@pytest.mark.parametrize("thing", [int, 3, "a", dataclass, Generable, None, enum.Enum])
def test_what_is_not_generable(thing: Any) -> None:
    assert not isinstance(thing, Generable)


def test_inheriting_from_the_protocol_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Generable.*decorator"):

        class Wrong(Generable):
            name: str


def test_nested_content_apple_fails() -> None:
    bowl = Bowl(Fruit("apple", 5), [Fruit("pear", 3)], date(2026, 1, 2))
    content = bowl.generated_content
    assert content.to_json() == (
        '{"fruit":{"name":"apple","seeds":5},"more":[{"name":"pear","seeds":3}],"since":"2026-01-02"}'
    )
    assert Bowl._from_generated_content(content) == bowl
    assert isinstance(bowl, Generable)


def test_a_check_of_the_protocol_does_not_run_properties_apple_fails() -> None:
    bowl = Bowl(Fruit("apple", 5), [], since=object())  # type: ignore[arg-type]
    assert isinstance(bowl, Generable)


def test_absent_optionals_are_left_out_of_the_content_apple_fails() -> None:
    assert "since" not in Bowl(Fruit("a", 1), []).generated_content.value()


def test_defaults_fill_what_is_not_there() -> None:
    @generable
    class WithDefaults:
        name: str
        tags: list[str] = field(default_factory=lambda: ["a"])
        data: dict = field(default_factory=dict)
        note: str | None = "none"

    assert WithDefaults.generation_schema().to_dict()["required"] == ["name", "tags", "data"]
    made = WithDefaults._from_generated_content(GeneratedContent({"name": "x"}))
    assert made == WithDefaults("x", ["a"], {}, "none")


def test_a_missing_field_is_named_apple_fails() -> None:
    with pytest.raises(DecodingFailureError, match=r"fruit\.seeds is missing") as caught:
        Bowl._from_generated_content(GeneratedContent({"fruit": {"name": "a"}, "more": []}))
    assert '"name":"a"' in caught.value.raw


def test_inheritance_apple_fails() -> None:
    @generable
    class Citrus(Fruit):
        sour: bool

    assert [one.name for one in Citrus.generation_schema().properties] == ["name", "seeds", "sour"]
    schema = schema_for(Citrus)
    assert schema.to_dict()["properties"]["seeds"]["maximum"] == 10
    assert schema.instance(schema.read('{"name":"l","seeds":1,"sour":true}')) == Citrus("l", 1, True)
    assert Citrus.PartiallyGenerated is not Fruit.PartiallyGenerated
    assert "sour" not in Fruit.generation_schema().to_dict()["properties"]


def test_classes_of_a_function_may_refer_to_each_other_apple_fails() -> None:
    @generable
    class Inner:
        of: int

    @generable
    class Outer:
        inner: list[Inner]
        again: Outer | None

    schema = schema_for(Outer)
    text = '{"inner":[{"of":1}],"again":{"inner":[]}}'
    assert schema.instance(schema.read(text)) == Outer([Inner(1)], Outer([], None))


def test_a_generable_enum_apple_fails() -> None:
    @generable("How it tastes")
    class Taste(enum.Enum):
        SWEET = "sweet"
        SOUR = "sour"

    @generable
    class Bite:
        taste: Taste
        how: Literal["raw", "cooked"]

    assert isinstance(Taste.SWEET, Generable)
    assert Taste.generation_schema().to_dict() == {
        "type": "string",
        "description": "How it tastes",
        "enum": ["sweet", "sour"],
    }
    schema = schema_for(Bite)
    assert schema.instance(schema.read('{"taste":"sour","how":"raw"}')) == Bite(Taste.SOUR, "raw")
    assert Bite(Taste.SWEET, "raw").generated_content.value() == {"taste": "sweet", "how": "raw"}


def test_a_generable_pydantic_model() -> None:
    @generable("A person")
    class Person(pydantic.BaseModel):
        name: str
        age: int = pydantic.Field(ge=0)

    assert isinstance(Person(name="a", age=1), Generable)
    schema = Person.generation_schema()
    assert schema.to_dict()["description"] == "A person"
    assert schema.instance(schema.read('{"name":"a","age":3}')) == Person(name="a", age=3)
    assert Person(name="a", age=1).generated_content.value() == {"name": "a", "age": 1}


def test_the_twin_for_half_made_values() -> None:
    twin = Fruit.PartiallyGenerated
    empty = twin()
    assert (empty.name, empty.seeds) == (None, None)
    assert isinstance(empty.id, GenerationID)
    assert twin(name="a") == twin(name="a")
    assert twin.__name__ == "FruitPartiallyGenerated"


def test_the_twin_is_made_of_content_apple_fails() -> None:
    content = GeneratedContent({"name": "ap"})
    half = Fruit.PartiallyGenerated._from_generated_content(content)
    assert (half.name, half.seeds, half.id) == ("ap", None, content.id)


def test_a_field_named_id_is_the_users_own() -> None:
    @generable
    class Row:
        id: int
        text: str

    schema = schema_for(Row)
    half = schema.partial('{"id":3,"te')
    assert half is not None and half.content.id == 3
    assert schema.instance(schema.read('{"id":3,"text":"a"}')) == Row(3, "a")


def test_no_types_no_fields() -> None:
    with pytest.raises(GenerableDecoratorError, match="Untyped") as caught:

        @generable
        class Untyped:
            name = ""

    assert isinstance(caught.value, InvalidGenerationSchemaError)
    assert "name: str" in caught.value.message and caught.value.hint


def test_a_mutable_default_is_refused_with_an_example() -> None:
    with pytest.raises(GenerableDecoratorError, match="Mutable") as caught:

        @generable
        class Mutable:
            tags: list[str] = []

    assert "default_factory" in caught.value.message


def test_a_type_that_nobody_knows_is_refused_at_once() -> None:
    with pytest.raises(GenerableDecoratorError, match="type hints of Lost") as caught:

        @generable
        class Lost:
            of: Nowhere  # type: ignore[name-defined]  # noqa: F821

    assert "Nowhere" in caught.value.message


@pytest.mark.parametrize("thing", [lambda: None, 3, [1]])
def test_only_classes_can_be_decorated(thing: Any) -> None:
    with pytest.raises(GenerableDecoratorError, match="classes"):
        generable(thing)
    with pytest.raises(GenerableDecoratorError, match="classes"):
        generable("words")(thing)


def test_a_class_that_says_itself_how_it_is_made() -> None:
    class Money:
        def __init__(self, cents: int) -> None:
            self.cents = cents

        @classmethod
        def generation_schema(cls) -> Any:
            return GenerationSchema("Money", properties=[Property("c", int, guides=[GenerationGuide.minimum(1)])])

        @classmethod
        def _from_generated_content(cls, content: GeneratedContent) -> Money:
            return cls(content.value(int, for_property="c"))

        @property
        def generated_content(self) -> GeneratedContent:
            return GeneratedContent({"c": self.cents})

    schema = schema_for(list[Money])
    assert accepts(schema, '[{"c":3}]') and not accepts(schema, '[{"c":0}]')
    made = schema.instance(schema.read('[{"c":3}]'))
    assert [one.cents for one in made] == [3]
    assert schema.shape.write(made) == [{"c": 3}]
