"""Log-probabilities in OpenAI's two shapes. A token may be half a character, so its bytes are told as well."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from orchard.session.turn import Done, Text, TokenLogprob

LEAST = -9999.0
"""What OpenAI says of a token that is all but impossible; JSON has no word for minus infinity."""
Spell = Callable[[Sequence[int]], list[bytes]]
Told = tuple[bytes, TokenLogprob | None, int]
"""A token's bytes, what the model thought of it, and where it begins in the text."""


def speller(executor: Any) -> Spell | None:
    """What tells the bytes of tokens, where a model has tokens."""
    found: Spell | None = getattr(executor, "spelled", None)
    return found


class ChatLogprobs:
    """Of one answer, as `/v1/chat/completions` gives them."""

    def __init__(self, spell: Spell | None, *, stops: bool) -> None:
        self._spell = spell
        self._stops = stops
        self._written = self._tokens = 0

    def entries(self, event: Text) -> list[dict[str, Any]]:
        """Tokens that spelled a stop string are not in the text, and not here."""
        self._written += len(event.delta.encode())
        found = []
        for entry, data in zip(event.logprobs, _spelled(event, self._spell), strict=True):
            if self._stops and self._tokens >= self._written and data:
                break
            self._tokens += len(data)
            top = self._spell([token for token, _ in entry.top]) if self._spell is not None else []
            others = [_token(other, value) for other, (_, value) in zip(top, entry.top, strict=False)]
            found.append(_token(data, entry.logprob) | {"top_logprobs": others})
        return found


class TextLogprobs:
    """Of one text, as `/v1/completions` gives them. `text_offset` counts characters from the beginning of the answer's text.

    With stop strings (`stops`) a token is told when its text is, so that those which spelled a stop string never are.
    """

    def __init__(self, spell: Spell | None, *, stops: bool = False) -> None:
        self._spell = spell
        self._stops = stops
        self._reading = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = self._written = 0
        self._held: list[Told] = []

    def shape(self, event: Text, *, first_unknown: bool = False) -> dict[str, list[Any]]:
        """`first_unknown`: the event is a prompt, and nobody knows how likely its first token was."""
        known: list[TokenLogprob | None] = list(event.logprobs)
        if first_unknown:
            known.insert(0, None)
        self._written += len(event.delta)
        for entry, data in zip(known, _spelled(event, self._spell, len(known)), strict=True):
            self._held.append((data, entry, self._at))
            self._at += len(self._reading.decode(data))
        count = len(self._held)
        if self._stops and event.ids:  # without ids it is the end token, and nothing is held for a stop string any more
            count = sum(place < self._written for _, _, place in self._held)
        return self._told(count)

    def last(self, event: Done) -> dict[str, list[Any]] | None:
        """What is left when the answer ends."""
        return self._told(len(self._held)) if self._held and event.finish != "stop" else None

    def _told(self, count: int) -> dict[str, list[Any]]:
        told, self._held = self._held[:count], self._held[count:]
        return {
            "tokens": [legacy_name(data) for data, _, _ in told],
            "token_logprobs": [None if entry is None else _bounded(entry.logprob) for _, entry, _ in told],
            "top_logprobs": [self._top(entry, data) for data, entry, _ in told],
            "text_offset": [place for _, _, place in told],
        }

    def _top(self, entry: TokenLogprob | None, data: bytes) -> dict[str, float] | None:
        """The likeliest tokens, and the chosen one, which need not be among them."""
        if entry is None:
            return None
        names = self._spell([token for token, _ in entry.top]) if self._spell is not None else []
        found: dict[str, float] = {}
        for name, (_, value) in zip(names, entry.top, strict=False):
            found.setdefault(legacy_name(name), _bounded(value))
        found.setdefault(legacy_name(data), _bounded(entry.logprob))
        return found


def joined(shapes: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The shapes of the pieces of one text, as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for shape in shapes for value in shape[name]] for name in names}


def shown(data: bytes) -> str:
    """A token as text; bytes that are no text by themselves are spelled out."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def legacy_name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + shown(data)


def _spelled(event: Text, spell: Spell | None, count: int | None = None) -> list[bytes]:
    """The bytes of the tokens that an event tells of; where a model cannot tell, the first has all of the text."""
    count = len(event.logprobs) if count is None else count
    if spell is None:
        return [event.delta.encode()] + [b""] * (count - 1) if count else []
    ids = event.ids if len(event.ids) == count else [entry.id for entry in event.logprobs]
    return spell(ids)


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": shown(data), "logprob": _bounded(logprob), "bytes": list(data)}


def _bounded(logprob: float) -> float:
    return max(LEAST, min(0.0, float(logprob)))
