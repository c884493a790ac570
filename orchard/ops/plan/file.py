"""A plan as JSON, without its tensors. Reading is strict: every field, of the right type, and none besides.

What comes out of `from_json` has been through `check`, so it may be handed to native code.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from orchard.core.errors import BadFile
from orchard.ops.plan import steps
from orchard.ops.plan.check import check

VERSION = 1
KINDS: dict[str, type] = {
    kind.kind: kind
    for kind in (
        *(steps.Embed, steps.Linear, steps.Gated, steps.Gate, steps.Attend, steps.Normalise, steps.Add),
        *(steps.Clip, steps.Experts, steps.Narrow, steps.Head, steps.Torch),
    )
}
NUMBERS = ("vocab", "context", "dim")
FIELDS = {"version", *NUMBERS, "widths", "steps", "stores", "rotaries"}
LATER: dict[type, frozenset[str]] = {
    steps.Output: frozenset({"gain", "begin", "width"}),
    steps.StoreSpec: frozenset({"books"}),
}
"""Fields that came later and are nearly always None: they are left out then, so that plans without them stay what they were."""


def to_json(plan: steps.Plan) -> dict[str, Any]:
    """Everything but the tensors, as what JSON knows."""
    return {
        "version": VERSION,
        **{name: getattr(plan, name) for name in NUMBERS},
        "widths": list(plan.widths),
        "steps": [{"step": step.kind, **_fields(step)} for step in plan.steps],
        "stores": [_fields(spec) for spec in plan.stores],
        "rotaries": [_fields(spec) for spec in plan.rotaries],
    }


def from_json(data: Any, tensors: Mapping[str, np.ndarray], elsewhere: Mapping[str, int] | None = None) -> steps.Plan:
    """The plan that `to_json` wrote, checked against its tensors; `BadFile` for anything else. `elsewhere`: experts' matrices
    that are in a file of their own, and their bytes."""
    if not isinstance(data, dict):
        raise _damaged("it is no table")
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise BadFile(
            f"a plan of version {data.get('version')!r} where {VERSION} is known",
            hint="make the packed file again from its source",
        )
    if set(data) != FIELDS:
        raise _damaged(f"fields are missing or unknown: {', '.join(sorted(map(str, set(data) ^ FIELDS)))}")
    plan = steps.Plan(
        **{name: _reader(int)(data[name], name) for name in NUMBERS},
        widths=[_reader(int)(width, "widths") for width in _listed(data["widths"], "widths")],
        steps=[_step(step, index) for index, step in enumerate(_listed(data["steps"], "steps"))],
        stores=[_reader(steps.StoreSpec)(spec, "stores") for spec in _listed(data["stores"], "stores")],
        rotaries=[_reader(steps.RotarySpec)(spec, "rotaries") for spec in _listed(data["rotaries"], "rotaries")],
        tensors=dict(tensors),
        elsewhere=dict(elsewhere or {}),
    )
    check(plan)
    return plan


def _fields(thing: Any) -> dict[str, Any]:
    later = LATER.get(type(thing), frozenset())
    values = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    return {name: _plain(value) for name, value in values.items() if value is not None or name not in later}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _step(data: Any, index: int) -> steps.Step:
    kind = data.get("step") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise _damaged(f"step {index} is none that is known")
    fields = dict(data)
    del fields["step"]
    step: steps.Step = _reader(KINDS[kind])(fields, f"step {index}")
    return step


# Readers are made once per type: the first answer of a model waits for its plan.
Read = Callable[[Any, str], Any]
_READERS: dict[Any, Read] = {}


def _reader(kind: Any) -> Read:
    """`(data, where it stands) → a value of a declared type`, or `BadFile`."""
    if kind not in _READERS:
        if isinstance(kind, types.UnionType):  # of something and None
            inner = _reader(typing.get_args(kind)[0])
            _READERS[kind] = lambda data, place: None if data is None else inner(data, place)
        elif typing.get_origin(kind) is tuple:
            each = _reader(typing.get_args(kind)[0])
            _READERS[kind] = lambda data, place: tuple([each(part, place) for part in _listed(data, place)])
        elif dataclasses.is_dataclass(kind):
            _READERS[kind] = _table_reader(kind)
        else:
            _READERS[kind] = _number if kind is float else _exactly(kind)
    return _READERS[kind]


def _table_reader(kind: Any) -> Read:
    hints = typing.get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}
    needed = readers.keys() - LATER.get(kind, frozenset())

    def read(data: Any, place: str) -> Any:
        if not isinstance(data, dict) or not needed <= data.keys() <= readers.keys():
            raise _damaged(f"{place} has missing or unknown fields in a {kind.__name__}")
        return kind(**{name: readers[name](value, place) for name, value in data.items()})

    return read


def _number(data: Any, place: str) -> float:
    if type(data) not in (int, float) or abs(data) > 1e300 or not math.isfinite(data):
        raise _damaged(f"{place} has {data!r:.40} where a number belongs")
    return float(data)


def _exactly(kind: type) -> Read:
    def read(data: Any, place: str) -> Any:
        if type(data) is not kind:
            raise _damaged(f"{place} has {data!r:.40} where {kind.__name__} belongs")
        return data

    return read


def _listed(data: Any, place: str) -> list[Any]:
    if not isinstance(data, list):
        raise _damaged(f"{place} is no list")
    return data


def _damaged(problem: str) -> BadFile:
    return BadFile(f"damaged plan: {problem}", hint="make the packed file again from its source")
