"""Config trees as text and data: a readable dump, a plain dictionary and back, and a readable difference."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Mapping
from typing import Any

from orchard.core.config import REQUIRED, Config
from orchard.core.errors import ConfigError

KIND = "kind"
_REQUIRED_MARK = {"required": True}
_PLAIN = (str, int, float, bool, type(None))


def to_dict(cfg: Config) -> dict[str, Any]:
    """Plain data that JSON can hold; the kind of each node is written as `module:Class`."""
    if cfg.builds is None:
        raise ConfigError(f"{type(cfg).__qualname__} belongs to no class", hint="nest it in the class it builds")
    result: dict[str, Any] = {KIND: f"{cfg.builds.__module__}:{cfg.builds.__qualname__}"}
    for field in dataclasses.fields(cfg):  # type: ignore[arg-type]
        result[field.name] = _encode(getattr(cfg, field.name), field.name)
    return result


def from_dict(data: Mapping[str, Any]) -> Any:
    """Rebuild a tree. Kinds are looked up in Orchard or in modules the caller has imported, never elsewhere."""
    if not isinstance(data, Mapping) or not isinstance(data.get(KIND), str):
        raise ConfigError("this is not a config: it names no kind", hint="use what to_dict() wrote")
    kind = _lookup(data[KIND])
    names = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(data.keys() - names - {KIND})
    if unknown:
        raise ConfigError(f"{data[KIND]} has no fields {unknown}", hint="the file may come from another version")
    fields = {name: _decode(value) for name, value in data.items() if name != KIND}
    try:
        return kind(**fields)
    except TypeError as error:  # a field without a default is not there
        raise ConfigError(f"{data[KIND]}: {error}", hint="the file may come from another version") from error


def describe(cfg: Config) -> str:
    """Indented text. Equal neighbours in a list are folded into one entry such as `[0..28]`; whole numbers that count the
    entries (a layer's own number) do not stand in the way and are shown as `0..28`."""
    return "\n".join(_lines(cfg, ""))


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference between two trees."""

    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old} → {self.new}"


def diff(base: Config, other: Config) -> list[Change]:
    """What differs in `other`, by path. The same change in many list items is told once, with the items' range."""
    changes: list[tuple[str, str, str]] = []
    _compare(base, other, "", changes)
    return _fold(changes)


def _label(cfg: Config) -> str:
    return str(cfg.builds.__name__) if cfg.builds is not None else type(cfg).__name__


def _encode(value: Any, path: str) -> Any:
    if value is REQUIRED:
        return dict(_REQUIRED_MARK)
    if isinstance(value, Config):
        return to_dict(value)
    if isinstance(value, list):
        return [_encode(item, path) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, path) for item in value]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ConfigError(f"{path}: the keys of a mapping must be text", hint="JSON has no other keys")
        return {"dict": {key: _encode(item, path) for key, item in value.items()}}
    if isinstance(value, _PLAIN):
        return value
    raise ConfigError(f"{path}: a {type(value).__name__} cannot be stored in a config", hint="use text and numbers")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, Mapping):
        if value == _REQUIRED_MARK:
            return REQUIRED
        if KIND in value:
            return from_dict(value)
        if set(value) == {"tuple"} and isinstance(value["tuple"], list):
            return tuple(_decode(item) for item in value["tuple"])
        if set(value) == {"dict"} and isinstance(value["dict"], Mapping):
            return {key: _decode(item) for key, item in value["dict"].items()}
        raise ConfigError("a mapping in a config must say what it is", hint="use what to_dict() wrote")
    return value


def _lookup(name: str) -> type:
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None and module_name.split(".")[0] == "orchard":
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ConfigError(f"no part called {name}", hint="the file may come from another version") from error
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr() would let a lazy module import something
    kind = getattr(found, "Config", None)
    if not (isinstance(kind, type) and issubclass(kind, Config) and kind.builds is found):
        raise ConfigError(f"no part called {name}", hint="import the module that defines it first")
    return kind


