"""One answer as it grows, and the answer when it is done."""

from __future__ import annotations

import threading
from collections.abc import Generator
from types import TracebackType

from orchard.core.errors import UsageError
from orchard.generate.request import Answer, Finish, Piece, Request, TokenLogprob, Usage


class Collector:
    """Puts the pieces of one answer together."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.finish: Finish | None = None
        self.error: str | None = None
        self.usage: Usage | None = None
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt: tuple[TokenLogprob, ...] = ()

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._prompt = piece.prompt or self._prompt
        if piece.id is not None:
            self._ids.append(piece.id)
            if piece.logprob is not None:
                self._logprobs.append(piece.logprob)
        self.finish, self.error, self.usage = piece.finish, piece.error, piece.usage

    def answer(self) -> Answer:
        if self.finish is None or self.request.seed is None:
            raise UsageError("the answer is not complete yet", hint="iterate to the end first, or close the stream")
        return Answer(
            text="".join(self._texts),
            ids=tuple(self._ids),
            finish=self.finish,
            usage=self.usage or Usage(input=len(self.request.ids), output=len(self._ids)),
            seed=self.request.seed,
            logprobs=None if self.request.logprobs is None else tuple(self._logprobs),
            error=self.error,
            prompt_logprobs=None if self.request.prompt_logprobs is None else self._prompt,
        )


class Stream:
    """Iterate for the pieces; `answer` is there afterwards. `close()` ends it early, from any thread: the memory is
    free at once, or within one token where another thread is waiting for that token."""

    def __init__(
        self, pieces: Generator[tuple[int, Piece], None, None], request: Request, closed: threading.Event
    ) -> None:
        """`closed` is an event that `pieces` obeys; it belongs to this stream alone."""
        self.request = request
        self._pieces = pieces
        self._closed = closed
        self._collector = Collector(request)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        _, piece = next(self._pieces)
        self._collector.add(piece)
        return piece

    @property
    def answer(self) -> Answer:
        """All of it. After an early `close()`: what had been given out, with finish "cancelled"."""
        if self._collector.finish is None and self._closed.is_set():
            self._collector.finish = "cancelled"
        return self._collector.answer()

    def close(self) -> None:
        self._closed.set()
        try:
            self._pieces.close()
        except ValueError:  # it is at work in another thread, and will see the event
            return

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
