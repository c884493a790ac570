"""The engine: many requests at once through the same path as one.

Callers hand in requests and ask for pieces; a scheduler (`scheduler`) moves all of them on together whenever somebody waits.
What a request gets depends on its own scores and seed alone, bit for bit: not on its company, nor on when it came.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchard.core.errors import ContextOverflow, OrchardError, UsageError
from orchard.generate.prefix import GRAIN, LIMIT, Prefixes
from orchard.generate.protocol import Runner
from orchard.generate.request import Answer, Piece, Request
from orchard.generate.row import Row
from orchard.generate.scheduler import Scheduler
from orchard.generate.speculative.drafts import Drafts
from orchard.generate.stream import Collector, Stream
from orchard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from orchard.generate.torch_forward import TorchModel

Pieces = Generator[tuple[int, Piece], None, None]
OnPrompt = Callable[[Request], AbstractContextManager[Request]]
"""What is entered before a prompt is read and left when its answer has ended; between the two holds whatever it has made."""


class Engine:
    """Several threads may use one engine: their requests share every step. All it keeps between requests are beginnings of
    prompts (`prefixes`), which make later ones quicker and change no answer.

    `prefill_chunk` is how many tokens of prompts are read at once, over all sequences: it bounds memory, and how long others wait
    for it. `prefix_bytes` bounds what is kept. `slots`: sequences at a time; more have to wait. `kv_bytes` bounds their keys and
    values (None: half of the memory that is left): where it is not enough, the youngest of the lowest priority waits, and is read
    again later. `draft`: a smaller model of the same vocabulary that guesses tokens (`Request.speculation`, and by default where
    a request always takes the likeliest one); variants may have their own (`drafts`).
    """

    def __init__(
        self,
        model: Runner | TorchModel,
        tokenizer: Tokenizer,
        *,
        prefill_chunk: int = 512,
        prefix_bytes: int = LIMIT,
        slots: int = 64,
        kv_bytes: int | None = None,
        draft: Runner | None = None,
    ) -> None:
        for name, value in (("prefill_chunk", prefill_chunk), ("slots", slots), ("kv_bytes", kv_bytes)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", hint="use a whole number from 1")
        self.model = _runner(model)
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        # A runner whose sequences go on from one request to the next knows for itself where they are.
        own = getattr(self.model, "beginnings", None)
        self.prefixes: Any = Prefixes(self.model, prefix_bytes) if own is None else own
        self._adapter: str | None = None
        self.on_prompt: OnPrompt | None = None
        """Sees every request that names no adapter before its prompt is read, and may name a variant that was made for it."""
        self.drafts = Drafts(self.model, draft, ends=tokenizer.eos_ids, slots=slots)
        self._scheduler = Scheduler(
            self.model,
            self.prefixes,
            slots=slots,
            chunk=prefill_chunk,
            kv_bytes=kv_bytes,
            speculator=self.drafts.speculator,
        )

    def variant(self, adapter: str) -> Engine:
        """This engine as one for requests with an adapter: they share slots, steps and memory with all others."""
        self._known(adapter, "")
        other = copy.copy(self)
        other._adapter = adapter
        return other

    def guess_with(self, draft: Runner) -> None:
        """From now on a draft model guesses; of an engine for an adapter, for requests with that adapter alone. `DraftMismatch`
        where its vocabulary is another."""
        self.drafts.add(self._adapter, draft)

    def run(self, requests: Sequence[Request], *, cancel: threading.Event | None = None) -> Pieces:
        """The pieces of all answers as they come, each with the place of its request in the list.

        All requests are checked here, before any work: one that cannot be answered rejects the list. Work begins with the
        first `next`. Setting `cancel` ends every answer within one token, with a last piece of finish "cancelled";
        closing the generator ends it without one. Both free the stores.

        What an answer cannot get over (scores that no token can be chosen from, a rule that fails, no memory) is raised where
        there is one request. Among several, that answer alone ends, with a last piece of finish "error", and the others go on.
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

    def warm(self, ids: Sequence[int], *, adapter: str | None = None) -> int:
        """Read the beginning of a prompt that is still to come; answers how many of its tokens are kept now. A hint: where
        nothing can be kept, nothing is read."""
        adapter = adapter or self._adapter
        tokens = len(ids) // GRAIN * GRAIN
        found = self.prefixes.find([*ids, -1], adapter)
        kept = found.tokens if found is not None else 0
        limits = self.model.config
        if not self.prefixes.worth(ids, found, adapter) or tokens >= limits.context or max(ids) >= limits.vocab:
            return kept
        if not hasattr(self.model, "signature"):
            return 0
        request = Request(tuple(ids[:tokens]), max_tokens=1, seed=0, adapter=adapter)
        batch = self._scheduler.submit([Row(0, request, self.tokenizer, room=1, reads_only=True)], _never)
        try:
            self._scheduler.next(batch)
        except OrchardError:
            return kept
        finally:
            self._scheduler.close(batch)
        found = self.prefixes.find([*ids, -1], adapter)
        return found.tokens if found is not None else 0

    def facts(self) -> dict[str, Any]:
        """What the engine is doing and has done, in numbers: waiting, running, slots, kv_bytes, steps, tokens and so on."""
        kept = {"prefix_bytes": self.prefixes.nbytes}
        return {**self._scheduler.facts(), **kept, **self.drafts.facts()}

    def _checked(self, requests: Sequence[Request], stopped: Callable[[], bool]) -> Pieces:
        if self._adapter is not None:
            requests = [replace(request, adapter=request.adapter or self._adapter) for request in requests]
        requests = [self._with_guesses(request) for request in requests]
        for index, request in enumerate(requests):
            self._check(index, request)
            if request.constraint is not None:
                from orchard.generate.grammar import grammar_for  # not every start needs it

                grammar_for(self.tokenizer, request.constraint)  # what cannot be held to is refused here
            if request.speculation is not None:
                self.drafts.speculator().check(request.speculation, request.adapter)
        return self._pieces([request.seeded() for request in requests], stopped)

    def _pieces(self, requests: list[Request], stopped: Callable[[], bool]) -> Pieces:
        if not requests:
            return
        context, scheduler = self.model.config.context, self._scheduler
        with ExitStack() as done:
            rows = []
            for index, request in enumerate(requests):
                request, trouble = self._prompted(request, done)
                rows.append(Row(index, request, self.tokenizer, room=context - len(request.ids)))
                rows[-1].trouble = trouble
            batch = scheduler.submit(rows, stopped)
            del rows
            try:
                while (piece := scheduler.next(batch)) is not None:
                    yield piece
            finally:
                scheduler.close(batch)

    def _prompted(self, request: Request, done: ExitStack) -> tuple[Request, Exception | None]:
        """The request as `on_prompt` leaves it, or what went wrong there, which is this request's trouble alone."""
        if self.on_prompt is None or request.adapter is not None:
            return request, None
        try:
            return done.enter_context(self.on_prompt(request)), None
        except Exception as error:
            return request, error

    def _with_guesses(self, request: Request) -> Request:
        usual = self.drafts.usual(request)
        return request if usual is request.speculation else replace(request, speculation=usual)

    def _check(self, index: int, request: Request) -> None:
        limits, tokens = self.model.config, len(request.ids)
        if max(request.ids) >= limits.vocab:
            raise UsageError(
                f"request {index}: token id {max(request.ids)} is outside the vocabulary of {limits.vocab:,}",
                hint="encode the text with this model's own tokenizer",
            )
        for asked in (request.logprobs, request.prompt_logprobs):
            if asked is not None and asked > limits.vocab:
                raise UsageError(
                    f"request {index}: {asked} alternatives of a vocabulary of {limits.vocab:,}",
                    hint="ask for fewer logprobs",
                )
        if request.adapter is not None:
            self._known(request.adapter, f"request {index}: ")
        if tokens >= limits.context:
            over = tokens + 1 - limits.context
            raise ContextOverflow(
                tokens=tokens,
                limit=limits.context,
                hint=f"shorten the input of request {index} by at least {over:,} tokens, so that one new token has room",
            )

    def _known(self, adapter: str, where: str) -> None:
        variants = getattr(self.model, "variants", ())
        if adapter not in variants:
            known = ", ".join(map(repr, variants)) or "none"
            raise UsageError(f"{where}no adapter called {adapter!r}", hint=f"known to this engine: {known}")


def _runner(model: Runner | TorchModel) -> Runner:
    if isinstance(model, Runner):
        return model
    from orchard.generate.torch_forward import runner_of  # a torch model comes with torch; a native one never needs it

    return runner_of(model)


def _never() -> bool:
    return False
