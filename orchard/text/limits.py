"""What rendering one chat template may cost, and the account that is kept while it runs.

Every hook of the sandbox charges here. Limits grow with the input: a long conversation may be rendered, a small one
may not be blown up into a long one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from orchard.core.errors import TemplateError
from orchard.core.frozen import frozen

KIB, MIB = 2**10, 2**20
_SMALL_OBJECT = 48  # bytes of a number or a short text
_HINT = "the template is broken or hostile; use another model file, or pass a template of your own"


@frozen
class Limits:
    template_chars: int = 256 * KIB
    template_tokens: int = 6_000  # words and signs inside tags: compile time follows these
    nesting: int = 80  # depth of the template's syntax tree
    output_chars: int = 4 * MIB
    string_chars: int = 2 * MIB  # any one intermediate text
    elements: int = 100_000  # any one value, counted through all levels
    value_depth: int = 64  # lists inside lists
    bytes: int = 24 * MIB  # everything ever created or written by one rendering
    steps: int = 1_000_000  # loop turns, calls, filters, operators; more for long conversations
    depth: int = 40  # macros inside macros
    integer_bits: int = 4096
    seconds: float = 0.5  # of this thread's own work: a busy machine must not refuse a good template


DEFAULT_LIMITS = Limits()


def too_much(what: str) -> TemplateError:
    return TemplateError(f"the chat template {what}", hint=_HINT)


class Budget:
    """The account of one rendering."""

    def __init__(self, limits: Limits, inputs: Mapping[str, Any]) -> None:
        self.limits = limits
        self.steps = self.spent = self.depth = 0
        self._known: dict[int, tuple[int, int]] = {}
        given = self._remember(inputs, 0)
        self.max_steps = limits.steps + 200 * given[0]
        self.deadline = time.thread_time() + limits.seconds + 1e-4 * given[0]
        self.max_bytes = limits.bytes + 24 * given[1]
        self.max_string = limits.string_chars + 2 * given[1]
        self.max_output = limits.output_chars + 2 * given[1]
        self.max_elements = limits.elements + 2 * given[0]

    def tick(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > self.max_steps:
            raise too_much(f"takes more than {self.max_steps:,} steps")
        if time.thread_time() > self.deadline:
            raise too_much(f"takes longer than {self.limits.seconds} s")

    def spend(self, size: int) -> None:
        self.spent += size
        if self.spent > self.max_bytes:
            raise too_much(f"needs more than {self.max_bytes / MIB:.0f} MiB")

    def check_chars(self, count: int) -> None:
        """Refuse a text of this many characters before it is made."""
        if count > self.max_string:
            raise too_much(f"builds a text of {count:,} characters")

    def check_elements(self, count: int) -> None:
        if count > self.max_elements:
            raise too_much(f"builds a list of {count:,} elements")

    def account(self, value: Any, *, new_elements: bool = True) -> Any:
        """Charge for a value that has just been created (its elements too, unless they existed before), and refuse one
        that is too large in depth: a list of lists of one list takes little memory but would take for ever to print."""
        self.tick()
        if isinstance(value, str):
            self.check_chars(len(value))
            self.spend(sys.getsizeof(value))
        elif isinstance(value, int):
            if value.bit_length() > self.limits.integer_bits:
                raise too_much("computes with a huge number")
        elif isinstance(value, list | tuple | dict):
            self.spend(sys.getsizeof(value) + (_SMALL_OBJECT * len(value) if new_elements else 0))
            self.size(value)
        return value

    def size(self, value: Any) -> tuple[int, int]:
        """Elements and bytes of a value, shared parts counted each time they are reached."""
        elements = size = 0
        stack = [(value, 0)]
        while stack:
            item, level = stack.pop()
            elements += 1
            if level > self.limits.value_depth:
                raise too_much("builds a value that is nested too deeply")
            if isinstance(item, str):
                size += sys.getsizeof(item)
            elif isinstance(item, list | tuple | dict):
                known = self._known.get(id(item))
                if known:
                    elements, size = elements + known[0], size + known[1]
                else:
                    self.check_elements(elements + len(item))
                    inside = item if not isinstance(item, dict) else [*item.keys(), *item.values()]
                    stack.extend((child, level + 1) for child in inside)
            if elements > self.max_elements or size > self.max_bytes:
                raise too_much("builds a value that is too large")
        return elements, size

    def _remember(self, value: Any, level: int) -> tuple[int, int]:
        """Measure the given variables once; templates cannot change them, so the result stays true."""
        if level > 64:
            raise too_much("is given messages or tools nested too deeply")
        if isinstance(value, str):
            return 1, sys.getsizeof(value)
        if not isinstance(value, list | tuple | Mapping):
            return 1, 8
        children: Iterable[Any] = value if not isinstance(value, Mapping) else [*value.keys(), *value.values()]
        parts = [self._remember(child, level + 1) for child in children]
        total = 1 + sum(p[0] for p in parts), 8 + sum(p[1] for p in parts)
        self._known[id(value)] = total
        return total


_CURRENT: ContextVar[Budget] = ContextVar("orchard_template_budget")


def budget() -> Budget:
    """The account of the rendering under way in this thread or task."""
    return _CURRENT.get()


class use_budget:
    """`with use_budget(account):` makes it the current one."""

    def __init__(self, account: Budget) -> None:
        self._account = account

    def __enter__(self) -> Budget:
        self._token = _CURRENT.set(self._account)
        return self._account

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)
