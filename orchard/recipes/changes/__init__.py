"""Changes of a run by name, as `--with NAME:key=value` asks for them: functions from one run's config to another's.

    @change
    def ema(run: Run.Config, decay: float = 0.999) -> Run.Config:
        \"\"\"Keep an average of the weights, and leave that.\"\"\"

A change is found by being in a file of this folder. It may touch anything in the run: an adapter, the tree of a fresh model
(`train.model`), or a base's tree before its weights are read (`rewrites`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, TypeVar

from orchard.core.errors import UsageError
from orchard.recipes.base import nearest

if TYPE_CHECKING:
    from orchard.recipes.run import Run

F = TypeVar("F", bound="Callable[..., Run.Config]")
_known: dict[str, Callable[..., Any]] = {}


class UnknownChange(UsageError):
    """No change has that name."""

    code = "unknown-change"


def change(function: F) -> F:
    """Register a change under its function's name, with `-` for `_`."""
    _known[function.__name__.replace("_", "-")] = function
    return function


def changes() -> dict[str, Callable[..., Run.Config]]:
    """All changes, by name."""
    _import_all()
    return dict(sorted(_known.items()))


def get_change(name: str) -> Callable[..., Run.Config]:
    known = changes()
    if name not in known:
        raise UnknownChange(f"nothing to train with is called {name!r}", hint=nearest(name, known))
    return known[name]


@cache
def _import_all() -> None:
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
