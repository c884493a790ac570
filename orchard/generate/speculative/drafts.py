"""The draft models of an engine: one for the model, others for its variants, and which requests are guessed for unasked.

A request that names no `speculation` is guessed for by a draft model where one is there and the request always takes the
likeliest token: the answer is the same in any case, and how many guesses pay, down to none, is measured while it is written. On
a GPU that answers such requests several tokens at a time, only those are guessed for whose scores are looked at anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from orchard.generate.protocol import Runner

if TYPE_CHECKING:
    from orchard.generate.request import Request
    from orchard.generate.speculative.options import Speculation
    from orchard.generate.speculative.speculator import Speculator


class Drafts:
    """Shared by an engine and its variants; nothing is imported or made before somebody guesses."""

    def __init__(self, model: Runner, draft: Runner | None, *, ends: Collection[int], slots: int) -> None:
        if draft is not None:
            _check(model, draft)
        self._model = model
        self._draft = draft
        self._own: dict[str, Runner] = {}
        self._ends, self._slots = ends, slots
        self._lock = threading.Lock()
        self._speculator: Speculator | None = None
        # Slots on a GPU take the likeliest tokens of several steps without being asked in between.
        self._bursts = hasattr(model, "adapted")

    def add(self, adapter: str | None, draft: Runner) -> None:
        """A draft model for a variant, or for the model itself. `DraftMismatch` where its vocabulary is another."""
        _check(self._model, draft)
        if adapter is not None:
            self._own[adapter] = draft
            return
        with self._lock:
            self._draft = draft
            if self._speculator is not None:
                self._speculator.guess_with(draft)

    def drop(self, adapter: str) -> None:
        """Forget a variant's draft model, if it has one."""
        if self._own.pop(adapter, None) is not None and self._speculator is not None:
            self._speculator.drop(adapter)

    def has(self, adapter: str | None) -> bool:
        """Whether somebody could guess for requests with this adapter."""
        return self._draft is not None or adapter in self._own

    def speculator(self) -> Speculator:
        with self._lock:
            if self._speculator is None:
                from orchard.generate.speculative.speculator import Speculator  # few engines need it

                self._speculator = Speculator(
                    self._model, draft=self._draft, own=self._own, ends=self._ends, slots=self._slots
                )
            return self._speculator

    def usual(self, request: Request) -> Speculation | None:
        """How a request is guessed for that says nothing about it."""
        if request.speculation is not None or request.sampling.temperature or not self.has(request.adapter):
            return request.speculation
        if self._bursts and not _looked_at(request):
            return None
        from orchard.generate.speculative.speculator import DRAFT

        return DRAFT

    def facts(self) -> dict[str, Any]:
        return {} if self._speculator is None else {"speculation": self._speculator.facts()}


def _check(model: Runner, draft: Runner) -> None:
    from orchard.generate.speculative.model import check_vocabulary  # most engines have no draft model

    check_vocabulary(model, draft)


def _looked_at(request: Request) -> bool:
    """Whether more is wanted of the scores than the likeliest token."""
    sampling = request.sampling
    bent = sampling.repetition_penalty or sampling.presence_penalty or sampling.frequency_penalty
    asked = request.logprobs is not None or request.prompt_logprobs is not None
    return bool(asked or bent or request.constraint or request.thinking or request.rules)
