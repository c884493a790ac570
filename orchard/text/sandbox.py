"""The Jinja environment for templates that come with a model, which are code written by strangers.

Jinja's immutable sandbox keeps a template away from Python's insides. On top of it, here: only listed filters, methods
and functions can be called; every operator, call, loop turn and write is charged to an account with limits; nothing
is computed while compiling.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import datetime
from types import MethodType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Joiner, Namespace

from orchard.core.errors import TemplateError
from orchard.text import methods, rewrite
from orchard.text.filters import template_filters
from orchard.text.limits import budget, too_much

_DATE_FORMAT = re.compile(r"(?:[^%]|%[-_0^#]?[A-Za-z%])*")


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; for rendering it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class QuietNamespace(Namespace):
    """Prints as a word: its parts may refer to each other, and printing them could take for ever."""

    def __repr__(self) -> str:
        return "<namespace>"


def bounded_range(*args: int) -> range:
    numbers = range(*args)
    budget().check_elements(len(numbers))
    return numbers


def raise_exception(message: Any = "") -> None:
    text = str(message)[:500] if isinstance(message, str) else "an error"
    raise TemplateError(f"the chat template refuses these messages: {text}", hint="change the messages as it asks")


def strftime_now(pattern: str) -> str:
    if not isinstance(pattern, str) or len(pattern) > 100 or not _DATE_FORMAT.fullmatch(pattern):
        raise too_much("asks for an unusual date format")
    return datetime.now().strftime(pattern)


class Function:
    """A function that templates may call, and that shows nothing of itself when printed."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self._name = name
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self._name}>"


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "range": bounded_range,
    "dict": dict,
    "namespace": QuietNamespace,
    "joiner": Joiner,
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
}


class TemplateSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        self.globals = {name: Function(name, run) for name, run in _FUNCTIONS.items()}
        self.filters = template_filters() | {
            rewrite.TICK: _tick,
            rewrite.WRITE: _write,
            rewrite.FIXED: _fixed,
            rewrite.CREATE: _create,
            rewrite.CONCAT: _concat,
            rewrite.ITERATE: _iterate,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, str | list | tuple | dict):
            # A groupby result is a tuple with two named fields.
            return methods.allowed_method(obj, attr) or (isinstance(obj, tuple) and attr in ("grouper", "list"))
        return isinstance(obj, LoopContext | Namespace | BlockReference | Undefined) or (
            isinstance(obj, Macro) and attr in ("name", "arguments")
        )

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, Function | Macro | LoopContext | BlockReference | Joiner | Undefined):
            return True
        owner, name = _bound(obj)
        if isinstance(obj, MethodType):
            return isinstance(owner, LoopContext) and name in ("cycle", "changed")
        return methods.allowed_method(owner, name)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        account = budget()
        account.tick()
        owner, name = _bound(__obj)
        if not __self.is_safe_callable(__obj):
            raise SecurityError(f"a template may not call {name or type(__obj).__name__}")
        # Inside loops and blocks Jinja passes variables of its own along.
        given = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
        methods.check_method(account, owner, name, args, given)
        account.depth += 1
        if account.depth > account.limits.depth:
            raise too_much(f"calls itself more than {account.limits.depth} levels deep")
        try:
            result = super().call(__context, __obj, *args, **kwargs)
        finally:
            account.depth -= 1
        if isinstance(owner, dict) and name in ("items", "keys", "values"):
            result = list(result)
        return account.account(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        account = budget()
        account.tick()
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            methods.check_percent(account, left, right)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            account.check_chars(len(left) + len(right))
        return account.account(super().call_binop(context, operator, left, right))


def _bound(obj: Any) -> tuple[Any, str]:
    """What a method is bound to and its name; the sandbox hides `str.format` in a wrapper that leads back to it."""
    obj = getattr(obj, "__wrapped__", obj) if not isinstance(obj, Macro | Undefined) else obj
    owner = getattr(obj, "__self__", None) if not isinstance(obj, Undefined) else None
    name = getattr(obj, "__name__", "") if not isinstance(obj, Undefined) else ""
    return owner, name if isinstance(name, str) else ""


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int):
            if isinstance(value, str):
                budget().check_chars(len(value) * times)
            elif isinstance(value, list | tuple):
                budget().check_elements(len(value) * times)


def _check_power(left: Any, right: Any) -> None:
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() * abs(right) > budget().limits.integer_bits
    ):
        raise too_much("computes with a huge number")


# The internal filters ask for the context only because Jinja then never calls them while compiling.
@pass_context
def _tick(_: Context, count: int) -> None:
    budget().tick(abs(count))


@pass_context
def _write(_: Context, value: Any) -> str:
    account = budget()
    account.tick()
    if not isinstance(value, str):
        account.size(value)
    text = str(value)
    account.spend(sys.getsizeof(text))
    return text


@pass_context
def _fixed(_: Context, chars: int) -> None:
    """The template's own text between its tags; at most four bytes a character."""
    budget().tick()
    budget().spend(4 * abs(chars))


@pass_context
def _create(_: Context, value: Any) -> Any:
    return budget().account(value, new_elements=False)


@pass_context
def _concat(_: Context, values: list[Any]) -> str:
    account = budget()
    account.check_chars(account.size(values)[1])
    return account.account("".join(map(str, values)))


@pass_context
def _iterate(_: Context, values: Any) -> Any:
    if hasattr(values, "__len__") and not isinstance(values, Undefined):
        budget().check_elements(len(values))
    return values
