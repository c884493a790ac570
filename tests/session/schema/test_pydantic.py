"""Pydantic models in, validated instances out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, Optional, TypeVar

import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel

from orchard.session.errors import DecodingFailureError, InvalidGenerationSchemaError
from orchard.session.schema import generable, guide, schema_for
from tests.session.schema.enforced import accepts, compiles


class Kind(enum.Enum):
    HOME = "home"
    WORK = "work"


@generable
class Tag:
    word: str = guide(regex="[a-z]+")


class Street(BaseModel):
    model_config = ConfigDict(alias_generator=str.upper)

    name: str = Field(description="Without the number", max_length=20)
    number: int = Field(ge=1, lt=1000)


class Person(BaseModel):
    """Somebody.

    With an address.
    """

    full_name: str = Field(alias="fullName", pattern="^[A-Z]")
    street: Street
    kind: Kind = Kind.HOME
    born: date
    nickname: Optional[str] = None  # noqa: UP045
    height: float | None
    tags: set[str] = set()
    tag: Tag | None = None
    friends: list[Person] = Field(default_factory=list, max_length=3)
    balance: Decimal = Decimal("0")

    @pydantic.field_validator("full_name")
    @classmethod
    def _no_bob(cls, value: str) -> str:
        if value == "Bob":
            raise ValueError("nobody is called Bob")
        return value.title()


TEXT = (
    '{"fullName":"Ann lee","street":{"NAME":"High","NUMBER":3},"kind":"work","born":"2000-02-29","height":null,'
    '"tags":["a"],"tag":{"word":"x"},"friends":[{"fullName":"Cy","street":{"NAME":"L","NUMBER":1},"born":"2001-01-01",'
    '"height":1.5}],"balance":2.5}'
)


def test_a_model_is_read_and_validated() -> None:
    schema = schema_for(Person)
    assert compiles(schema) and accepts(schema, TEXT)
    made = schema.instance(schema.read(TEXT))
    assert isinstance(made, Person)
    assert made.full_name == "Ann Lee"  # its validator ran
    assert (made.kind, made.born, made.tags, made.tag) == (Kind.WORK, date(2000, 2, 29), {"a"}, Tag("x"))
    assert isinstance(made.friends[0], Person) and made.friends[0].height == 1.5
    assert made.balance == Decimal("2.5")


def test_the_schema_of_a_model() -> None:
    written = schema_for(Person).to_dict()
    assert written["description"] == "Somebody."
    assert written["x-order"][:3] == ["fullName", "street", "kind"]
    assert written["required"] == ["fullName", "street", "born", "height"]
    assert written["properties"]["fullName"] == {"type": "string", "pattern": "^[A-Z]"}
    assert written["properties"]["nickname"] == {"type": "string"}
    assert written["properties"]["height"] == {"anyOf": [{"type": "number"}, {"type": "null"}]}
    assert written["properties"]["friends"] == {"type": "array", "items": {"$ref": "#"}, "maxItems": 3}
    assert written["$defs"]["Street"]["properties"] == {
        "NAME": {"type": "string", "maxLength": 20, "description": "Without the number"},
        "NUMBER": {"type": "integer", "minimum": 1, "exclusiveMaximum": 1000},
    }
    assert written["$defs"]["Tag"]["properties"]["word"]["pattern"] == "[a-z]+"


@pytest.mark.parametrize(
    "old, new",
    [('"NUMBER":3', '"NUMBER":1000'), ('"Ann lee"', '"ann"'), ('"work"', '"club"'), ('{"word":"x"}', '{"word":"X"}')],
)
def test_constraints_of_models_and_of_what_is_in_them_are_enforced(old: str, new: str) -> None:
    assert not accepts(schema_for(Person), TEXT.replace(old, new))


def test_what_a_validator_refuses_is_a_decoding_failure() -> None:
    schema = schema_for(Person)
    content = schema.read(TEXT.replace("Ann lee", "Bob"))
    with pytest.raises(DecodingFailureError, match="nobody is called Bob") as caught:
        schema.instance(content)
    assert "Bob" in caught.value.raw
    assert caught.value.retryable


def test_a_refusal_inside_a_list_says_where() -> None:
    class Small(BaseModel):
        n: int

        @pydantic.model_validator(mode="after")
        def _even(self) -> Small:
            if self.n % 2:
                raise ValueError("odd")
            return self

    schema = schema_for(list[Small])
    assert [one.n for one in schema.instance(schema.read('[{"n":2}]'))] == [2]
    with pytest.raises(DecodingFailureError, match=r"\[1\] is no Small"):
        schema.instance(schema.read('[{"n":2},{"n":3}]'))


def test_a_post_init_that_refuses_is_a_decoding_failure() -> None:
    @dataclass
    class Even:
        n: int

        def __post_init__(self) -> None:
            assert self.n % 2 == 0, "odd"

    schema = schema_for(Even)
    with pytest.raises(DecodingFailureError, match="is no Even: odd"):
        schema.instance(schema.read('{"n":3}'))


def test_types_that_only_pydantic_knows() -> None:
    class Odd(BaseModel):
        site: pydantic.AnyUrl
        secret: pydantic.SecretStr
        positive: pydantic.PositiveInt
        short: Annotated[str, pydantic.StringConstraints(min_length=1, max_length=2, to_upper=True)]
        data: pydantic.Json[list[int]]

    schema = schema_for(Odd)
    assert compiles(schema)
    text = '{"site":"https://a.b/c","secret":"s","positive":1,"short":"a","data":"[1]"}'
    assert accepts(schema, text)
    assert not accepts(schema, text.replace('"positive":1', '"positive":0'))
    assert not accepts(schema, text.replace('"short":"a"', '"short":"abc"'))
    made = schema.instance(schema.read(text))
    assert (str(made.site), made.secret.get_secret_value(), made.short, made.data) == ("https://a.b/c", "s", "A", [1])


def test_root_models_and_unions_with_a_discriminator() -> None:
    class Circle(BaseModel):
        type: Literal["circle"]
        radius: float

    class Square(BaseModel):
        type: Literal["square"]
        side: float

    class Shapes(RootModel[list[Annotated[Circle | Square, Field(discriminator="type")]]]):
        pass

    schema = schema_for(Shapes)
    text = '[{"type":"square","side":2.0},{"type":"circle","radius":1.0}]'
    assert accepts(schema, text)
    made = schema.instance(schema.read(text))
    assert isinstance(made, Shapes)
    assert [type(one) for one in made.root] == [Square, Circle]


def test_models_that_could_be_confused_are_tagged() -> None:
    class Left(BaseModel):
        n: int

    class Right(BaseModel):
        n: int

    class Either(BaseModel):
        side: Left | Right

    schema = schema_for(Either)
    made = schema.instance(schema.read('{"side":{"Right":{"n":1}}}'))
    assert type(made.side) is Right


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]
    following: Page[T] | None = None


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    when: date
    kinds: tuple[Kind, ...]


def test_strict_models_and_generic_models() -> None:
    schema = schema_for(Page[Strict])
    text = '{"items":[{"when":"2024-01-02","kinds":["home"]}],"following":{"items":[]}}'
    assert accepts(schema, text)
    made = schema.instance(schema.read(text))
    assert made.items == [Strict(when=date(2024, 1, 2), kinds=(Kind.HOME,))]
    assert made.following is not None and made.following.items == []


def test_partials_of_models_use_the_names_of_python() -> None:
    half = schema_for(Person).partial('{"fullName":"Ann","street":{"NAME":"Hi')
    assert half is not None
    assert (half.content.full_name, half.content.street.name, half.content.kind) == ("Ann", "Hi", None)


def test_a_field_read_from_inside_another_is_refused() -> None:
    class Deep(BaseModel):
        a: int = Field(validation_alias=pydantic.AliasPath("x", 0))

    with pytest.raises(InvalidGenerationSchemaError, match=r"Deep\.a"):
        schema_for(Deep)


def test_a_dataclass_of_pydantic() -> None:
    @pydantic.dataclasses.dataclass
    class Pair:
        low: int = Field(ge=0)
        high: Any = None

    schema = schema_for(Pair)
    assert schema.to_dict()["properties"]["low"] == {"type": "integer", "minimum": 0}
    assert schema.instance(schema.read('{"low":1}')) == Pair(low=1)
