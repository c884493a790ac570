"""One sequence on its way: its tokens so far, its text so far, and when it ends.

Where a constraint leaves no choice about the next tokens, they are taken without asking the model (`begin`, `follow`), and the
model reads them together with the next token that it is asked for (`pending`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from orchard.generate.errors import NumericError
from orchard.generate.protocol import State
from orchard.generate.request import Finish, Piece, Request, TokenLogprob, Usage
from orchard.generate.sampling import Sampler, logprob_of
from orchard.generate.stops import StopFinder
from orchard.text.stream import StreamDecoder
from orchard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from orchard.generate.grammar import GrammarRule


class Row:
    """`take(scores)` chooses the next token and gives the piece it adds; `finished` is set by the last piece. `cached` and
    `calls` are for the record."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, *, room: int) -> None:
        """`index`: the request's place in its list; `room`: new tokens that the context has room for."""
        self.index = index
        self.request = request
        self.limit = min(request.max_tokens, room)
        self.finished = False
        self.state = State(request.ids)
        self.cached = 0
        self.calls = 0
        self._read = 0  # of the new tokens, those that the model has been given
        self._grammar: GrammarRule | None = None
        if request.constraint is not None:
            from orchard.generate.grammar import grammar_for  # not every start needs it

            self._grammar = grammar_for(tokenizer, request.constraint).rule()
            request = replace(request, rules=(*request.rules, self._grammar))
        self._sampler = Sampler(request)
        self._ends = tokenizer.eos_ids
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopFinder(request.stop)

    @property
    def length(self) -> int:
        """The tokens this sequence can grow to."""
        return len(self.request.ids) + self.limit

    @property
    def last(self) -> int:
        """The token chosen last."""
        return self.state.output[-1]

    def pending(self) -> tuple[int, ...]:
        """New tokens that the model has not been given yet; the caller gives them now."""
        new, self._read = self.state.output[self._read :], len(self.state.output)
        return new

    def begin(self) -> Iterator[Piece]:
        """Tokens that the answer must begin with."""
        return self.follow()

    def follow(self) -> Iterator[Piece]:
        """Tokens that must come next."""
        if self._grammar is None or self.request.logprobs is not None:
            return
        while not self.finished and (tokens := self._grammar.forced(self.state)):
            for token in tokens:
                if self.finished:
                    return
                self.state = self.state.plus(token)
                yield replace(self._taken(None), forced=True)

    def take(self, scores: np.ndarray) -> Piece:
        """Keeps nothing of the scores: their memory is the runner's."""
        self.calls += 1
        self.state = self._sampler.step(self.state, scores)
        wanted = self.request.logprobs
        return self._taken(None if wanted is None else logprob_of(scores, self.last, wanted))

    def _taken(self, logprob: TokenLogprob | None) -> Piece:
        """The piece that the last token adds."""
        if self.last in self._ends:
            return self._closing(Piece(self._end(), None, "stop", logprob))
        text = self._stops.push(self._decoder.push(self.last))
        finish: Finish | None = None
        if not self._stops.found and self._grammar is not None and self._grammar.complete(self.state):
            text, finish = text + self._end(), "stop"  # nothing but the end may follow: the model need not say so
        elif not self._stops.found and len(self.state.output) >= self.limit:
            text, finish = text + self._end(), "length"
        if self._stops.found:  # also where the last few characters, held back until now, complete a stop string
            self.finished, finish = True, "stop"
        piece = Piece(text, self.last, finish, logprob)
        return piece if finish is None else self._closing(piece)

    def cancel(self) -> Piece:
        """The last piece of a sequence that ends before its time."""
        return self._closing(Piece(self._end(), None, "cancelled"))

    def fail(self, error: NumericError) -> Piece:
        """The last piece of a sequence whose scores are broken."""
        return self._closing(Piece(self._end(), None, "error", error=f"{error} ({error.hint})"))

    def _closing(self, piece: Piece) -> Piece:
        output = len(self.state.output) - (bool(self.state.output) and self.last in self._ends)
        return replace(piece, usage=Usage(len(self.request.ids), output, self.cached, self.calls))

    def _end(self) -> str:
        """What was held back."""
        self.finished = True
        return self._stops.push(self._decoder.finish()) + self._stops.finish()
