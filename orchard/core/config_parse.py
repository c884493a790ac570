"""Settings as a command line writes them: `train.optim.lr=1e-3`, read by the type that the field declares.

Annotations are read as text and never evaluated. What is not known, or is of another type, is a `BadSetting` that says what was
expected and which paths come near.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from orchard.core.config import Config
from orchard.core.config_text import from_dict
from orchard.core.errors import ConfigError, UsageError

C = TypeVar("C", bound=Config)
_WORDS = {"true": True, "false": False}
_CONTAINERS = ("list", "Sequence", "tuple", "dict")
_SIMPLE = {"int": "a whole number", "float": "a number", "bool": "true or false", "None": "none", "str": "a text"}
_MANY = {"int": "whole numbers", "float": "numbers", "bool": "true and false", "str": "texts"}
_NONE = object()
"""What a reader gives for a text that is not of its type."""


class BadSetting(UsageError):
    """A setting names nothing, or its value is of another type than the field."""

    code = "bad-setting"


def assigned(cfg: C, setting: str) -> C:
    """A copy of a tree with one setting, `path=value`. `*` in the path stands for anything: all that match are set."""
    path, equals, text = setting.partition("=")
    path = path.strip()
    if not equals or not path:
        raise BadSetting(f"{setting!r} is no setting", hint="write path=value, as in train.steps=500")
    known = dict(_fields(cfg))
    asked = [one for one in known if fnmatch.fnmatchcase(one, path.replace("[", "[[]"))] if "*" in path else [path]
    if not asked or any(one not in known for one in asked):
        raise BadSetting(f"{type(cfg).__qualname__.partition('.')[0]} has no {path!r}", hint=_hint(cfg, path, known))
    for one in asked:
        parent, annotation = known[one]
        try:
            cfg = cfg.set(one, _value(text, annotation, one, parent, cfg.get(one)))
        except ConfigError as error:
            raise BadSetting(error.message, hint=error.hint) from error
    return cfg


def parsed(text: str, annotation: str, what: str) -> Any:
    """A text as a value of an annotated type: numbers, true, false, none, text, and lists and tables in JSON."""
    kinds = _alternatives(annotation)
    for kind in sorted(kinds, key=lambda kind: kind == "str"):  # anything is a text, so that comes last
        found = _read(text, kind)
        if found is not _NONE:
            return found
    expected = " or ".join(dict.fromkeys(_expected(kind) for kind in kinds))
    raise BadSetting(f"{what} is {text!r}", hint=f"it has to be {expected}")


def near(path: str, known: list[str]) -> str:
    """A hint: paths that end the same, or look alike."""
    last = path.rpartition(".")[2]
    same = [one for one in known if one.rpartition(".")[2] == last and not re.search(r"\[(?!0\])", one)]
    alike = difflib.get_close_matches(path, known, n=3, cutoff=0.6)
    ends = {one.rpartition(".")[2] for one in known}
    spelled = difflib.get_close_matches(last, sorted(ends), n=1)
    more = [one for one in known if one.rpartition(".")[2] in spelled and not re.search(r"\[(?!0\])", one)]
    found = list(dict.fromkeys([*sorted(same, key=len)[:3], *alike, *sorted(more, key=len)[:2]]))[:3]
    return f"did you mean {' or '.join(found)}?" if found else "--show prints the whole tree"


def _hint(cfg: Config, path: str, known: dict[str, tuple[Config, str]]) -> str:
    """Near paths; or that the part on the way is not there yet."""
    above = path.rpartition(".")[0]
    if above in known and cfg.get(above) is None:
        parts = [one.removesuffix(".Config") for one in _alternatives(known[above][1]) if one.endswith(".Config")]
        return f"{above} is none; first set {above}={parts[0] if parts else 'a part by name'}"
    return near(path, list(known))


# Inside -----------------------------------------------------------------------------------------------------------------


def _fields(cfg: Config) -> Iterator[tuple[str, tuple[Config, str]]]:
    """Every field of a tree by its path, with the node that has it and how it is declared."""
    for path, node in cfg.walk():
        for field in dataclasses.fields(node):  # type: ignore[arg-type]
            kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "str")
            yield f"{path}.{field.name}" if path else field.name, (node, kind)


def _value(text: str, annotation: str, path: str, parent: Config, now: Any) -> Any:
    parts = [kind for kind in _alternatives(annotation) if kind.endswith("Config")]
    if not parts:
        return parsed(text, annotation, path)
    if text.lower() == "none" and "None" in _alternatives(annotation):
        return None
    made = _part(text, parts, parent)
    if made is None:
        inside = [field.name for field in dataclasses.fields(now)] if isinstance(now, Config) else []  # type: ignore[arg-type]
        named = [part.removesuffix(".Config") for part in parts if part != "BaseConfig"]
        hint = f"set its own fields ({', '.join(inside)}), or " if inside else ""
        wanted = " or ".join(named) or "a part by name, such as orchard.train.optim:Muon"
        raise BadSetting(f"{path} is {text!r}", hint=f"{hint}give {wanted}")
    return now.derive(type(made)) if isinstance(now, Config) else made


def _part(text: str, parts: list[str], parent: Config) -> Config | None:
    """A config by name: of the class that the field declares, or `module:Class`."""
    for part in parts:
        name = part.removesuffix(".Config")
        found = getattr(sys.modules.get(type(parent).__module__), name, None)
        if text == name and isinstance(getattr(found, "Config", None), type):
            return found.Config()  # type: ignore[union-attr]
    if ":" not in text:
        return None
    made: Config = from_dict({"kind": text if text.startswith("orchard.") else f"orchard.{text}"})
    return made


def _alternatives(annotation: str) -> list[str]:
    """`int | list[str | int] | None` → its three parts."""
    parts, depth = [""], 0
    for character in annotation.replace(" ", ""):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _read(text: str, kind: str) -> Any:
    head, _, inner = kind.partition("[")
    if head in _CONTAINERS:
        return _container(text, head, inner.removesuffix("]"))
    readers: dict[str, Callable[[str], Any]] = {
        "None": lambda text: None if text.lower() == "none" else _NONE,
        "bool": lambda text: _WORDS.get(text.lower(), _NONE),
        "int": _whole,
        "float": _number,
        "str": lambda text: text,
    }
    return readers[kind](text) if kind in readers else _NONE


def _number(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return _NONE
    return value if math.isfinite(value) else _NONE


def _whole(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        value = _number(text)  # 1e6 is a whole number, too
        return int(value) if value is not _NONE and value == int(value) else _NONE


def _container(text: str, head: str, inner: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return _NONE
    if head == "dict":
        kind = inner.partition(",")[2] or "str"
        return value if isinstance(value, dict) and all(_fits(one, kind) for one in value.values()) else _NONE
    if not isinstance(value, list):
        return _NONE
    kinds = inner.removesuffix(",...").split(",") if head == "tuple" else [inner]
    fixed = head == "tuple" and not inner.endswith("...")
    if fixed and len(kinds) != len(value):
        return _NONE
    wanted = kinds if fixed else kinds * len(value)
    if not all(_fits(one, kind) for one, kind in zip(value, wanted)):
        return _NONE
    return tuple(value) if head == "tuple" else value


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value of a JSON document is of a type."""
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool, "None": type(None)}
    for kind in _alternatives(annotation):
        if kind == "Any" or (isinstance(value, bool) == (kind == "bool") and isinstance(value, kinds.get(kind, ()))):
            return True
    return False


def _expected(kind: str) -> str:
    head, _, inner = kind.partition("[")
    if head not in _CONTAINERS:
        return _SIMPLE.get(kind, kind)
    inside = inner.removesuffix("]").removesuffix(",...").split(",")
    many = f"{len(inside)} " if head == "tuple" and len(inside) > 1 else ""
    return f"a {'table' if head == 'dict' else 'list'} of {many}{_MANY.get(inside[-1], 'values')} in JSON"


def split_list(text: str) -> list[str]:
    """Cut at commas that are not inside brackets or quotes."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == '"'
        depth += 0 if quoted else {"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]
