"""Golden dumps: whether a stored text of every tree notices each default that somebody changes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from orchard.core.config import REQUIRED, Config

_PACKAGES = ("orchard.cache", "orchard.nn", "orchard.models")
Dumps = dict[str, str]


def kinds() -> list[type[Config]]:
    """Every config class of the modules that models are made of."""
    for name in _PACKAGES:
        for module in walk_packages(import_module(name).__path__, f"{name}."):
            import_module(module.name)
    found: dict[str, type[Config]] = {}
    todo = [Config]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        # A slotted dataclass leaves the class it was made from behind; only the one in use is built by its owner.
        if kind.builds is not None and kind.builds.__dict__.get("Config") is kind:
            name = f"{kind.builds.__module__}:{kind.builds.__qualname__}"
            if name.startswith(_PACKAGES):
                found[name] = kind
    return [found[name] for name in sorted(found)]


def dump(tree: Config) -> str:
    """The canonical text: every field of every node, defaults too, in a fixed order."""
    return json.dumps(tree.to_dict(), sort_keys=True)


def dumps(trees: Mapping[str, Config]) -> Dumps:
    return {name: dump(tree) for name, tree in trees.items()}


def bare(found: list[type[Config]]) -> Dumps:
    """One dump of each kind of part with nothing set: it shows defaults that every model overrides."""
    return {kind.builds.__qualname__ + kind.builds.__module__: dump(kind()) for kind in found}


def another(value: Any) -> Any:
    """A value that a default could be changed to."""
    if value is REQUIRED or value is None:
        return 7
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "_changed"
    return None


@contextmanager
def changed_default(kind: type[Config], field: str, value: Any) -> Iterator[None]:
    """Inside, `kind()` fills `field` with another value, as if the class had been edited."""
    defaults: dict[str, Any] = getattr(kind.__init__, "__kwdefaults__")  # noqa: B009
    before = defaults[field]
    defaults[field] = value
    try:
        yield
    finally:
        defaults[field] = before


def changes(found: list[type[Config]]) -> Iterator[tuple[type[Config], str, Any]]:
    """Every default there is, with another value for it."""
    for kind in found:
        made = kind()
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            yield kind, field.name, another(getattr(made, field.name))


def noticed(found: list[type[Config]], make: Callable[[], Mapping[str, Config]]) -> dict[str, tuple[bool, bool]]:
    """For each default: whether the models' dumps notice a change of it, and whether all dumps together do."""
    models, parts = dumps(make()), bare(found)
    result = {}
    for kind, field, value in changes(found):
        with changed_default(kind, field, value):
            by_models = dumps(make()) != models
            by_parts = bare([kind]).items() - parts.items()
        result[f"{kind.builds.__module__}:{kind.builds.__qualname__}.{field}"] = (
            by_models,
            by_models or bool(by_parts),
        )
    return result
