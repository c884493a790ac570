"""Recipes by name: functions with typed keyword arguments that return the config of a whole run.

    @recipe
    def sft(data: str, base: str = "smollm2", steps: int = 300) -> Run.Config:
        \"\"\"Fine-tune a whole model on conversations.\"\"\"

A recipe is found by being in a file of this folder. Its first line is what a list shows, its arguments are what the command line
takes as `key=value`, and nothing else has to be said about it anywhere.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, TypeVar

from orchard.core.errors import UsageError

if TYPE_CHECKING:
    from orchard.recipes.run import Run

F = TypeVar("F", bound="Callable[..., Run.Config]")
PACKAGE = "orchard.recipes"
_known: dict[str, Callable[..., Run.Config]] = {}


class UnknownRecipe(UsageError):
    """No recipe has that name."""

    code = "unknown-recipe"


def recipe(function: F) -> F:
    """Register a recipe under its function's name, with `-` for `_`."""
    name = function.__name__.replace("_", "-")
    before = _known.get(name)
    if before is not None and before.__module__ != function.__module__:
        raise ValueError(f"two recipes are called {name}: in {before.__module__} and in {function.__module__}")
    _known[name] = function
    return function


def names() -> list[str]:
    """All recipes, by name."""
    _import_all()
    return sorted(_known)


def get(name: str) -> Callable[..., Run.Config]:
    """The recipe of a name; `UnknownRecipe` offers the nearest."""
    known = names()
    if name not in known:
        raise UnknownRecipe(f"no recipe is called {name!r}", hint=nearest(name, known))
    return _known[name]


def about(function: Callable[..., Any]) -> str:
    """The first line of what a function says of itself."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: the nearest names, or all of them."""
    every = list(known)
    near = difflib.get_close_matches(name, every, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else "there are: " + ", ".join(every)


@cache
def _import_all() -> None:
    for module in iter_modules(import_module(PACKAGE).__path__):
        if not module.ispkg:
            import_module(f"{PACKAGE}.{module.name}")
