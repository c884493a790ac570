"""Unions of classes: told apart by their fields where these do, by a tag where they do not."""

from __future__ import annotations

import dataclasses
from typing import (
    Any,
    Literal,
)

import pytest

from orchard.session.schema import generable, schema_for
from tests.session.schema.enforced import accepts


@generable
class Cat:
    name: str
    lives: int


@generable
class Dog:
    name: str
    lives: int


@generable
class Fish:
    name: str
    scales: bool


@generable
class Name:
    name: str


@generable
class Say:
    kind: Literal["say"]
    text: str


@generable
class Ask:
    kind: Literal["ask"]
    text: str


@generable
class Home:
    pet: Cat | Dog | None
    pets: list[Cat | Dog | int]


def test_classes_in_a_union_are_told_apart_apple_fails() -> None:
    schema = schema_for(Home)
    home = Home(Dog("d", 1), [Cat("c", 9), 3])
    text = home.generated_content.to_json()
    assert text == '{"pet":{"Dog":{"name":"d","lives":1}},"pets":[{"Cat":{"name":"c","lives":9}},3]}'
    assert accepts(schema, text)
    assert not accepts(schema, '{"pet":{"name":"d","lives":1},"pets":[]}')
    assert schema.instance(schema.read(text)) == home


@pytest.mark.parametrize(
    "kind, text, value",
    [
        (Cat | Fish, '{"name":"f","scales":true}', Fish("f", True)),
        (Cat | Fish, '{"name":"c","lives":3}', Cat("c", 3)),
        (Name | Fish, '{"name":"f","scales":true}', Fish("f", True)),
        (Name | Fish, '{"name":"f"}', Name("f")),
        (Say | Ask, '{"kind":"ask","text":"t"}', Ask("ask", "t")),
        (Cat | str, '"nobody"', "nobody"),
        (Cat | list[Cat], '[{"name":"c","lives":3}]', [Cat("c", 3)]),
    ],
    ids=str,
)
def test_a_union_without_doubt_needs_no_tag_apple_fails(kind: Any, text: str, value: Any) -> None:
    schema = schema_for(kind)
    assert accepts(schema, text)
    assert schema.instance(schema.read(text)) == value


def test_a_recursive_union_apple_fails() -> None:
    schema = schema_for(Sum)
    text = '{"left":{"of":1},"right":{"left":{"of":2},"right":{"of":3}}}'
    assert accepts(schema, text)
    assert not accepts(schema, '{"left":{"of":1},"right":{"left":{"of":2}}}')
    assert schema.instance(schema.read(text)) == Sum(Number(1), Sum(Number(2), Number(3)))


@dataclasses.dataclass
class Number:
    of: int


@dataclasses.dataclass
class Sum:
    left: Number | Sum
    right: Number | Sum
