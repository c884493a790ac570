"""A set of numbers: what a JSON Schema says of one, and the expressions for their decimal spellings.

Bounds are exact fractions of any size. A number with bounds, a step or a fraction is spelled without an exponent, so that an
expression can compare its digits; one without any may have an exponent of at most two digits. So that a number comes to an
end, it has at most 309 digits before its point and 20 after it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, lcm
from typing import Literal

MOST_VALUES = 2000
"""Multiples that are listed one by one."""
LARGEST_STEP = 1000
"""Of multiples without an end: the lexer has a state for each remainder."""
MOST_DIGITS = 400
"""Of a bound: the largest number that most programs can hold has 309."""

WHOLE = "(?:0|[1-9][0-9]{0,308})"  # as many digits as the largest number of 64 bits: an answer must come to an end
PLAIN = rf"-?{WHOLE}(?:\.[0-9]{{1,20}})?"
ANY_NUMBER = rf"{PLAIN}(?:[eE][+-]?[0-9]{{1,2}})?"
FRACTION = rf"-?{WHOLE}\.[0-9]{{0,19}}[1-9]"


class Unsayable(ValueError):
    """A set of numbers that no expression here describes."""


@dataclass(frozen=True)
class Numbers:
    """Numbers from `low` to `high` (without the bound itself where it is open), whole ones, others, or both; multiples of
    `step` where there is one. A step of whole multiples makes them whole."""

    kind: Literal["any", "whole", "fraction"] = "any"
    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False
    step: Fraction | None = None

    def meet(self, other: Numbers) -> Numbers | None:
        if {self.kind, other.kind} == {"whole", "fraction"}:
            return None
        kind = self.kind if other.kind == "any" else other.kind
        low, low_open = _tighter((self.low, self.low_open), (other.low, other.low_open), 1)
        high, high_open = _tighter((self.high, self.high_open), (other.high, other.high_open), -1)
        both = Numbers(kind, low, high, low_open, high_open, _common(self.step, other.step)).settled()
        return None if both.never() else both

    def settled(self) -> Numbers:
        """The same set, in one of the ways to say it: whole numbers have closed whole bounds and a whole step."""
        if self.step is not None and self.step.denominator == 1 and self.kind == "any":
            return replace(self, kind="whole").settled()
        if self.kind != "whole":
            return self
        low = None if self.low is None else Fraction(_next(self.low) if self.low_open else ceil(self.low))
        high = None if self.high is None else Fraction(-_next(-self.high) if self.high_open else floor(self.high))
        step = None if self.step is None else Fraction(lcm(self.step.numerator, 1))
        return Numbers("whole", low, high, step=step if step not in (None, 1) else None)

    def never(self) -> bool:
        if self.kind == "fraction" and self.step is not None and self.step.denominator == 1:
            return True
        if self.low is not None and self.high is not None:
            if self.low > self.high or (self.low == self.high and (self.low_open or self.high_open)):
                return True
            if self.step is not None:
                return self.multiples() is not None and not self.multiples()
            if self.kind == "fraction" and self.low == self.high:
                return self.low.denominator == 1
        return False

    def complement(self) -> list[Numbers]:
        """The numbers that are not in it, as sets."""
        if self.step is not None:
            raise Unsayable("numbers that are not multiples of another")
        out = []
        if self.kind != "any":
            out.append(Numbers("fraction" if self.kind == "whole" else "whole"))
        if self.low is not None:
            out.append(Numbers(high=self.low, high_open=not self.low_open))
        if self.high is not None:
            out.append(Numbers(low=self.high, low_open=not self.high_open))
        return out

    def multiples(self) -> list[Fraction] | None:
        """Every number of the set, where it has a step and both bounds; None where these are too many."""
        if self.step is None or self.low is None or self.high is None:
            return None
        first, last = ceil(self.low / self.step), floor(self.high / self.step)
        if last - first >= MOST_VALUES:
            return None
        found = [self.step * times for times in range(first, last + 1)]
        if self.kind == "fraction":
            found = [number for number in found if number.denominator != 1]
        open_ends = {self.low if self.low_open else None, self.high if self.high_open else None}
        return [number for number in found if number not in open_ends]

    def value(self) -> Fraction | None:
        """The number, where it is only one."""
        return self.low if self.low is not None and self.low == self.high else None

    def expression(self) -> str:
        """The definition of a lexeme."""
        single = self.value()
        listed = [single] if single is not None else self.multiples()
        if listed is not None:
            return " | ".join(f'"{decimal(number)}"' for number in listed)
        parts = [f"/{self._form()}/"]
        if self.step is not None:
            parts.append(f"/{_multiples(self.step)}/")
        if self.kind == "whole":
            if self.low is not None or self.high is not None:
                parts.append(f"/{_whole_range(self.low, self.high)}/")
        else:
            parts += [] if self.low is None else [f"/{_at_least(self.low, self.low_open)}/"]
            parts += [] if self.high is None else [f"/{_at_most(self.high, self.high_open)}/"]
        return " & ".join(parts)

    def _form(self) -> str:
        if self.kind == "whole":
            return f"-?{WHOLE}"
        if self.kind == "fraction":
            return FRACTION
        return ANY_NUMBER if (self.low, self.high, self.step) == (None, None, None) else PLAIN

    def rule(self) -> str:
        """The body of a rule: a schema of llguidance's own for multiples that no expression describes, else nothing."""
        if self.kind != "whole" or self.step is None or self.value() is not None or self.multiples() is not None:
            return ""
        try:
            _multiples(self.step)
        except Unsayable:
            bounds = {"multipleOf": self.step, "minimum": self.low, "maximum": self.high}
            if self.step > LARGEST_STEP or any(one is not None and abs(one) >= 2**31 for one in bounds.values()):
                raise
            plain = {name: int(bound) for name, bound in bounds.items() if bound is not None}
            options = {"x-guidance": {"whitespace_flexible": False}}
            return f"%json {json.dumps({'type': 'integer', **plain, **options})}"
        return ""


