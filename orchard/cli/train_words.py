"""The words after `orchard train RECIPE` as a run's config, and what recipes say of themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.config_parse import BadSetting, assigned, parsed, split_list
from orchard.core.errors import ConfigError, UsageError
from orchard.recipes.base import nearest

if TYPE_CHECKING:
    from orchard.recipes.run import Run

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*=")


@dataclass(frozen=True)
class Parameter:
    """One argument of a recipe or of a change."""

    name: str
    kind: str
    default: Any
    about: str

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


def parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The arguments that a person may give, with the lines of the docstring about them."""
    doc = inspect.getdoc(function) or ""
    told = {match[1]: match[2] for match in re.finditer(r"^(\w+): (.+)$", doc, re.MULTILINE)}
    given = inspect.signature(function).parameters.values()
    return {
        one.name: Parameter(one.name, str(one.annotation), one.default, told.get(one.name, ""))
        for one in given
        if one.name != "run"
    }


def explanation(function: Callable[..., Any]) -> str:
    """The docstring without the lines about arguments."""
    doc = inspect.getdoc(function) or ""
    return re.sub(r"^\w+: .+\n?", "", doc, flags=re.MULTILINE).strip()


def config_of(
    name: str,
    words: Sequence[str] = (),
    *,
    changes: Sequence[str] = (),
    settings: Sequence[str] = (),
    seed: int | None = None,
    device: str | None = None,
    on_bad: str | None = None,
) -> Run.Config:
    """The whole config, complete: recipe, then `--with`, then `--set`. What is wrong with it is wrong usage."""
    from orchard.recipes.base import get
    from orchard.recipes.files import leave_out_bad

    function = get(name)
    given = recipe_arguments(name, function, words)
    if seed is not None and "seed" in parameters(function):
        given.setdefault("seed", seed)
    try:
        cfg: Run.Config = function(**given)
        for one in changes:
            cfg = changed(cfg, one)
        for setting in settings:
            cfg = assigned(cfg, setting)
        if on_bad is not None:
            for source in (cfg.train.source, *cfg.train.held_out.values()):
                leave_out_bad(source, on_bad)
        if seed is not None:
            cfg.train.seed = seed
        if device is not None:
            cfg.device = device
        return cfg.complete()
    except ConfigError as error:
        raise BadSetting(error.message, hint=error.hint) from error


def recipe_arguments(name: str, function: Callable[..., Any], words: Iterable[str]) -> dict[str, Any]:
    """`key=value` words by the recipe's own types; all other words are paths, for its first argument."""
    known = parameters(function)
    paths: list[str] = []
    pairs: list[str] = []
    for word in words:
        (pairs if _KEY.match(word) and not Path(word).exists() else paths).append(word)
    given = _values(f"the recipe {name}", known, pairs)
    first = next(iter(known), None)
    if paths:
        if first is None or first != "data":
            raise UsageError(f"the recipe {name} reads no files", hint=_takes(known))
        if "data" in given:
            raise UsageError("data is named twice", hint="give paths, or data=PATH")
        given["data"] = paths[0] if len(paths) == 1 else paths
    missing = [one.name for one in known.values() if one.required and one.name not in given]
    if missing:
        asked = "PATH" if missing == ["data"] else " ".join(f"{one}=…" for one in missing)
        raise UsageError(f"{name} needs {', '.join(missing)}", hint=f"orchard train {name} {asked}; --list says more")
    return given


def changed(cfg: Run.Config, words: str) -> Run.Config:
    """Apply one `NAME` or `NAME:key=value,…`."""
    from orchard.recipes.changes import get_change

    name, _, rest = words.partition(":")
    function = get_change(name)
    return function(cfg, **_values(f"--with {name}", parameters(function), split_list(rest)))


def _values(whose: str, known: dict[str, Parameter], pairs: Iterable[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.replace("-", "_")
        if not equals:
            raise UsageError(f"{pair!r} is no setting of {whose}", hint="write key=value; " + _takes(known))
        if key not in known:
            raise UsageError(f"{whose} takes no {key!r}", hint=nearest(key, known) if known else _takes(known))
        if key in given:
            raise UsageError(f"{key} is given twice", hint="give it once")
        given[key] = parsed(text, known[key].kind, key)
    return given


def _takes(known: dict[str, Parameter]) -> str:
    return "it takes: " + ", ".join(known) if known else "it takes nothing"
