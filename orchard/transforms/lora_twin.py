"""Twins: a built model again, with some of its modules replaced and every tensor shared.

A twin costs no weights. What is on the way to a replaced module is copied as a shell, everything else is the same object, and
the model itself is not changed. The config tree of a twin says what it is made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError

M = TypeVar("M", bound=nn.Module)


def twin(module: M) -> M:
    """The same module again: other tables of parts, in which the same tensors and children stand."""
    made = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        made.__dict__[table] = dict(module.__dict__[table])
    return made


def replaced(model: M, makers: Mapping[str, Callable[[Any], nn.Module]]) -> M:
    """A twin in which the modules at some paths are others. Nothing on the way to them is changed in the model itself."""
    unknown = sorted(path for path in makers if not _has(model, path))
    if unknown:
        raise ConfigError(f"the model has no part called {', '.join(unknown[:3])}", hint="names are paths of modules")
    top = twin(model)
    twins: dict[str, nn.Module] = {"": top}
    for path, make in makers.items():
        *parents, last = path.split(".")
        at = ""
        for name in parents:
            below = f"{at}.{name}" if at else name
            if below not in twins:
                twins[at]._modules[name] = twins[below] = twin(twins[at].get_submodule(name))
            at = below
        twins[at]._modules[last] = make(twins[at]._modules[last])
    tree = getattr(top, "config", None)
    if isinstance(tree, BaseConfig):
        top.config = _described(tree, top, makers)  # type: ignore[assignment]
    return top


def dotted(path: str) -> str:
    """A module's path as config trees write it: numbers are places in lists."""
    return "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split(".")).removeprefix(".")


def _described(tree: BaseConfig, model: nn.Module, paths: Mapping[str, Any]) -> BaseConfig:
    """The config tree of a model some of whose parts were replaced."""
    tree = tree.clone()
    for path in paths:
        changed: Any = model.get_submodule(path)
        above, _, name = path.rpartition(".")
        setattr(tree.get(dotted(above)) if above else tree, name, changed.config.clone())
    return tree


def _has(model: nn.Module, path: str) -> bool:
    try:
        return bool(path) and model.get_submodule(path) is not None
    except AttributeError:
        return False
