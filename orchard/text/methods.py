"""The methods a chat template may call on texts, lists and dicts, each checked for what it would create.

Nothing else is callable but macros and the few functions the sandbox gives. Left out on purpose: `translate` and
`maketrans` (one character into many), `encode` (leads to bytes), everything that changes a value in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from orchard.text.limits import Budget, too_much

_TEXT_METHODS = """
capitalize casefold center count endswith expandtabs find format index isalnum isalpha isascii isdecimal
isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition
removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith
strip swapcase title upper zfill
"""
_ALLOWED: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
}
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\*|\d{4,}|\d*\.(\*|\d{4,}))")
_WIDE_BRACE = re.compile(r"\{[^{}]*:[^{}]*(\d{4,}|\{)")


def allowed_method(owner: Any, name: str) -> bool:
    return any(name in names for type_, names in _ALLOWED.items() if isinstance(owner, type_))


def check_method(budget: Budget, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call whose result would be too large, before it is made."""
    if isinstance(owner, str):
        check = _CHECKS.get(name)
        if check is not None:
            check(budget, owner, *args, **kwargs)


def check_percent(budget: Budget, text: str, values: Any) -> None:
    """`"%s" % values`: no huge widths, and no text put in many times over."""
    if _WIDE_PERCENT.search(text):
        raise too_much("formats text with a huge width")
    _check_filled(budget, text, text.count("%"), values)


def check_join(budget: Budget, separator: str, values: Any) -> None:
    if hasattr(values, "__len__"):
        budget.check_elements(len(values))
    elements, size = budget.size(list(values) if isinstance(values, Iterable) else values)
    budget.check_chars(size + elements * len(separator))


def check_replace(budget: Budget, text: str, old: str, new: str, *_: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.check_chars(len(text) + text.count(old) * len(new))


def check_width(budget: Budget, text: str, width: Any = 0, *_: Any) -> None:
    if isinstance(width, int):
        budget.check_chars(max(width, len(text)))


def _check_filled(budget: Budget, text: str, places: int, *values: Any) -> None:
    largest = max((budget.size(value)[1] for value in values), default=0)
    budget.check_chars(len(text) + places * (largest + 1000))


def _check_format(budget: Budget, text: str, *args: Any, **kwargs: Any) -> None:
    if _WIDE_BRACE.search(text):
        raise too_much("formats text with a huge width")
    _check_filled(budget, text, text.count("{"), args, kwargs)


def _check_tabs(budget: Budget, text: str, tabsize: Any = 8) -> None:
    if isinstance(tabsize, int):
        budget.check_chars(len(text) + text.count("\t") * max(tabsize, 0))


def _check_split(budget: Budget, text: str, sep: Any = None, maxsplit: Any = -1) -> None:
    if isinstance(sep, str) and sep:
        budget.check_elements(text.count(sep))
    elif len(text) > budget.max_elements:
        budget.check_elements(sum(map(str.isspace, text)))


def _check_splitlines(budget: Budget, text: str, *_: Any, **__: Any) -> None:
    budget.check_elements(sum(text.count(end) for end in _LINE_ENDS))


_CHECKS: dict[str, Callable[..., None]] = {
    "center": check_width,
    "ljust": check_width,
    "rjust": check_width,
    "zfill": check_width,
    "expandtabs": _check_tabs,
    "format": _check_format,
    "join": check_join,
    "replace": check_replace,
    "split": _check_split,
    "rsplit": _check_split,
    "splitlines": _check_splitlines,
}
