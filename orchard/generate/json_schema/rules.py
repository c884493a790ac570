"""Grammars as plain values, and their text in the Lark dialect of llguidance.

Before a grammar is written, whatever can never come to an end is taken out of it: an alternative that leads nowhere would
trap an answer half-way. Such parts come of schemas that contradict themselves deep inside, or that go round without an end.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from orchard.generate.json_schema.strings import lark_string


@dataclass(frozen=True)
class Text:
    """These characters."""

    text: str


@dataclass(frozen=True)
class Lexeme:
    """A lexeme by its definition."""

    definition: str


@dataclass(frozen=True)
class Rule:
    """Another rule, by its key."""

    key: Hashable


@dataclass(frozen=True)
class Raw:
    """What only the dialect itself can say, as it is written there, with the rules that it needs."""

    body: str
    rules: str = ""


@dataclass(frozen=True)
class Row:
    parts: tuple[Body, ...]


@dataclass(frozen=True)
class Choice:
    parts: tuple[Body, ...]


@dataclass(frozen=True)
class Times:
    """The part so many times; `high` None: any number of times."""

    part: Body
    low: int
    high: int | None


DEEPER = 64
"""Levels that are added at most to a grammar of which nothing would end otherwise."""
Body = Text | Lexeme | Rule | Raw | Row | Choice | Times
NOTHING = Row(())
IMPOSSIBLE = Choice(())


def maybe(part: Body) -> Body:
    return Times(part, 0, 1)


def row(*parts: Body) -> Body:
    """One after the other. Texts stay apart: each is a lexeme, and the lexer takes the longest that goes on, so that no lexeme
    may begin like one and a half others."""
    flat = tuple(inner for part in parts for inner in (part.parts if isinstance(part, Row) else (part,)))
    return flat[0] if len(flat) == 1 else Row(flat)


def without_traps(rules: Mapping[Hashable, Body], start: Hashable) -> dict[Hashable, Body]:
    """The rules that are needed, without parts that never end; no `start` among them where nothing ends."""
    ending: set[Hashable] = set()
    grown = True
    while grown:
        found = {key for key, body in rules.items() if key not in ending and _ends(body, ending)}
        grown = bool(found)
        ending |= found
    kept: dict[Hashable, Body] = {}
    waiting = [start] if start in ending else []
    while waiting:
        key = waiting.pop()
        if key not in kept:
            kept[key] = _pruned(rules[key], ending)
            waiting += _mentioned(kept[key])
    return kept


def _ends(body: Body, ending: set[Hashable]) -> bool:
    if isinstance(body, Rule):
        return body.key in ending
    if isinstance(body, Row):
        return all(_ends(part, ending) for part in body.parts)
    if isinstance(body, Choice):
        return any(_ends(part, ending) for part in body.parts)
    return body.low == 0 or _ends(body.part, ending) if isinstance(body, Times) else True


def _pruned(body: Body, ending: set[Hashable]) -> Body:
    if isinstance(body, Row):
        return row(*(_pruned(part, ending) for part in body.parts))
    if isinstance(body, Choice):
        kept = tuple(dict.fromkeys(_pruned(part, ending) for part in body.parts if _ends(part, ending)))
        return kept[0] if len(kept) == 1 else Choice(kept)
    if isinstance(body, Times):
        if not _ends(body.part, ending) or body.high == 0:
            return NOTHING
        part = _pruned(body.part, ending)
        return part if (body.low, body.high) == (1, 1) else Times(part, body.low, body.high)
    return body


def _mentioned(body: Body) -> list[Hashable]:
    if isinstance(body, Rule):
        return [body.key]
    inner = body.parts if isinstance(body, Row | Choice) else (body.part,) if isinstance(body, Times) else ()
    return [key for part in inner for key in _mentioned(part)]


def bounded(rules: Mapping[Hashable, Body], start: Hashable, depth: int) -> dict[Hashable, Body]:
    """The same grammar with rules that come back to themselves at most `depth` times inside each other: a small model may go
    on for ever. Deeper where nothing ends otherwise. The rules have keys of their own; `start` is (start, depth)."""
    again = _again(rules, start)
    circling = _leading_to(rules, again)
    for more in range(depth, depth + DEEPER):
        copies: dict[Hashable, Body] = {}
        waiting: list[tuple[Hashable, int]] = [(start, more)]
        while waiting:
            key, left = waiting.pop()
            if (key, left) not in copies:
                copies[key, left] = _copied(rules[key], left, again, circling, waiting)
        kept = without_traps(copies, (start, more))
        if kept:
            return {(start, depth): kept[start, more], **kept}
    return {}


def _copied(
    body: Body, left: int, again: set[Hashable], circling: set[Hashable], waiting: list[tuple[Hashable, int]]
) -> Body:
    """The body of a rule under which others may come back `left` times."""
    if isinstance(body, Rule):
        after = left - (body.key in again) if body.key in circling else 0
        if after < 0:
            return IMPOSSIBLE
        waiting.append((body.key, after))
        return Rule((body.key, after))
    if isinstance(body, Row | Choice):
        return type(body)(tuple(_copied(part, left, again, circling, waiting) for part in body.parts))
    if isinstance(body, Times):
        return Times(_copied(body.part, left, again, circling, waiting), body.low, body.high)
    return body


def _again(rules: Mapping[Hashable, Body], start: Hashable) -> set[Hashable]:
    """Rules that a way from the start comes back to: one at least in every circle."""
    found: set[Hashable] = set()
    seen, path = {start}, {start}
    stack = [(start, iter(_mentioned(rules[start])))]
    while stack:
        key, inner = stack[-1]
        following = next(inner, None)
        if following is None:
            stack.pop()
            path.discard(key)
        elif following in path:
            found.add(following)
        elif following not in seen:
            seen.add(following)
            path.add(following)
            stack.append((following, iter(_mentioned(rules[following]))))
    return found


def _leading_to(rules: Mapping[Hashable, Body], wanted: set[Hashable]) -> set[Hashable]:
    """The rules from which a way leads to one of these."""
    users: dict[Hashable, list[Hashable]] = {}
    for key, body in rules.items():
        for inner in _mentioned(body):
            users.setdefault(inner, []).append(key)
    found, waiting = set(wanted), list(wanted)
    while waiting:
        new = [user for user in users.get(waiting.pop(), ()) if user not in found]
        found.update(new)
        waiting += new
    return found


class Printer:
    """The text of a grammar. Rules and lexemes are numbered in the order in which they are met."""

    def __init__(self, rules: Mapping[Hashable, Body]) -> None:
        self._rules = rules
        self._names: dict[Hashable, str] = {}
        self._lexemes: dict[str, str] = {}
        self._extra: dict[str, None] = {}

    def text(self, start: Hashable) -> str:
        lines = [f"start: {self._name(start)}"]
        done = 0
        while done < len(self._names):
            key, name = list(self._names.items())[done]
            body = self._rules[key]
            separate = body.parts if isinstance(body, Choice) else (body,)
            alternatives = "\n  | ".join(self._body(part) for part in separate)
            lines.append(f"{name}: {alternatives}")
            done += 1
        lines += self._extra
        lines += [f"{name}: {definition}" for definition, name in self._lexemes.items()]
        return "\n".join(lines) + "\n"

    def _name(self, key: Hashable) -> str:
        return self._names.setdefault(key, f"r{len(self._names)}")

    def _body(self, body: Body) -> str:
        if isinstance(body, Text):
            return lark_string(body.text)
        if isinstance(body, Lexeme):
            return self._lexemes.setdefault(body.definition, f"L{len(self._lexemes)}")
        if isinstance(body, Rule):
            return self._name(body.key)
        if isinstance(body, Raw):
            if body.rules:
                self._extra[body.rules] = None
            return body.body
        if isinstance(body, Row):
            return " ".join(self._body(part) for part in body.parts) or '""'
        if isinstance(body, Choice):
            return f"({' | '.join(self._body(part) for part in body.parts)})"
        times = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((body.low, body.high))
        return f"({self._body(body.part)})" + (times or f"{{{body.low},{'' if body.high is None else body.high}}}")
