"""The formats of JSON Schema as sets of texts, after the standards that its section 7.3 names.

A few are narrower than their standard, so that what is written can be read by ordinary programs; `NARROWER` says how. None is
wider: a text that is written is always of its format. Formats that no expression can describe are not here, and refused.
"""

from __future__ import annotations

from functools import lru_cache

from orchard.generate.json_schema.pattern import json_expression, whole
from orchard.generate.json_schema.pattern_reader import read_pattern
from orchard.generate.json_schema.strings import Strings

NARROWER = {
    "date": "no year 0000",
    "time": "no leap seconds, capital Z, at most nine digits of a second",
    "date-time": "as date and time, and a capital T",
    "email": "no quoted local parts, no addresses in brackets; at most 32 characters besides dots, and a name of a host as below",
    "hostname": "at most four labels of at most 32 letters and digits, without two hyphens in a row",
}
"""What a format leaves out of its standard."""

_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = (
    r"(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # not every hundredth year
)
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_DAYS = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_HOURS = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"

_LABEL = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,31}"  # at most 63 characters
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"  # at most 253
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"

_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_TAIL = rf"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_SHORT = [  # groups before "::", and those that must follow it
    *(rf"(?:(?:{_GROUP}:){{0,{before}}}{_GROUP})?::(?:{_GROUP}:){{{4 - before}}}{_TAIL}" for before in range(5)),
    rf"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
    rf"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::",
]
_IPV6 = f"(?:{'|'.join([rf'(?:{_GROUP}:){{6}}{_TAIL}', rf'::(?:{_GROUP}:){{5}}{_TAIL}', *_SHORT])})"

_PERCENT = r"%[0-9A-Fa-f]{2}"
_FREE = r"A-Za-z0-9\-._~!$&'()*+,;="
_PCHAR = rf"(?:[{_FREE}:@]|{_PERCENT})"
_BRACKETS = rf"\[(?:{_IPV6}|v[0-9A-Fa-f]+\.[{_FREE}:]+)\]"
_AUTHORITY = rf"(?:(?:[{_FREE}:]|{_PERCENT})*@)?(?:{_BRACKETS}|(?:[{_FREE}]|{_PERCENT})*)(?::[0-9]*)?"
_PATHS = rf"(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_ENDING = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*:"
_URI = rf"{_SCHEME}{_PATHS}|{_PCHAR}+(?:/{_PCHAR}*)*|){_ENDING}"
_SEGMENT = rf"(?:[{_FREE}@]|{_PERCENT})+"
_RELATIVE = rf"{_PATHS}|{_SEGMENT}(?:/{_PCHAR}*)*|){_ENDING}"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:\d+W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "email": rf"{_ATOM}(?:\.?{_ATOM}){{0,31}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": rf"(?:{_URI}|{_RELATIVE})",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
FORMATS = frozenset(_PATTERNS)
NUMBER_FORMATS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "float": None, "double": None}
"""Of OpenAPI: the range of whole numbers that it means; None: every number."""


@lru_cache(maxsize=32)
def format_strings(name: str) -> Strings:
    """The texts of a format in `FORMATS`."""
    has = (expression(f"^(?:{_PATTERNS[name]})$"),)
    return Strings(has=has)


def expression(pattern: str) -> str:
    """A pattern as an expression for the JSON spelling of the texts that it is found in. Raises `PatternError`."""
    return json_expression(whole(read_pattern(pattern)))
