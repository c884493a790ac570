"""One sequence on its way: its tokens so far, its text so far, and when it ends."""

from __future__ import annotations

import numpy as np

from orchard.generate.errors import NumericError
from orchard.generate.protocol import State
from orchard.generate.request import Finish, Piece, Request
from orchard.generate.sampling import Sampler, logprob_of
from orchard.generate.stops import StopFinder
from orchard.text.stream import StreamDecoder
from orchard.text.tokenizer import Tokenizer


class Row:
    """`take(scores)` chooses the next token and gives the piece it adds; `finished` is set by the last piece."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, *, room: int) -> None:
        """`index`: the request's place in its list; `room`: new tokens that the context has room for."""
        self.index = index
        self.request = request
        self.limit = min(request.max_tokens, room)
        self.finished = False
        self.state = State(request.ids)
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

    def take(self, scores: np.ndarray) -> Piece:
        """Keeps nothing of the scores: their memory is the runner's."""
        self.state = self._sampler.step(self.state, scores)
        wanted = self.request.logprobs
        logprob = None if wanted is None else logprob_of(scores, self.last, wanted)
        if self.last in self._ends:
            return Piece(self._end(), None, "stop", logprob)
        text = self._stops.push(self._decoder.push(self.last))
        finish: Finish | None = None
        if not self._stops.found and len(self.state.output) >= self.limit:
            text, finish = text + self._end(), "length"
        if self._stops.found:  # also where the last few characters, held back until now, complete a stop string
            self.finished, finish = True, "stop"
        return Piece(text, self.last, finish, logprob)

    def cancel(self) -> Piece:
        """The last piece of a sequence that ends before its time."""
        return Piece(self._end(), None, "cancelled")

    def fail(self, error: NumericError) -> Piece:
        """The last piece of a sequence whose scores are broken."""
        return Piece(self._end(), None, "error", error=f"{error} ({error.hint})")

    def _end(self) -> str:
        """What was held back."""
        self.finished = True
        return self._stops.push(self._decoder.finish()) + self._stops.finish()