def decimal(number: Fraction) -> str:
    """The shortest spelling without an exponent. Raises `Unsayable` where it has no end."""
    digits, rest = 0, number.denominator
    while rest % 10 == 0 or rest % 2 == 0 or rest % 5 == 0:
        rest, digits = rest // (10 if rest % 10 == 0 else 2 if rest % 2 == 0 else 5), digits + 1
        if digits > MOST_DIGITS:
            raise Unsayable("numbers with that many digits")
    if rest != 1 or abs(number) >= 10**MOST_DIGITS:
        raise Unsayable("numbers with that many digits")
    sign, text = "-" if number < 0 else "", str(abs(int(number * 10**digits))).zfill(digits + 1)
    return sign + (f"{text[:-digits]}.{text[-digits:].rstrip('0')}".rstrip(".") if digits else text)


def _common(left: Fraction | None, right: Fraction | None) -> Fraction | None:
    if left is None or right is None:
        return left if right is None else right
    scale = lcm(left.denominator, right.denominator)
    return Fraction(lcm(int(left * scale), int(right * scale)), scale)


def _tighter(
    one: tuple[Fraction | None, bool], other: tuple[Fraction | None, bool], sign: int
) -> tuple[Fraction | None, bool]:
    if one[0] is None or other[0] is None:
        return other if one[0] is None else one
    if one[0] == other[0]:
        return one[0], one[1] or other[1]
    return one if (one[0] - other[0]) * sign > 0 else other


def _next(number: Fraction) -> int:
    return floor(number) + 1


# Expressions. Digits of a fraction are compared from the left; shorter ones count as followed by zeros. ---------------


def _at_least(low: Fraction, is_open: bool) -> str:
    if low < 0:
        return f"{WHOLE}(?:\\.[0-9]+)?|-(?:{_up_to(-low, is_open)})"
    return _from(low, is_open) + ("|-0(?:\\.0+)?" if low == 0 and not is_open else "")


def _at_most(high: Fraction, is_open: bool) -> str:
    if high < 0:
        return f"-(?:{_from(-high, is_open)})"
    negative = f"-{WHOLE}(?:\\.[0-9]+)?" if high or not is_open else f"-(?:{_from(Fraction(0), True)})"
    return f"{negative}|{_up_to(high, is_open)}" if high or not is_open else negative


def _split(number: Fraction) -> tuple[int, str]:
    whole, _, digits = decimal(number).partition(".")
    return int(whole), digits


