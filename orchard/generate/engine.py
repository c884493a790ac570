"""The engine: many requests at once through the same path as one.

Prompts are read in chunks, padded on the right; then every step adds one token to every live sequence, and finished
sequences leave the stores. Rows never look at each other. What a request gets therefore depends on its own scores and
seed alone; those scores may differ in the last bits between batch sizes, as matrix products round differently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from orchard.core.errors import ContextOverflow, UsageError
from orchard.generate.errors import NumericError
from orchard.generate.prefix import GRAIN, LIMIT, Prefixes
from orchard.generate.protocol import Pass, Runner, Use
from orchard.generate.request import Answer, Piece, Request
from orchard.generate.row import Row
from orchard.generate.stream import Collector, Stream
from orchard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from orchard.generate.torch_forward import TorchModel

Pieces = Generator[tuple[int, Piece], None, None]


class Engine:
    """Several threads may use one engine. All it keeps between runs are beginnings of prompts (`prefixes`), which make later
    ones quicker and change no answer.

    `prefill_chunk` is how many tokens of prompts are read at once, over all sequences: it bounds memory, and how long a
    cancelled run may go on. `prefix_bytes` bounds what is kept.
    """

    def __init__(
        self,
        model: Runner | TorchModel,
        tokenizer: Tokenizer,
        *,
        prefill_chunk: int = 512,
        prefix_bytes: int = LIMIT,
    ) -> None:
        if prefill_chunk < 1:
            raise UsageError(f"prefill_chunk is {prefill_chunk}", hint="use a whole number from 1")
        self.model = _runner(model)
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.prefixes = Prefixes(self.model, prefix_bytes)

    def run(self, requests: Sequence[Request], *, cancel: threading.Event | None = None) -> Pieces:
        """The pieces of all answers as they come, each with the place of its request in the list.

        All requests are checked here, before any work: one that cannot be answered rejects the list. Work begins with the
        first `next`. Setting `cancel` ends every answer within one token, with a last piece of finish "cancelled";
        closing the generator ends it without one. Both free the stores.

        Scores that no token can be chosen from raise `NumericError` where there is one request. Among several, that
        answer alone ends, with a last piece of finish "error", and the others go on.
        """
        return self._checked(requests, cancel.is_set if cancel is not None else _never)

    def answer(self, requests: Sequence[Request], *, cancel: threading.Event | None = None) -> list[Answer]:
        """All answers, in the order of the requests; `run` says when one of them may have finish "error"."""
        collectors = [Collector(request.seeded()) for request in requests]
        for index, piece in self.run([collector.request for collector in collectors], cancel=cancel):
            collectors[index].add(piece)
        return [collector.answer() for collector in collectors]

    def stream(self, request: Request, *, cancel: threading.Event | None = None) -> Stream:
        """One answer, piece by piece."""
        closed, request = threading.Event(), request.seeded()  # `cancel` may be shared; closing sets only our own
        stopped = closed.is_set if cancel is None else lambda: closed.is_set() or cancel.is_set()
        return Stream(self._checked([request], stopped), request, closed)

    def warm(self, ids: Sequence[int]) -> int:
        """Read the beginning of a prompt that is still to come; answers how many of its tokens are kept now. A hint: where
        nothing can be kept, nothing is read."""
        tokens = len(ids) // GRAIN * GRAIN
        found = self.prefixes.find([*ids, -1])
        if not self.prefixes.worth(ids, found) or tokens >= self.model.config.context:
            return found.tokens if found is not None else 0
        forward = self.model.begin([ids[:tokens]], length=tokens + 1, held=[found])
        if not hasattr(self.model, "signature"):
            return 0
        self._read(forward, _never)
        self._keep(forward, [tuple(ids[:tokens])], [found])
        return tokens

    def _checked(self, requests: Sequence[Request], stopped: Callable[[], bool]) -> Pieces:
        for index, request in enumerate(requests):
            self._check(index, request)
            if request.constraint is not None:
                from orchard.generate.grammar import grammar_for  # not every start needs it

                grammar_for(self.tokenizer, request.constraint)  # what cannot be held to is refused here
        return self._pieces([request.seeded() for request in requests], stopped)

    def _pieces(self, requests: list[Request], stopped: Callable[[], bool]) -> Pieces:
        if not requests:
            return
        context = self.model.config.context
        rows = [
            Row(index, request, self.tokenizer, room=context - len(request.ids))
            for index, request in enumerate(requests)
        ]
        for row in rows:
            for piece in row.begin():
                yield row.index, piece
        rows = [row for row in rows if not row.finished]
        scores, forward = self._begin(rows, stopped) if rows else (None, None)
        while scores is not None and forward is not None:
            for place, row in enumerate(rows):
                for piece in _taken(row, scores[place], alone=len(requests) == 1):
                    yield row.index, piece
            live = [place for place, row in enumerate(rows) if not row.finished]
            if live and len(live) < len(rows):
                forward.keep(live)
            rows = [rows[place] for place in live]
            scores = _next(forward, rows) if rows and not stopped() else None
        del forward
        for row in rows:  # none, unless the run was cancelled
            yield row.index, row.cancel()

    def _begin(self, rows: list[Row], stopped: Callable[[], bool]) -> tuple[np.ndarray | None, Pass]:
        """Read all prompts, but for beginnings that are known, and remember the new ones."""
        prompts = [(*row.request.ids, *row.pending()) for row in rows]
        found = [self.prefixes.find(row.request.ids) for row in rows]
        forward = self.model.begin(prompts, length=max(row.length for row in rows), held=found)
        for row, start in zip(rows, forward.starts, strict=True):
            row.cached = start
        if not self._read(forward, stopped):
            return None, forward
        self._keep(forward, [row.request.ids for row in rows], found)
        return forward.first(), forward

    def _keep(self, forward: Pass, prompts: Sequence[Sequence[int]], found: Sequence[Use | None]) -> None:
        for place, ids in enumerate(prompts):
            tokens = self.prefixes.worth(ids, found[place])
            held = forward.hold(place, tokens) if tokens else None
            if held is not None:
                self.prefixes.add(held)

    def _read(self, forward: Pass, stopped: Callable[[], bool]) -> bool:
        """Read the prompts; False when told to stop on the way."""
        width = max(1, self.prefill_chunk // len(forward.lengths))
        for start in range(min(forward.starts), forward.longest, width):
            if stopped():
                return False
            forward.read(start, start + width)
        return not stopped()

    def _check(self, index: int, request: Request) -> None:
        limits, tokens = self.model.config, len(request.ids)
        if max(request.ids) >= limits.vocab:
            raise UsageError(
                f"request {index}: token id {max(request.ids)} is outside the vocabulary of {limits.vocab:,}",
                hint="encode the text with this model's own tokenizer",
            )
        if request.logprobs is not None and request.logprobs > limits.vocab:
            raise UsageError(
                f"request {index}: {request.logprobs} alternatives of a vocabulary of {limits.vocab:,}",
                hint="ask for fewer logprobs",
            )
        if tokens >= limits.context:
            over = tokens + 1 - limits.context
            raise ContextOverflow(
                tokens=tokens,
                limit=limits.context,
                hint=f"shorten the input of request {index} by at least {over:,} tokens, so that one new token has room",
            )


def _runner(model: Runner | TorchModel) -> Runner:
    if isinstance(model, Runner):
        return model
    from orchard.generate.torch_forward import runner_of  # a torch model comes with torch; a native one never needs it

    return runner_of(model)


def _taken(row: Row, scores: np.ndarray, *, alone: bool) -> Iterator[Piece]:
    """The token that the scores give, and those that must follow it."""
    try:
        yield row.take(scores)
        yield from row.follow()
    except NumericError as error:
        if alone:
            raise
        yield row.fail(error)


def _next(forward: Pass, rows: Sequence[Row]) -> np.ndarray:
    new = [row.pending() for row in rows]
    return forward.step([ids[0] for ids in new]) if max(map(len, new)) == 1 else forward.extend(new)


def _never() -> bool:
    return False
