"""One field of a config from outside: its value where it makes sense, otherwise a typed error that names it.

A config file is written by strangers. What is read here ends as a dimension, a divisor or a switch of a model, so a value
of the wrong kind is refused at once, under the name the file gives it, before anything is made from it.
"""

from __future__ import annotations

import math
import reprlib
from typing import Any

from orchard.core.errors import BadFile

Json = dict[str, Any]
LIMIT = 1 << 24  # No real dimension is larger; a damaged one must not make us allocate.
LEAST, MOST = 1e-30, 1e30  # A positive number outside these is none in float32, or soon makes one that is none.
HALF = 65_504.0  # The largest number of float16, for bounds that tensors of any dtype are held to.
DAMAGED = "the config is damaged, or of another kind of model"

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlevel = 2


def shown(value: Any) -> str:
    """A value as a message shows it: on one line, and short however long it is."""
    return _short.repr(value)


def refused(name: str, value: Any, wanted: str) -> BadFile:
    """The error for a field: what it is called, what it holds, what belongs there."""
    if value is None:
        return BadFile(f"the config has no {name}, {wanted}", hint=DAMAGED)
    return BadFile(f"{name} is {shown(value)}, not {wanted}", hint=DAMAGED)


def count(hf: Json, name: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number from `least` on. A field that is missing or null has the default."""
    value = hf.get(name)
    value = default if value is None else value
    if type(value) is not int or not least <= value < LIMIT:
        raise refused(name, value, f"a whole number from {least} to {LIMIT - 1:,}")
    return value


def number(hf: Json, name: str, default: float | None = None, *, least: float = LEAST, most: float = MOST) -> float:
    """A finite number between two bounds. A field that is missing or null has the default."""
    found = maybe_number(hf, name, default, least=least, most=most)
    if found is None:
        raise refused(name, None, "which must be a number")
    return found


def maybe_number(
    hf: Json, name: str, default: float | None = None, *, least: float = LEAST, most: float = MOST
) -> float | None:
    """The same where the field may stay empty."""
    value = hf.get(name)
    value = default if value is None else value
    if value is None:
        return None
    if type(value) not in (int, float) or not least <= value <= most:  # no comparison holds for NaN
        wanted = "a number above 0" if least == LEAST else f"a number from {least:g}"
        raise refused(name, value, wanted if most == MOST else f"{wanted} and up to {most:,g}")
    return float(value)


def flag(hf: Json, name: str, default: bool = False) -> bool:
    """True or false, and nothing that only counts as one of them."""
    value = hf.get(name)
    value = default if value is None else value
    if type(value) is not bool:
        raise refused(name, value, "true or false")
    return value


def table(hf: Json, name: str) -> Json:
    """Fields inside a field; empty where it is missing or null."""
    value = hf.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refused(name, value, "a table of fields")
    return value


def texts(hf: Json, name: str) -> list[str] | None:
    """A list of texts, or None where the field is missing or null."""
    value = hf.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise refused(name, value, "a list of texts")
    return value


def layers(hf: Json, name: str) -> set[int]:
    """A list of layer numbers as a set; empty where the field is missing or null."""
    value = hf.get(name)
    if value is None:
        return set()
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < LIMIT for item in value):
        raise refused(name, value, "a list of layer numbers")
    return set(value)


def even_share(width: int, fraction: float, name: str) -> int:
    """How many channels of a head are turned by their position: they are turned in pairs."""
    turned = math.floor(width * fraction)
    if turned < 2 or turned % 2:
        what = f"{name} is {width}" if fraction == 1.0 else f"partial_rotary_factor {fraction:g} of {name} {width}"
        raise BadFile(f"{what}, which turns {turned} channels; they come in pairs", hint=DAMAGED)
    return turned