def _lines(value: Any, indent: str, last: Any = None) -> list[str]:
    """`last` is the end of a folded run: where it differs from `value` (numbers that count up), both ends are shown."""
    deeper = indent + "  "
    if isinstance(value, Config):
        lines = [_label(value)]
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            end = getattr(last, field.name) if last is not None else None
            first, *rest = _lines(getattr(value, field.name), deeper, end)
            lines += [f"{deeper}{field.name}: {first}", *rest]
        return lines
    if isinstance(value, (list, tuple, dict)) and any(isinstance(item, Config) for item in _items_of(value)):
        lines = [f"{len(value)} items"]
        entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        start = 0
        while start < len(entries):
            end = start
            while end + 1 < len(entries):
                later = entries[end + 1][1]
                if not _continues(entries[start][1], later, end + 1 - start) or not _continues(
                    entries[end][1], later, 1
                ):
                    break
                end += 1
            name = f"[{entries[start][0]}]" if start == end else f"[{entries[start][0]}..{entries[end][0]}]"
            first, *rest = _lines(entries[start][1], deeper, entries[end][1] if end > start else None)
            lines += [f"{deeper}{name} {first}", *rest]
            start = end + 1
        return lines
    return [_short(value) if last is None or last == value else f"{_short(value)}..{_short(last)}"]


def _continues(first: Any, later: Any, distance: int) -> bool:
    """Whether `later` is what `first` is, `distance` places on: equal, but for whole numbers that count the places."""
    if isinstance(first, Config) and type(first) is type(later):
        names = [field.name for field in dataclasses.fields(first)]  # type: ignore[arg-type]
        return all(_continues(getattr(first, name), getattr(later, name), distance) for name in names)
    if type(first) is int and type(later) is int:
        return later in (first, first + distance)
    return bool(first == later)


def _items_of(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _short(value: Any) -> str:
    if isinstance(value, Config):
        plain = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}  # type: ignore[arg-type]
        told = [f"{name}={item!r}" for name, item in plain.items() if isinstance(item, _PLAIN) and item is not None]
        text = f"{_label(value)}({', '.join(told)})" if told else _label(value)
    else:
        text = repr(value)
    return text if len(text) <= 100 else text[:97] + "…"


def _compare(old: Any, new: Any, path: str, changes: list[tuple[str, str, str]]) -> None:
    if isinstance(old, Config) and type(old) is type(new):
        for field in dataclasses.fields(old):  # type: ignore[arg-type]
            name = f"{path}.{field.name}" if path else field.name
            _compare(getattr(old, field.name), getattr(new, field.name), name, changes)
    elif isinstance(old, (list, tuple)) and type(old) is type(new):
        for i in range(max(len(old), len(new))):
            if i >= len(old):
                changes.append((f"{path}[{i}]", "nothing", _short(new[i])))
            elif i >= len(new):
                changes.append((f"{path}[{i}]", _short(old[i]), "nothing"))
            else:
                _compare(old[i], new[i], f"{path}[{i}]", changes)
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key not in old:
                changes.append((f"{path}[{key}]", "nothing", _short(new[key])))
            elif key not in new:
                changes.append((f"{path}[{key}]", _short(old[key]), "nothing"))
            else:
                _compare(old[key], new[key], f"{path}[{key}]", changes)
    elif old is not new and old != new:
        changes.append((path, _short(old), _short(new)))


def fold_paths(paths: list[str]) -> list[str]:
    """The same paths in fewer words: `layers[0].dim, layers[1].dim` becomes `layers[0..1].dim`."""
    return [change.path for change in _fold([(path, "", "") for path in paths])]


def _fold(changes: list[tuple[str, str, str]]) -> list[Change]:
    """Join changes that differ only in the first list index of their path."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    plain: dict[tuple[str, str, str], None] = {}
    order: list[tuple[str, str, str]] = []
    for path, old, new in changes:
        match = re.search(r"\[(\d+)\]", path)
        key = (path[: match.start()] + "[*]" + path[match.end() :] if match else path, old, new)
        if key not in groups and key not in plain:
            order.append(key)
        if match:
            groups.setdefault(key, []).append(int(match.group(1)))
        else:
            plain[key] = None
    return [
        Change(key[0].replace("[*]", f"[{_ranges(groups[key])}]", 1) if key in groups else key[0], key[1], key[2])
        for key in order
    ]


def _ranges(numbers: list[int]) -> str:
    parts: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}..{previous}")
        if number is not None:
            start = previous = number
    return ",".join(parts)
