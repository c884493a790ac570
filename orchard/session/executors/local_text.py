"""What a model of this machine writes, cut into what a session is told: text, thoughts, and the beginning it was given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from orchard.core.errors import UsageError
from orchard.generate.protocol import State
from orchard.generate.request import Piece, TokenLogprob
from orchard.session.turn import Reasoning, Text
from orchard.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


class Thoughts:
    """Tells thoughts from text. Thoughts come first, between `<think>` and `</think>`; a template may have opened them."""

    def __init__(self, *, open: bool) -> None:
        self.inside = open
        self._begun = open
        self._closed = False  # just now: line breaks after thoughts belong to nobody
        self._held = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """(whether it is a thought, text) in order. What may be the beginning of a mark is held back."""
        self._held += text
        parts: list[tuple[bool, str]] = []
        if not self._begun:
            start = self._held.lstrip()
            if not start or (OPEN.startswith(start) and start != OPEN):
                return []
            self._begun, self.inside = True, start.startswith(OPEN)
            if self.inside:
                self._held = start[len(OPEN) :]
        if self.inside:
            thought, closed, rest = self._held.partition(CLOSE)
            if not closed:
                keep = _overlap(thought, CLOSE)
                self._held = thought[len(thought) - keep :]
                thought = thought[: len(thought) - keep]
            else:
                self._held, self.inside, self._closed = rest, False, True
            parts.append((True, thought))
        if not self.inside:
            said = self._held.lstrip("\n") if self._closed else self._held
            self._closed = self._closed and not said
            self._held = ""
            parts.append((False, said))
        return [part for part in parts if part[1]]

    def finish(self) -> list[tuple[bool, str]]:
        held, self._held = self._held, ""
        return [(self.inside, held)] if held else []


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text could begin the mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


@dataclass
class Events:
    """Pieces of an engine become events. `text` is what was said aloud so far."""

    thoughts: Thoughts
    text: str = ""
    reasoning: int = 0
    """Tokens spent on thoughts."""
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)

    def of(self, piece: Piece) -> Iterator[Text | Reasoning]:
        thinking = self.thoughts.inside
        if piece.id is not None:
            self._ids.append(piece.id)
            if piece.logprob is not None:
                self._logprobs.append(piece.logprob)
            self.reasoning += thinking
        parts = self.thoughts.push(piece.text)
        if piece.finish is not None:
            parts += self.thoughts.finish()
        for thought, words in parts:
            if thought:
                self._taken()
                yield Reasoning(words)
            else:
                self.text += words
                yield Text(words, *self._taken())
        if piece.finish is not None and self._ids:  # those that spelled a stop string, perhaps
            yield Text("", *self._taken())

    def _taken(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Tokens since the last event."""
        ids, logprobs = tuple(self._ids), tuple(self._logprobs)
        self._ids, self._logprobs = [], []
        return ids, logprobs


class Begin:
    """A rule that has an answer begin with a text, where the answer is also held to a grammar."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.tokenizer = tokenizer
        self.text = text

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        said = self.tokenizer.decode(state.output)
        if said.startswith(self.text):
            return scores
        if not self.text.startswith(said):
            raise cannot_begin(self.text)
        token = self.tokenizer.encode_piece(self.text[len(said) :], first=False)[0]
        wanted = scores - np.float32(
            1e6
        )  # not ruled out: the grammar may allow only another token, and then it is said above
        wanted[token] = scores.max()
        return wanted


def cannot_begin(text: str) -> UsageError:
    hint = "leave out `begin`, or ask for another form"
    return UsageError(f"an answer of the wanted form cannot begin with {text!r}", hint=hint)
