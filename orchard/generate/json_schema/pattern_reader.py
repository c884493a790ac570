"""Reads a pattern of ECMA-262 into the tree of `json_schema.pattern`, or says what in it cannot be used."""

from __future__ import annotations

from functools import lru_cache

from orchard.generate.json_schema.pattern import (
    EMPTY,
    LAST,
    MOST_CHARACTERS,
    MOST_DEPTH,
    MOST_REPEATS,
    Anchor,
    Chars,
    PatternError,
    Ranges,
    Tree,
    alt,
    cat,
    others,
    ranges,
    repeat,
)

DIGITS = ranges((0x30, 0x39))
WORDS = ranges((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
LINE_ENDS = ranges((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
SPACES = ranges(
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_CLASSES = {"d": DIGITS, "w": WORDS, "s": SPACES}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_GENERAL = {
    "Letter": "L",
    "Lowercase_Letter": "Ll",
    "Uppercase_Letter": "Lu",
    "Number": "N",
    "Decimal_Number": "Nd",
    "digit": "Nd",
    "Punctuation": "P",
    "punct": "P",
    "Symbol": "S",
    "Separator": "Z",
    "Space_Separator": "Zs",
    "Mark": "M",
    "Control": "Cc",
}


@lru_cache(maxsize=512)
def read_pattern(pattern: str) -> Tree:
    """Raises `PatternError`."""
    if len(pattern) > MOST_CHARACTERS:
        raise PatternError(f"{len(pattern):,} characters long, more than {MOST_CHARACTERS:,}")
    try:
        pattern.encode()
    except UnicodeEncodeError:
        raise PatternError("not valid Unicode") from None
    reader = _Reader(pattern)
    tree = reader.alternatives(0)
    if reader.at < len(pattern):
        raise PatternError("a parenthesis closes that was not opened")
    return tree


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self) -> str:
        if self.at >= len(self.pattern):
            raise PatternError("it ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def alternatives(self, depth: int) -> Tree:
        if depth > MOST_DEPTH:
            raise PatternError(f"parentheses more than {MOST_DEPTH} deep")
        branches = [self.sequence(depth)]
        while self.peek("|"):
            self.at += 1
            branches.append(self.sequence(depth))
        return alt(branches)

    def sequence(self, depth: int) -> Tree:
        parts: list[Tree] = []
        while self.at < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            parts.append(self.quantified(self.atom(depth)))
        return cat(parts) if parts else EMPTY

    def atom(self, depth: int) -> Tree:
        character = self.take()
        if character == "(":
            self.group_kind()
            inner = self.alternatives(depth + 1)
            if self.at >= len(self.pattern):
                raise PatternError("a parenthesis is not closed")
            self.at += 1
            return inner
        if character in "*+?":
            raise PatternError(f"nothing to repeat before {character}")
        if character == "[":
            return Chars(self.bracket())
        if character == "\\":
            return self.escape()
        if character in "^$":
            return Anchor(character == "$")
        return Chars(others(LINE_ENDS)) if character == "." else Chars(((ord(character), ord(character)),))

    def group_kind(self) -> None:
        """After "(": goes past what says that a group is not captured, or how it is called."""
        if not self.peek("?"):
            return
        for opening, meaning in (("?=", "ahead"), ("?!", "ahead"), ("?<=", "behind"), ("?<!", "behind")):
            if self.peek(opening):
                raise PatternError(f"it looks {meaning} with ({opening}…)")
        if self.peek("?:"):
            self.at += 2
            return
        named = self.peek("?<") or self.peek("?P<")
        end = self.pattern.find(">", self.at)
        if not named or end < 0:
            raise PatternError("flags or a group of an unknown kind, (?…")
        self.at = end + 1

    def quantified(self, part: Tree) -> Tree:
        bounds = self.bounds()
        if bounds is None:
            return part
        low, high = bounds
        if max(low, high or 0) > MOST_REPEATS:
            raise PatternError(f"more than {MOST_REPEATS:,} repetitions")
        if high is not None and high < low:
            raise PatternError(f"{{{low},{high}}} is in the wrong order")
        if self.peek("?"):
            self.at += 1  # lazy: it matches the same texts
        if self.at < len(self.pattern) and self.pattern[self.at] in "*+?":
            raise PatternError("a repetition of a repetition")
        if isinstance(part, Anchor):
            raise PatternError("an anchor (^ or $) that is repeated")
        return repeat(part, low, high)

    def bounds(self) -> tuple[int, int | None] | None:
        for mark, found in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.peek(mark):
                self.at += 1
                return found
        end = self.pattern.find("}", self.at)
        if not self.peek("{") or end < 0:
            return None
        low, comma, high = self.pattern[self.at + 1 : end].partition(",")
        if not _number(low) or (high and not _number(high)) or len(low) > 9 or len(high) > 9:
            return None  # a brace like any other
        self.at = end + 1
        return int(low), (int(high) if high else None) if comma else int(low)

    def escape(self) -> Tree:
        character = self.take()
        if character in "bB":
            raise PatternError(f"a word boundary, \\{character}")
        if character in "123456789k":
            raise PatternError("a reference back to a group")
        return Chars(self.escaped(character))

    def escaped(self, character: str) -> Ranges:
        """After a backslash, inside brackets and outside."""
        if character.lower() in _CLASSES:
            found = _CLASSES[character.lower()]
            return found if character.islower() else others(found)
        if character in "pP":
            return self.category(character == "P")
        code = self.code(character)
        return ((code, code),)

    def code(self, character: str) -> int:
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "0" and not self.pattern[self.at : self.at + 1].isdigit():
            return 0
        if character == "c" and self.pattern[self.at : self.at + 1].isascii() and self.peek_letter():
            return ord(self.take()) % 32
        if character == "x":
            return self.hexadecimal(2)
        if character == "u":
            return self.unicode()
        if character.isascii() and not character.isalnum() and character != "_":
            return ord(character)
        raise PatternError(f"\\{character} is not known")

    def peek_letter(self) -> bool:
        return self.pattern[self.at : self.at + 1].isalpha()

    def unicode(self) -> int:
        if self.peek("{"):
            end = self.pattern.find("}", self.at)
            digits = self.pattern[self.at + 1 : max(end, 0)]
            if not _hexadecimal(digits) or len(digits) > 6 or int(digits, 16) > LAST:
                raise PatternError("\\u{…} without the number of a character")
            self.at = end + 1
            return int(digits, 16)
        code = self.hexadecimal(4)
        if 0xD800 <= code < 0xDC00 and self.peek("\\u"):
            back, self.at = self.at, self.at + 2
            low = self.hexadecimal(4)
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            self.at = back
        return code

    def hexadecimal(self, length: int) -> int:
        digits = self.pattern[self.at : self.at + length]
        if len(digits) != length or not _hexadecimal(digits):
            raise PatternError(f"an escape without {length} hexadecimal digits")
        self.at += length
        return int(digits, 16)

    def category(self, negated: bool) -> Ranges:
        end = self.pattern.find("}", self.at)
        if not self.peek("{") or end < 0:
            raise PatternError("\\p without a name")
        name = self.pattern[self.at + 1 : end]
        self.at = end + 1
        found = _category(name.removeprefix("gc=").removeprefix("General_Category="))
        return others(found) if negated else found

    def bracket(self) -> Ranges:
        negated = self.peek("^")
        self.at += negated
        found: list[tuple[int, int]] = []
        while not self.peek("]"):
            low = self.member()
            if self.peek("-") and not self.pattern.startswith("-]", self.at):
                self.at += 1
                high = self.member()
                if any(len(end) != 1 or end[0][0] != end[0][1] for end in (low, high)):
                    raise PatternError("a range in brackets between things that are no characters")
                if low[0][0] > high[0][0]:
                    raise PatternError("a range in brackets in the wrong order")
                found.append((low[0][0], high[0][0]))
            else:
                found += low
        self.at += 1
        return others(ranges(*found)) if negated else ranges(*found)

    def member(self) -> Ranges:
        character = self.take()
        if character != "\\":
            return ((ord(character), ord(character)),)
        escaped = self.take()
        if escaped == "b":
            return ((0x08, 0x08),)
        return self.escaped(escaped)


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _hexadecimal(text: str) -> bool:
    return bool(text) and all(c in "0123456789abcdefABCDEF" for c in text)


@lru_cache(maxsize=16)
def _category(name: str) -> Ranges:
    """The characters of a general category of Unicode, as Python's tables have it."""
    from unicodedata import category

    short = _GENERAL.get(name, name)
    if len(short) > 2 or short[:1] not in tuple("LMNPSZC") or (short[:1] == "C" and short not in ("Cc", "Cf")):
        raise PatternError(f"\\p{{{name}}} is not known")
    found = ranges(*((code, code) for code in range(LAST + 1) if category(chr(code)).startswith(short)))
    if not found:
        raise PatternError(f"\\p{{{name}}} is not known")
    return found
