"""Steps of compression by name, as a plan writes them: functions from settings to a `Step`.

    @step
    def rtn(bits: int = 4, group: int | None = 64) -> Step:
        \"\"\"Round every weight to the nearest value that its format has.\"\"\"

A step is found by being in a file of this folder. Its first line is what a list shows, its arguments are what a plan writes as
`rtn:bits=4,group=32`. Transforms are imported when a step is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from orchard.core.errors import UsageError
from orchard.recipes.base import nearest
from orchard.recipes.compressing.step import Step

F = TypeVar("F", bound=Callable[..., Step])
_known: dict[str, Callable[..., Step]] = {}


class UnknownStep(UsageError):
    """No step, and no ready plan, has that name."""

    code = "unknown-step"


def step(function: F) -> F:
    """Register a step under its function's name, with `-` for `_`."""
    _known[function.__name__.replace("_", "-")] = function
    return function


def steps() -> dict[str, Callable[..., Step]]:
    """All steps, by name."""
    _import_all()
    return dict(sorted(_known.items()))


def get_step(name: str, more: tuple[str, ...] = ()) -> Callable[..., Step]:
    """The step of a name; `UnknownStep` offers the nearest, also among `more` names."""
    known = steps()
    if name not in known:
        raise UnknownStep(f"no step is called {name!r}", hint=nearest(name, [*known, *more]))
    return known[name]


@cache
def _import_all() -> None:
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
