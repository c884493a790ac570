"""`@frozen` makes what `@dataclass(frozen=True)` makes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest

from orchard.core.frozen import frozen


@frozen
class Point:
    kind: ClassVar[str] = "point"
    x: int
    y: int = 2
    names: tuple[str, ...] = ()

    @property
    def sum(self) -> int:
        return self.x + self.y


@frozen
class Checked:
    """Says no to negative numbers."""

    number: int
    parts: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("negative")
        object.__setattr__(self, "parts", [*self.parts, self.number])


@dataclasses.dataclass(frozen=True)
class Model:
    x: int
    y: int = 2
    names: tuple[str, ...] = ()


def test_fields_defaults_and_equality() -> None:
    assert [field.name for field in dataclasses.fields(Point)] == ["x", "y", "names"]
    assert Point(1) == Point(1, 2) == Point(x=1, y=2) != Point(1, 3)
    assert hash(Point(1)) == hash(Point(1, 2)) == hash(Model(1)) and len({Point(1), Point(1, 2)}) == 1
    assert Point(1) != Model(1) and Point.kind == "point" and Point(3).sum == 5
    assert repr(Point(1)) == repr(Model(1)).replace("Model", "Point")
    assert dataclasses.asdict(Point(1)) == dataclasses.asdict(Model(1))
    assert dataclasses.replace(Point(1), y=5) == Point(1, 5)
    match Point(1, 2):
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_nothing_changes_afterwards() -> None:
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del point.x
    assert point == Point(1)


def test_wrong_arguments() -> None:
    for wrong in (lambda: Point(), lambda: Point(1, 2, (), 4), lambda: Point(1, x=1), lambda: Point(1, z=1)):  # type: ignore[call-arg, misc]
        with pytest.raises(TypeError):
            wrong()


def test_checks_and_factories() -> None:
    assert Checked(3).parts == [3] and Checked(3).parts is not Checked(3).parts
    with pytest.raises(ValueError):
        Checked(-1)
    with pytest.raises(TypeError):

        @frozen
        class Hidden:
            a: int = dataclasses.field(default=1, repr=False)
