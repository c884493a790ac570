"""Recipes: functions that return the config of a whole run, and `Run`, which does what such a config says.

Names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchard.recipes.adapter import Adapter
    from orchard.recipes.base import UnknownRecipe, get, names, recipe
    from orchard.recipes.run import Run

_HOME = {"Adapter": "adapter", "Run": "run", "UnknownRecipe": "base", "get": "base", "names": "base", "recipe": "base"}

__all__ = ["Adapter", "Run", "UnknownRecipe", "get", "names", "recipe"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
