"""The filters a chat template may use: Jinja's own where they are harmless, checked or rewritten where they are not.

Left out on purpose: those that draw random numbers, parse HTML or links with regular expressions, or print Python
objects. Every result is charged to the rendering's account, and lazy results become lists, so that nothing grows
unseen.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from jinja2.filters import FILTERS

from orchard.core.errors import TemplateError
from orchard.text import methods
from orchard.text.limits import budget, too_much

_FROM_JINJA = """abs attr batch capitalize center count d default dictsort first float format groupby indent int items join
last length list lower map max min reject rejectattr replace reverse round select selectattr slice sort string title
trim truncate unique upper urlencode"""
_SLICE = 2**16
_SEQUENCE_WORDS = "batch dictsort groupby join list map max min reject select slice sort unique"
_SEQUENCE = frozenset(_SEQUENCE_WORDS.split())
# How much longer (or, for `title`, how much larger while at work) these make a text at worst.
_GROWTH = {"urlencode": 12, "e": 6, "escape": 6, "title": 16}


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as chat templates expect it: not escaped for HTML, and other alphabets left readable. Counted while it is
    written: escapes and indents can make it many times longer than the value."""
    account = budget()
    account.size(value)
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise too_much("asks for JSON with a huge indent")
    _check_long_texts(value, bool(ensure_ascii))
    encoder = json.JSONEncoder(
        ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
    )
    parts, length = [], 0
    for part in encoder.iterencode(value):
        parts.append(part)
        length += len(part)
        account.check_chars(length)
    return "".join(parts)


def _check_long_texts(value: Any, ensure_ascii: bool) -> None:
    """A text is encoded in one go, so a long one is measured slice by slice before."""
    if isinstance(value, str):
        starts = range(0, len(value), _SLICE) if len(value) > _SLICE else ()
        budget().check_chars(sum(len(json.dumps(value[i : i + _SLICE], ensure_ascii=ensure_ascii)) for i in starts))
    elif isinstance(value, list | tuple | dict):
        for item in value if not isinstance(value, dict) else [*value.keys(), *value.values()]:
            _check_long_texts(item, ensure_ascii)


def _sum(values: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Numbers only: adding lists one by one takes time with the square of their number."""
    total = start
    for value in values:
        value = value.get(attribute) if attribute is not None and isinstance(value, dict) else value
        if not isinstance(value, int | float) or not isinstance(total, int | float):
            raise TemplateError("the chat template sums things that are not numbers", hint="use `join` for texts")
        total += value
    return total


def _as_text(value: Any) -> str:
    budget().size(value)
    return str(value)


def _check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse arguments that make a small input large."""
    account = budget()
    for argument in (*args[1:], *kwargs.values()):
        if name not in ("default", "d", "map", "select", "reject", "selectattr", "rejectattr") and isinstance(
            argument, int
        ):
            if name in ("round", "slice", "batch", "indent") and not -1000 <= argument <= 1000:
                raise too_much(f"passes the number {str(argument)[:20]} to the filter {name!r}")
            account.check_chars(argument)
    if not args:
        return
    if name in _SEQUENCE and hasattr(args[0], "__len__"):
        account.check_elements(len(args[0]))
    if isinstance(args[0], str) and name in _GROWTH:
        account.check_chars(len(args[0]) * _GROWTH[name])
    if name == "format" and isinstance(args[0], str):
        methods.check_percent(account, args[0], [*args[1:], *kwargs.values()])
    elif name == "join":
        separator = kwargs.get("d", args[1] if len(args) > 1 else "")
        methods.check_join(account, str(separator), args[0])
    elif name == "replace":
        given = [str(argument) for argument in args[:3]] + [str(kwargs[k]) for k in ("old", "new") if k in kwargs]
        if len(given) == 3:
            methods.check_replace(account, *given)
    elif name == "indent" and isinstance(args[0], str):
        width = kwargs.get("width", args[1] if len(args) > 1 else 4)
        size = len(width) if isinstance(width, str) else int(width)
        account.check_chars(len(args[0]) + (args[0].count("\n") + 1) * size)


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Jinja passes an environment or a context first to functions that ask for it.
    shift = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        account = budget()
        account.tick()
        _check(name, args[shift:], kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            result = _listed(result)
        return account.account(str(result) if isinstance(result, str) else result)

    return run


def _listed(values: Iterator[Any]) -> list[Any]:
    account, out = budget(), []
    for value in values:
        account.tick()
        out.append(value)
        account.check_elements(len(out))
    return out


def template_filters() -> dict[str, Callable[..., Any]]:
    chosen: dict[str, Callable[..., Any]] = {name: FILTERS[name] for name in _FROM_JINJA.split()}
    chosen |= {
        "tojson": _json,
        "sum": _sum,
        "string": _as_text,
        "safe": _as_text,
        "e": lambda value: html.escape(_as_text(value)),
        "escape": lambda value: html.escape(_as_text(value)),
    }
    return {name: _charged(name, function) for name, function in chosen.items()}
