"""Plans: `share-kv heal qat:bits=2,embedding=4`, the name of a ready one, or a file of JSON, as a list of steps.

A file holds a list of steps, or an object: {"steps": […], "budget": "3.2bpw", "stop": "loss<1.08", "tokens": "20M"}. A step in it
is a text as on the command line, or an object: {"step": "qat", "bits": 2}.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchard.core.config_parse import BadSetting, parsed, split_list
from orchard.core.errors import ConfigError, UsageError
from orchard.recipes.base import nearest
from orchard.recipes.compressing.bounds import Budget, Rule, count_of, rules
from orchard.recipes.compressing.ready import READY
from orchard.recipes.compressing.step import Step
from orchard.recipes.compressing.steps import UnknownStep, get_step, steps

_FIELDS = ("steps", "budget", "stop", "tokens")
_LONGEST = 1 << 20


class BadPlan(UsageError):
    """A plan that cannot be carried out: which step, and why."""

    code = "bad-plan"


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]
    budget: Budget | None = None
    stop: tuple[Rule, ...] = ()
    tokens: int | None = None

    @property
    def words(self) -> list[str]:
        return [step.words for step in self.steps]

    @property
    def learns(self) -> bool:
        return any(step.lessons is not None for step in self.steps)

    def tokens_of(self, total: int) -> list[int]:
        """What each step learns from, of `total` tokens: by shares, but for steps that say how many they want."""
        shares = [one.lessons.share if one.lessons and one.lessons.tokens is None else 0.0 for one in self.steps]
        whole = sum(shares) or 1.0
        return [
            (one.lessons.tokens or round(total * share / whole)) if one.lessons is not None else 0
            for one, share in zip(self.steps, shares, strict=True)
        ]


def read_plan(
    words: str | Sequence[str],
    *,
    budget: str | None = None,
    stop: str | Iterable[str] = (),
    tokens: str | int | None = None,
) -> Plan:
    """A plan from words. What is given beside them counts more than what a ready plan or a file says."""
    every = [words] if isinstance(words, str) else list(words)
    if not every:
        raise BadPlan("a plan without steps", hint="name a ready plan (" + ", ".join(READY) + ") or steps")
    found: dict[str, Any] = {"steps": []}
    for word in every:
        more = _word(word)
        found["steps"] += more.pop("steps")
        for name, value in more.items():
            if found.get(name) not in (None, value):
                raise BadPlan(f"two plans with a {name} of their own", hint=f"say which: --{name}")
            found[name] = value
    asked = stop or found.get("stop") or ()
    many = tokens if tokens is not None else found.get("tokens")
    size = budget if budget is not None else found.get("budget")
    return Plan(
        steps=tuple(found["steps"]),
        budget=None if size is None else Budget.parse(str(size)),
        stop=rules(asked) if asked else (),
        tokens=None if many is None else count_of(many),
    )


def made(name: str, settings: Mapping[str, Any]) -> Step:
    """A step by name, with settings of the types that it declares."""
    words = name + (":" if settings else "") + ",".join(f"{key}={_shown(value)}" for key, value in settings.items())
    function = get_step(name, tuple(READY))
    try:
        step = function(**settings)
    except (ConfigError, UsageError) as error:
        raise BadPlan(f"{words}: {error.message}", hint=error.hint) from error
    return replace(step, name=name, words=words)


def parameters(function: Callable[..., Step]) -> dict[str, tuple[inspect.Parameter, str]]:
    """The arguments of a step, each with the line of the docstring about it."""
    told = dict(re.findall(r"^(\w+): (.+)$", inspect.getdoc(function) or "", re.MULTILINE))
    return {name: (one, told.get(name, "")) for name, one in inspect.signature(function).parameters.items()}


# Inside -----------------------------------------------------------------------------------------------------------------


def _word(word: str) -> dict[str, Any]:
    if not isinstance(word, str) or not word.strip():
        raise BadPlan(f"{word!r} is no step", hint="write name or name:key=value,…")
    name, colon, rest = word.strip().partition(":")
    if not colon and name in READY:
        ready = READY[name]
        inside = [step for text in ready.steps for step in _word(text)["steps"]]
        return {"steps": inside, "budget": ready.budget}
    if word.endswith(".json"):
        return _file(Path(word))
    known = {key: str(one.annotation) for key, (one, _) in parameters(get_step(name, tuple(READY))).items()}
    settings: dict[str, Any] = {}
    for pair in split_list(rest):
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise BadPlan(f"{name}: {pair!r} is no setting", hint=f"write key=value; {_takes(known)}")
        _check_key(name, key, known)
        if key in settings:
            raise BadPlan(f"{name}: {key} is given twice", hint="give it once")
        try:
            settings[key] = parsed(text.strip(), known[key], f"{name}: {key}")
        except BadSetting as error:
            raise BadPlan(error.message, hint=error.hint) from error
    return {"steps": [made(name, settings)]}


def _file(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LONGEST:
            raise BadPlan(f"{path} is too long for a plan", hint="name a file of steps")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadPlan(f"{path} cannot be read: {error.strerror}", hint="name a file of steps in JSON") from error
    except (ValueError, RecursionError) as error:
        raise BadPlan(f"{path} is no JSON: {error}", hint='write a list of steps: ["share-kv", "heal"]') from error
    facts = {"steps": data} if isinstance(data, list) else data
    if not isinstance(facts, dict) or not isinstance(facts.get("steps"), list) or not facts["steps"]:
        raise BadPlan(f"{path} holds no list of steps", hint='write ["share-kv", "heal"], or {"steps": […]}')
    unknown = sorted(facts.keys() - set(_FIELDS))
    if unknown:
        raise BadPlan(f"{path}: a plan has no {unknown[0]!r}", hint=nearest(unknown[0], _FIELDS))
    found = {**facts, "steps": []}
    for number, item in enumerate(facts["steps"], 1):
        try:
            more = _item(item)
        except UsageError as error:
            kind = UnknownStep if isinstance(error, UnknownStep) else BadPlan
            raise kind(f"{path}, step {number}: {error.message}", hint=error.hint) from error
        found["steps"] += more
    return found


def _item(item: Any) -> list[Step]:
    if isinstance(item, str) and not item.endswith(".json"):
        found: list[Step] = _word(item)["steps"]
        return found
    if not isinstance(item, dict) or not isinstance(item.get("step"), str):
        raise BadPlan(f"{json.dumps(item)[:80]} is no step", hint='write "qat:bits=2", or {"step": "qat", "bits": 2}')
    settings = {key.replace("-", "_"): value for key, value in item.items() if key != "step"}
    function = get_step(item["step"], tuple(READY))
    known = {key: str(one.annotation) for key, (one, _) in parameters(function).items()}
    for key, value in settings.items():
        _check_key(item["step"], key, known)
        settings[key] = parsed(_shown(value), known[key], f"{item['step']}: {key}")
    return [made(item["step"], settings)]


def _check_key(name: str, key: str, known: Mapping[str, str]) -> None:
    if key not in known:
        raise BadPlan(f"{name} takes no {key!r}", hint=nearest(key, known) if known else _takes(known))


def _shown(value: Any) -> str:
    """A value as a plan writes it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return value if isinstance(value, str) else json.dumps(value)


def _takes(known: Iterable[str]) -> str:
    names = ", ".join(known)
    return f"it takes {names}" if names else "it takes nothing"


def names() -> list[str]:
    """Everything that may stand in a plan."""
    return [*READY, *steps()]
