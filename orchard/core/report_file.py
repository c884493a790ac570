"""Reports read back from JSON with care: a file may come from anywhere, so every field is checked and every verdict computed
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchard.core.errors import BadFile, ConfigError
from orchard.core.report import VERSION, Bound, Report, Value, Verdict

LARGEST_FILE = 64 * 2**20
_NONE = type(None)
_NUMBER = (int, float)
_SCALAR = (*_NUMBER, str, _NONE)
Fields = Mapping[str, tuple[type, ...]]
_NEEDED: Fields = {
    "version": (int,),
    "kind": (str,),
    "name": (str,),
    "created": (str,),
    "command": (str,),
    "commit": (str, _NONE),
    "seed": (int, _NONE),
    "hardware": (dict,),
    "values": (dict,),
    "claims": (list,),
}
_OPTIONAL: Fields = {
    "wall_time": (*_NUMBER, _NONE),
    "versions": (dict,),
    "series": (dict,),
    "notes": (list,),
    "config": (dict, _NONE),
}
_VALUE_NEEDED: Fields = {"value": _SCALAR}
_VALUE_OPTIONAL: Fields = {"unit": (str,), "low": (*_NUMBER, _NONE), "high": (*_NUMBER, _NONE), "note": (str,)}
_CLAIM_NEEDED: Fields = {"id": (str,), "statement": (str,), "value": _SCALAR, "bound": (str,), "passed": (bool,)}
_CLAIM_OPTIONAL: Fields = {"metric": (str,), "baseline": _SCALAR, "reason": (str,)}


def load(path: Path) -> Report:
    """The Report in a file, or `BadFile` saying what is wrong with it."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise BadFile(f"{path} is too large for a Report", hint="is this the right file?")
        data = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}", hint="check the path") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} is not JSON: {error}", hint="run the command again to write it anew") from error
    try:
        return from_dict(data)
    except BadFile as error:
        raise BadFile(f"{path}: {error.message}", hint=error.hint) from error


def from_dict(data: Any) -> Report:
    """A Report from plain data. A value may be given as a bare number."""
    if not isinstance(data, Mapping):
        raise BadFile("this is not a Report", hint="a Report is a JSON object")
    version = data.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        raise BadFile(f"a Report of version {version}, newer than {VERSION}", hint="update Orchard to read it")
    _check(data, _NEEDED, _OPTIONAL, "the Report")
    if version < 1:  # type: ignore[operator]
        raise BadFile(f"no Report has version {version}", hint="the file is damaged")
    for name in ("notes", "versions"):
        items = data.get(name, ())
        texts = items.values() if isinstance(items, Mapping) else items
        if not all(isinstance(text, str) for text in texts):
            raise BadFile(f"{name} must be text", hint="the file is damaged")
    if not all(isinstance(points, list) for points in data.get("series", {}).values()):
        raise BadFile("each series must be a list", hint="the file is damaged")
    return Report(
        **{
            **data,
            "values": {name: _value(value, name) for name, value in data["values"].items()},
            "claims": [_claim(claim) for claim in data["claims"]],
        }
    )


def _value(data: Any, name: str) -> Value:
    if not isinstance(data, Mapping):
        data = {"value": data}
    _check(data, _VALUE_NEEDED, _VALUE_OPTIONAL, f"values.{name}")
    return Value(**data)


def _claim(data: Any) -> Verdict:
    if not isinstance(data, Mapping):
        raise BadFile("a claim must be an object", hint="the file is damaged")
    _check(data, _CLAIM_NEEDED, _CLAIM_OPTIONAL, f"claim {data.get('id')!r}")
    try:
        bound = Bound.parse(data["bound"])
    except (ValueError, TypeError, ConfigError, RecursionError) as error:
        raise BadFile(f"claim {data['id']!r}: {data['bound']!r} is no bound", hint="the file is damaged") from error
    rest = {name: data[name] for name in ("baseline", "reason") if name in data}
    verdict = Verdict(
        id=data["id"],
        statement=data["statement"],
        metric=data.get("metric", data["id"]),
        value=data["value"],
        bound=bound,
        **rest,
    )
    if verdict.passed is not data["passed"]:
        says = "passed" if data["passed"] else "failed"
        raise BadFile(
            f"claim {verdict.id!r} is written as {says}, but {verdict.value!r} {bound} says otherwise",
            hint="the file was edited; run the command again",
        )
    return verdict


def _check(data: Mapping[str, Any], needed: Fields, optional: Fields, what: str) -> None:
    missing = [name for name in needed if name not in data]
    if missing:
        raise BadFile(f"{what} has no {', '.join(missing)}", hint="the file is damaged or no Report")
    known = {**needed, **optional}
    unknown = sorted(map(str, data.keys() - known.keys()))
    if unknown:
        raise BadFile(f"{what} has unknown fields {', '.join(unknown)}", hint="it may come from another version")
    for name, value in data.items():
        kinds = known[name]
        mixed = isinstance(value, bool) and bool not in kinds and kinds is not _SCALAR
        if mixed or not isinstance(value, kinds):
            raise BadFile(f"{what}: {name} is a {type(value).__name__}", hint="the file is damaged")
        if isinstance(value, float) and (value != value or abs(value) == float("inf")):
            raise BadFile(f"{what}: {name} is {value}", hint="JSON has no such number")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
