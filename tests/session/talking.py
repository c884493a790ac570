"""Types, tools and a ready session that the tests of sessions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchard.session.schema import generable, guide
from orchard.session.session import Session
from orchard.testing import ScriptedModel


@generable("A cat")
class Cat:
    name: str = guide("its name")
    age: int = guide("years", range=(0, 20))


@dataclass
class Point:
    x: int
    y: int


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: where
    """
    return f"sunny in {city}"


def broken(city: str) -> str:
    """A tool that fails."""
    raise KeyError(city)


def ready(*answers: Any, **settings: Any) -> tuple[Session, ScriptedModel]:
    model = ScriptedModel(answers, **settings.pop("script", {}))
    return Session(settings.pop("instructions", None), model=model, **settings), model
