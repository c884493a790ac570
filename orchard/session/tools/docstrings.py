"""What a function's docstring says: its first paragraph, and a line for each parameter.

Three common styles are read: `Args:` with indented lines, `:param name: …`, and numpy's underlined `Parameters`.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

_SECTION = re.compile(r"^(args|arguments|parameters|params)\s*:?\s*$", re.IGNORECASE)
_OTHER = re.compile(r"^[A-Z][A-Za-z ]+:\s*$")
_GOOGLE = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_NUMPY = re.compile(r"^(\w+)(?:\s*:.*)?$")
_SPHINX = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")
_FIELD = re.compile(r"^:\w+[^:]*:")


def described(thing: Any) -> tuple[str, dict[str, str]]:
    """The first paragraph as one line, and descriptions by parameter. Empty where there is nothing."""
    lines = inspect.cleandoc(getattr(thing, "__doc__", None) or "").splitlines()
    summary: list[str] = []
    for line in lines:
        if not line.strip() or _SECTION.match(line.strip()) or _FIELD.match(line):
            break
        summary.append(line.strip())
    return " ".join(summary), {name: " ".join(words.split()) for name, words in _parameters(lines).items()}


def _parameters(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for place, line in enumerate(lines):
        sphinx = _SPHINX.match(line.strip())
        if sphinx:
            found[sphinx[1]] = " ".join([sphinx[2], *_indented(lines[place + 1 :], _indent(line))])
        elif _SECTION.match(line.strip()):
            rest = lines[place + 1 :]
            underlined = bool(rest) and set(rest[0].strip()) == {"-"}
            found |= _numpy(rest[1:], _indent(line)) if underlined else _google(rest, _indent(line))
    return found


def _google(lines: list[str], margin: int) -> dict[str, str]:
    """`name (type): words` lines, all indented alike; lines indented further go on with the one above."""
    found: dict[str, str] = {}
    column, name = None, None
    for line in lines:
        if not line.strip():
            continue
        if _indent(line) <= margin:
            break
        column = _indent(line) if column is None else column
        entry = _GOOGLE.match(line.strip()) if _indent(line) <= column else None
        if entry:
            name = entry[1]
            found[name] = entry[2]
        elif name is not None:
            found[name] += f" {line.strip()}"
    return found


def _numpy(lines: list[str], margin: int) -> dict[str, str]:
    """`name : type` lines with the words indented below."""
    found: dict[str, str] = {}
    name = None
    for place, line in enumerate(lines):
        following = lines[place + 1].strip() if place + 1 < len(lines) else ""
        if _indent(line) <= margin and following and set(following) == {"-"}:
            break  # the next section
        if not line.strip():
            continue
        entry = _NUMPY.match(line.strip()) if _indent(line) <= margin else None
        if entry:
            name = entry[1]
            found[name] = ""
        elif _indent(line) <= margin:
            break
        elif name is not None:
            found[name] += f" {line.strip()}"
    return found


def _indented(lines: list[str], margin: int) -> list[str]:
    """The lines that go on with a field."""
    taken: list[str] = []
    for line in lines:
        if not line.strip() or _indent(line) <= margin or _OTHER.match(line.strip()):
            break
        taken.append(line.strip())
    return taken


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