def _from(low: Fraction, is_open: bool) -> str:
    """Numbers of no sign that are `low` or more."""
    whole, digits = _split(low)
    more = [f"(?:{_digits_from(whole + 1)})(?:\\.[0-9]+)?"]
    for place, digit in enumerate(digits):
        if digit != "9":
            more.append(f"{whole}\\.{digits[:place]}[{int(digit) + 1}-9][0-9]*")
    if is_open:
        return "|".join([*more, f"{whole}\\.{digits}[0-9]*[1-9][0-9]*"])
    return "|".join([*more, f"{whole}\\.{digits}[0-9]*" if digits else f"{whole}(?:\\.[0-9]+)?"])


def _up_to(high: Fraction, is_open: bool) -> str:
    """Numbers of no sign that are `high` or less; above 0 where `high` itself is left out."""
    whole, digits = _split(high)
    less = [f"(?:{_digits_between(0, whole - 1)})(?:\\.[0-9]+)?"] if whole else []
    for place, digit in enumerate(digits):
        less.append(f"{whole}\\.{digits[:place]}" if place else f"{whole}")
        if digit != "0":
            less.append(f"{whole}\\.{digits[:place]}[0-{int(digit) - 1}][0-9]*")
    if not is_open:
        less.append(f"{whole}\\.{digits}0*" if digits else f"{whole}(?:\\.0+)?")
    return "|".join(less)


def _whole_range(low: Fraction | None, high: Fraction | None) -> str:
    parts = []
    if low is None or low < 0:
        most = None if low is None else int(-low)
        least = max(1, int(-high)) if high is not None and high < 0 else 1
        inner = _digits_from(least) if most is None else _digits_between(least, most)
        parts.append(f"-(?:{inner})")
    if high is None or high >= 0:
        least = 0 if low is None or low < 0 else int(low)
        parts.append(_digits_from(least) if high is None else _digits_between(least, int(high)))
    return "|".join(parts)


def _digits_from(low: int) -> str:
    """Whole numbers from `low` on."""
    length = len(str(low))
    longer = f"[1-9][0-9]{{{length},}}"
    return f"{_digits_between(low, 10**length - 1)}|{longer}"


def _digits_between(low: int, high: int) -> str:
    """Whole numbers from `low` to `high`, neither below 0."""
    parts = []
    while low <= high:
        end = min(high, 10 ** len(str(low)) - 1)
        parts += _same_length(str(low), str(end))
        low = end + 1
    return "|".join(parts)


def _same_length(low: str, high: str) -> list[str]:
    """Numbers between two of the same length."""
    if low == high:
        return [low]
    if low[0] == high[0]:
        return [low[0] + rest for rest in _same_length(low[1:], high[1:])]
    rest = len(low) - 1
    parts, first, last = [], int(low[0]), int(high[0])
    if int(low[1:] or 0) != 0:
        parts += [low[0] + more for more in _same_length(low[1:], "9" * rest)]
        first += 1
    if (high[1:] or "") != "9" * rest:
        parts += [high[0] + more for more in _same_length("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        digit = f"[{first}-{last}]" if first < last else str(first)
        parts.append(digit + ("" if not rest else f"[0-9]{{{rest}}}"))
    return parts


def _multiples(step: Fraction) -> str:
    """All multiples of a step whose digits repeat with a short period: 2, 5, 25, 100, 0.01, 0.25 …"""
    for digits in range(1, 7):
        scaled = step * 10**digits
        if step.denominator == 1 and 10**digits % step == 0:
            ends = [str(int(end)).zfill(digits) for end in range(0, 10**digits, int(step))]
            short = [str(int(end)) for end in range(0, 10**digits, int(step))]
            if len(ends) <= MOST_VALUES:
                return f"-?(?:{'|'.join(short)}|[1-9][0-9]*(?:{'|'.join(ends)}))"
        if step < 1 and scaled.denominator == 1 and (1 / step).denominator == 1 and 1 / step <= MOST_VALUES:
            ends = [str(int(times * scaled)).zfill(digits) for times in range(1, int(1 / step))]
            tails = [f"{end.rstrip('0')}0?" for end in ends]
            return rf"-?{WHOLE}(?:\.(?:{'|'.join([*tails, '0'])}))?"
    raise Unsayable(f"all multiples of {decimal(step)}")
