"""Cutting a text into the words that byte-level BPE works on, with Python's own `re`.

The pre-tokenizers of byte-level vocabularies are regular expressions over Unicode's classes (`\\p{L}`, `\\p{N}`, `\\s`), which
`re` does not know. Over a fixed set of characters such a class is a plain list. The set here is ASCII, the Latin letters
up to U+024F and the commonest punctuation: characters whose classes have not changed for many versions of Unicode. A text
with any other character, or an expression with anything unusual in it, is left to the `tokenizers` package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# The long s and the Turkish i are letters whose case is written with other letters of the set: not worth the risk.
_KNOWN = "\\x00-\\x7f\u00a0-\u012f\u0132-\u017e\u0180-\u024f\u2010-\u2027\u20ac"
_LETTERS = "A-Za-z\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"
_NUMBERS = "0-9\u00b2\u00b3\u00b9\u00bc-\u00be"
_SPACES = " \\t\\n\\x0b\\f\\r\u00a0"
_CLASSES = {"\\p{L}": _LETTERS, "\\p{N}": _NUMBERS, "\\s": _SPACES}
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the `ByteLevel` pre-tokenizer does by itself: the expression published with GPT-2."""
_PARTS = (
    r"\\p\{[LN]\}|\\[sSrnt]|\(\?(?:i:|[:!=])|\[\^?|\{\d+(?:,\d*)?\}(?!\+)|\((?!\?)|[\])|?*+]|[ 'A-Za-z0-9!-#%&,/:-@_`~]"
)
"""Whatever stands in an expression has to be one of these."""


def expressions_of(normalizer: Any, pre_tokenizer: Any) -> list[str] | None:
    """What cuts a text as these parts of a tokenizer.json say, one after the other; None where that is not certain."""
    if normalizer is not None and normalizer != {"type": "NFC"}:  # which changes none of the characters above
        return None
    if not isinstance(pre_tokenizer, dict):
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None
    written = [_expression(step, last=step is steps[-1]) for step in steps]
    return None if None in written else [each for each in written if each]


class Splitter:
    """Cuts texts with the expressions of `expressions_of`."""

    def __init__(self, expressions: Sequence[str]) -> None:
        self._expressions = [re.compile(written) for written in expressions]
        self._unknown = re.compile(f"[^{_KNOWN}]")

    def __call__(self, text: str) -> list[str] | None:
        """The words of a text; None for a text with characters whose classes are not known here."""
        if self._unknown.search(text):
            return None
        words = [text] if text else []
        for expression in self._expressions:
            words = [part for word in words for part in _isolated(expression, word)]
        return words


def translated(expression: str) -> str | None:
    """A pre-tokenizer's expression for `re`, over the characters of the set; None where it holds anything unusual."""
    out: list[str] = []
    at, inside = 0, False
    parts = re.compile(_PARTS, re.ASCII)
    while at < len(expression):
        found = parts.match(expression, at)
        if found is None:
            return None
        part, at = found[0], found.end()
        if part in _CLASSES:
            out.append(_CLASSES[part] if inside else f"[{_CLASSES[part]}]")
        elif part == "\\S":
            if inside:
                return None
            out.append(f"[^{_SPACES}]")
        elif inside and (part[0] in "[({" or part == "&"):
            return None
        else:
            inside = part[0] == "[" or (inside and part != "]")
            out.append(part)
    try:
        re.compile("".join(out))
    except re.error:
        return None
    return "".join(out)


def _expression(step: dict[str, Any], *, last: bool) -> str | None:
    """What one step cuts out, each match a word of its own; empty for a step that cuts nothing, None for one unknown."""
    kind = step.get("type")
    if kind == "ByteLevel" and last and step.get("add_prefix_space") is False:
        return translated(_BYTE_LEVEL) if step.get("use_regex", True) else ""
    if kind == "Digits":
        return f"[{_NUMBERS}]" if step.get("individual_digits") else f"[{_NUMBERS}]+"
    pattern = step.get("pattern")
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert") and isinstance(pattern, dict):
        regex = pattern.get("Regex")
        return translated(regex) or None if isinstance(regex, str) else None
    return None


def _isolated(expression: re.Pattern[str], text: str) -> list[str]:
    """Every match, and whatever lies between matches, in order."""
    out: list[str] = []
    at = 0
    for found in expression.finditer(text):
        start, end = found.span()
        if start > at:
            out.append(text[at:start])
        if end > start:
            out.append(text[start:end])
            at = end
    if at < len(text):
        out.append(text[at:])
    return out
