"""A set of texts: what a JSON Schema says of a string, or of the names of properties. Sets can be cut and turned around.

A set becomes the definition of one lexeme, where expressions can be joined with `&` (and) and `~` (not). Whether such a
definition leaves anything at all is asked of the lexer itself: a lexeme that nothing matches would be a trap for an answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from orchard.generate.json_schema.lexer import is_empty, matches
from orchard.generate.json_schema.pattern import ANY_CHARACTER, alt, json_expression, literal, repeat


@dataclass(frozen=True)
class Strings:
    """Texts of `low` to `high` characters that match all of `has` and none of `lacks`: expressions for the JSON spelling.

    With `values` it is these texts and nothing else; the other fields are then empty.
    """

    values: tuple[str, ...] | None = None
    low: int = 0
    high: int | None = None
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def meet(self, other: Strings) -> Strings | None:
        if self.values is not None or other.values is not None:
            listed, rest = (self, other) if self.values is not None else (other, self)
            kept = tuple(value for value in listed.values or () if rest.holds(value))
            return Strings(kept) if kept else None
        highs = [high for high in (self.high, other.high) if high is not None]
        both = Strings(
            low=max(self.low, other.low),
            high=min(highs, default=None),
            has=_joined(self.has, other.has),
            lacks=_joined(self.lacks, other.lacks),
        )
        return None if both.never() else both

    def complement(self) -> list[Strings]:
        """The texts that are not in it, as sets."""
        if self.values is not None:
            return [Strings(lacks=(names_expression(self.values),))]
        out = [Strings(high=self.low - 1)] if self.low else []
        out += [Strings(low=self.high + 1)] if self.high is not None else []
        return out + [Strings(lacks=(one,)) for one in self.has] + [Strings(has=(one,)) for one in self.lacks]

    def holds(self, text: str) -> bool:
        if self.values is not None:
            return text in self.values
        if len(text) < self.low or (self.high is not None and len(text) > self.high):
            return False
        spelled = quote(text)
        return all(matches(one, spelled) for one in self.has) and not any(matches(one, spelled) for one in self.lacks)

    def never(self) -> bool:
        if self.values is not None:
            return not self.values
        if self.high is not None and self.high < self.low:
            return True
        return bool(self.has or self.lacks) and is_empty(self.expression())

    def expression(self) -> str:
        """The definition of a lexeme that matches the JSON spelling."""
        if self.values is not None:
            return " | ".join(lark_string(quote(value)) for value in self.values)
        parts = [f"/{one}/" for one in self.has]
        if self.low or self.high is not None or not parts:
            parts.insert(0, f"/{json_expression(repeat(ANY_CHARACTER, self.low, self.high))}/")
        return " & ".join([*parts, *(f"~/{one}/" for one in self.lacks)])

    def without(self, names: tuple[str, ...]) -> Strings:
        """The same without these texts."""
        return replace(self, lacks=(*self.lacks, names_expression(names))) if names else self


ALL_STRINGS = Strings()


def names_expression(names: tuple[str, ...]) -> str:
    """An expression for the JSON spelling of any of these texts."""
    return json_expression(alt(literal(name) for name in names))


def quote(text: str) -> str:
    """The one JSON spelling of a text that an answer may use."""
    return json.dumps(text, ensure_ascii=False)


def lark_string(text: str) -> str:
    """A literal in a grammar."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _joined(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*left, *right)))
