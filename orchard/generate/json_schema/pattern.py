r"""Regular expressions as JSON Schema means them (ECMA-262), made into ones that a lexer can follow.

A pattern is read into a small tree and written out again, because the two dialects differ in ways that would go unnoticed:
`\d`, `\w`, `\s`, the dot, `[a&&b]`, `(?i)` mean something else in Rust. Written out, it describes either the text itself or
its JSON spelling, where a quote is `\"`. Every character has one spelling: itself, or its shortest escape.

What a lexer cannot follow (look-around, back references, word boundaries, anchors in the middle) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST_CHARACTERS = 10_000
"""Of one pattern."""
MOST_REPEATS = 100_000
MOST_DEPTH = 100
LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]


class PatternError(ValueError):
    """A pattern that cannot be used, and why."""


@dataclass(frozen=True)
class Chars:
    """One character out of a set; of none: nothing matches."""

    ranges: Ranges


@dataclass(frozen=True)
class Cat:
    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Alt:
    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Repeat:
    part: Tree
    low: int
    high: int | None


@dataclass(frozen=True)
class Anchor:
    """`^` or `$`."""

    end: bool


Tree = Chars | Cat | Alt | Repeat | Anchor
NOTHING = Chars(())
EMPTY = Cat(())


def ranges(*given: tuple[int, int]) -> Ranges:
    """Sorted, apart from each other."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(given):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def others(given: Ranges) -> Ranges:
    """All characters but these."""
    out, start = [], 0
    for low, high in given:
        if low > start:
            out.append((start, low - 1))
        start = high + 1
    return tuple([*out, (start, LAST)] if start <= LAST else out)


def among(given: Ranges, wanted: Ranges) -> Ranges:
    """The characters that are in both."""
    return ranges(
        *((max(a, c), min(b, d)) for a, b in given for c, d in wanted if max(a, c) <= min(b, d)),
    )


ANY_CHARACTER = Chars(((0, LAST),))
ANY_TEXT = Repeat(ANY_CHARACTER, 0, None)


def cat(parts: Iterable[Tree]) -> Tree:
    flat = [inner for part in parts for inner in (part.parts if isinstance(part, Cat) else (part,))]
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def alt(parts: Iterable[Tree]) -> Tree:
    kept = tuple(dict.fromkeys(part for part in parts if part != NOTHING))
    return NOTHING if not kept else kept[0] if len(kept) == 1 else Alt(kept)


def repeat(part: Tree, low: int, high: int | None) -> Tree:
    if part == NOTHING:
        return EMPTY if low == 0 else NOTHING
    return EMPTY if high == 0 else part if (low, high) == (1, 1) else Repeat(part, low, high)


def literal(text: str) -> Tree:
    return cat(Chars(((ord(c), ord(c)),)) for c in text)


def whole(tree: Tree) -> Tree:
    """A pattern is searched for; this is what the whole text must match, without anchors."""
    branches = []
    for starts, body, ends in _edges(tree):
        branches.append(cat([*([] if starts else [ANY_TEXT]), body, *([] if ends else [ANY_TEXT])]))
    return alt(branches)


def unanchored(tree: Tree) -> Tree:
    """What a text must match where the pattern stands for all of it: its anchors say nothing new."""
    return alt(body for _, body, _ in _edges(tree))


def _edges(tree: Tree) -> list[tuple[bool, Tree, bool]]:
    """Branches of a pattern without anchors, with whether each begins at the start and stops at the end of the text."""
    if isinstance(tree, Anchor):
        return [(not tree.end, EMPTY, tree.end)]
    if isinstance(tree, Alt):
        return [edge for part in tree.parts for edge in _edges(part)]
    if not _anchored(tree):
        return [(False, tree, False)]
    if not isinstance(tree, Cat):
        raise PatternError("an anchor (^ or $) that is repeated")
    found: list[tuple[bool, Tree, bool]] = [(False, EMPTY, False)]
    for part in tree.parts:
        joined = []
        for starts, body, ends in found:
            for more_starts, more, more_ends in _edges(part):
                if (more_starts and body != EMPTY) or (ends and more != EMPTY):
                    raise PatternError("an anchor (^ or $) in the middle")
                joined.append((starts or more_starts, cat([body, more]), ends or more_ends))
        found = joined
        if len(found) > 256:
            raise PatternError("too many anchors")
    return found


def _anchored(tree: Tree) -> bool:
    if isinstance(tree, Anchor):
        return True
    if isinstance(tree, Repeat):
        return _anchored(tree.part)
    return isinstance(tree, Cat | Alt) and any(_anchored(part) for part in tree.parts)


SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_SURROGATES = (0xD800, 0xDFFF)


def spelled(tree: Tree, *, quoted: bool) -> str:
    """The tree as a regular expression of Rust, without anchors and without a slash. `quoted`: of the JSON spelling."""
    if isinstance(tree, Chars):
        return _class(tree.ranges, quoted)
    if isinstance(tree, Cat):
        return "".join(_grouped(part, quoted, Alt) for part in tree.parts)
    if isinstance(tree, Alt):
        return "|".join(spelled(part, quoted=quoted) or "(?:)" for part in tree.parts)
    if isinstance(tree, Repeat):
        times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((tree.low, tree.high))
        bounds = f"{{{tree.low},{'' if tree.high is None else tree.high}}}"
        return f"(?:{spelled(tree.part, quoted=quoted)})" + (times or bounds)
    raise PatternError("an anchor (^ or $) in the middle")


def text_expression(tree: Tree) -> str:
    """For text as it is."""
    return spelled(tree, quoted=False) or "(?:)"


def json_expression(tree: Tree) -> str:
    """For the text as JSON, quotes included."""
    return f"\\x22(?:{spelled(tree, quoted=True)})\\x22"


def _grouped(tree: Tree, quoted: bool, kind: type[Alt]) -> str:
    inner = spelled(tree, quoted=quoted)
    return f"(?:{inner})" if isinstance(tree, kind) else inner


def _class(given: Ranges, quoted: bool) -> str:
    plain = among(given, others(ranges(_SURROGATES)))
    if not quoted:
        return _brackets(plain)
    special = ranges((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
    escaped = [code for low, high in among(plain, special) for code in range(low, high + 1)]
    options = [_brackets(among(plain, others(special)))] if among(plain, others(special)) else []
    if escaped:
        options.append(f"\\\\(?:{'|'.join(_escapes(escaped))})")
    return f"(?:{'|'.join(options)})" if len(options) > 1 else options[0] if options else "[^\\x00-\\x{10FFFF}]"


def _escapes(codes: list[int]) -> list[str]:
    """What stands after the backslash of characters that JSON spells with one."""
    out = [_brackets(ranges(*((ord(SHORT[code]),) * 2 for code in codes if code in SHORT)))]
    for half in (0, 1):
        digits = [f"{code & 15:x}" for code in codes if code not in SHORT and code >> 4 == half]
        if digits:
            out.append(f"u00{half}" + (f"[{''.join(digits)}]" if len(digits) > 1 else digits[0]))
    return out if any(code in SHORT for code in codes) else out[1:]


def _brackets(given: Ranges) -> str:
    if not given:
        return "[^\\x00-\\x{10FFFF}]"
    if len(given) == 1 and given[0][0] == given[0][1]:
        return _letter(given[0][0])
    return f"[{''.join(_letter(low) + (f'-{_letter(high)}' if high > low else '') for low, high in given)}]"


def _letter(code: int) -> str:
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\x{{{code:X}}}"
