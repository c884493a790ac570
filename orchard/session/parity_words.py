"""What a tokenizer and its chat template make of fixed texts, held against what those of a source make of them.

All of it has to be the same: one id that differs is another prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchard.core.errors import OrchardError
from orchard.session.parity_texts import CONVERSATIONS, TEXTS
from orchard.text.chat import chat_ids
from orchard.text.tokenizer import Tokenizer

MOST_ADDED = 64
"""Added tokens that are tried in texts."""


class ExportDrift(OrchardError):
    """What was written is not what was meant; the first difference is named."""

    code = "export-drift"

    def __init__(self, check: str, where: str, source: Any, target: Any, *, hint: str = "") -> None:
        self.check, self.where = check, where
        self.source, self.target = source, target
        super().__init__(
            f"the exported model differs from its source in {check}: {where}: {_short(source)} became {_short(target)}",
            hint=hint or "nothing was left behind; this is a fault of the conversion, or of the source's own files",
        )

    def to_dict(self) -> dict[str, object]:
        divergence = {"check": self.check, "where": self.where, "source": self.source, "target": self.target}
        return {**super().to_dict(), "divergence": divergence}


@dataclass(frozen=True, eq=False)
class Words:
    """What a tokenizer and its template make of the fixed texts."""

    special: Mapping[str, Any]
    template: str | None
    rendered: Mapping[str, list[int] | str]
    tokens: Mapping[str, list[int]]
    decoded: Mapping[str, str]


def words_of(tokenizer: Tokenizer) -> Words:
    tokens, decoded = {}, {}
    for text in (*TEXTS, *_added_texts(tokenizer)):
        ids = tokenizer.encode(text)
        tokens[f"{text!r} as text"] = ids
        tokens[f"{text!r} with control tokens"] = tokenizer.encode(text, special=True, bos=tokenizer.add_bos)
        decoded[repr(text)] = tokenizer.decode(ids)
    special = {
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "eos_ids": sorted(tokenizer.eos_ids),
        "add_bos": tokenizer.add_bos,
        "control_tokens": dict(sorted(tokenizer.control_tokens.items())),
    }
    rendered = {name: _rendered(tokenizer, messages) for name, messages in CONVERSATIONS.items()}
    return Words(special, tokenizer.chat_template, rendered, tokens, decoded)


def _added_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """The tokenizer's own added tokens within text: first and last of them, where there are many."""
    contents = [token.content for _, token in sorted(tokenizer.added_tokens.items())]
    half = MOST_ADDED // 2
    for content in contents if len(contents) <= MOST_ADDED else (*contents[:half], *contents[-half:]):
        yield f"x {content} y{content}z\n{content}"


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int] | str:
    try:
        return chat_ids(tokenizer, messages)
    except OrchardError as error:  # a template may refuse a conversation; then both have to
        return f"refused: {error}"


def compare_words(source: Words, target: Words) -> None:
    for name, expected in source.special.items():
        _same("special ids", name, expected, target.special[name])
    if source.template != target.template:
        at = _first_difference(source.template or "", target.template or "")
        shown = [None if text is None else text[at : at + 40] for text in (source.template, target.template)]
        raise ExportDrift("chat template", f"from character {at}", *shown)
    for name, ids in source.rendered.items():
        _same("rendered conversations", name, ids, target.rendered[name])
    for check, ours, theirs in (
        ("tokens", source.tokens, target.tokens),
        ("decoded texts", source.decoded, target.decoded),
    ):
        for text, value in ours.items():
            _same(check, text, value, theirs.get(text))


def _same(check: str, where: str, expected: Any, found: Any) -> None:
    if expected == found:
        return
    if isinstance(expected, list | str) and isinstance(found, type(expected)):
        at = _first_difference(expected, found)
        ours, theirs = (value[at] if at < len(value) else "the end" for value in (expected, found))
        raise ExportDrift(check, f"{where[:80]}, place {at}", ours, theirs)
    if isinstance(expected, dict) and isinstance(found, dict):
        key = next(key for key in (*expected, *found) if expected.get(key) != found.get(key))
        raise ExportDrift(check, f"{where}, {key!r}", expected.get(key), found.get(key))
    raise ExportDrift(check, where, expected, found)


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    return next((at for at, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
