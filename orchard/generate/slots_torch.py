"""Slots of a torch model: every sequence has a cache of its own and is run by itself.

Exact rather than quick: what torch computes for a token may depend in the last bits on how much else is in the call, so an
answer's tokens are read one by one, and a prompt as the caller cuts it. Gradients are off inside each call and untouched
outside, because callers get control back between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from orchard.core.context import Context
from orchard.core.errors import OrchardError, UsageError
from orchard.generate.protocol import Held, Use, Work

if TYPE_CHECKING:
    from orchard.generate.torch_forward import TorchModel, TorchRunner

GRAIN = 64
"""Stores are made and looked at up to a multiple of this: cost follows what is cached, shapes change seldom, and what a token is
given does not depend on how long its sequence may get."""


class TorchSlots:
    """See `protocol.Slots`."""

    copies = False

    def __init__(self, runner: TorchRunner, count: int) -> None:
        self.count = count
        self.lengths = [0] * count
        self.goes_back = True
        self._runner = runner
        self._models: list[TorchModel | None] = [None] * count
        self._caches: list[Any] = [None] * count
        self._last: dict[int, Tensor] = {}
        self._token_bytes: float | None = None

    @torch.inference_mode()
    def open(self, slot: int, length: int, use: Use | None = None, variant: str | None = None) -> int:
        """Nothing of `use` can be used: prompts are always read whole."""
        model = self._runner.variant(variant).model
        try:
            self._caches[slot] = model.cache(batch=1, length=_whole(length))
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise UsageError(
                f"no memory for 1 sequences of {length:,} tokens",
                hint="ask for fewer tokens (max_tokens) or fewer requests at once",
            ) from error
        self._models[slot], self.lengths[slot] = model, 0
        self.goes_back = self.goes_back and _goes_back(self._caches[slot])
        self._measure(self._caches[slot], _whole(length))
        return 0

    def copy(self, source: int, target: int, tokens: int) -> bool:
        return False

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[np.ndarray]:
        self._last.clear()
        return [self._one(one) for one in work]

    @torch.inference_mode()
    def back(self, slot: int, tokens: int) -> None:
        if tokens < self.lengths[slot]:
            self._caches[slot].rewind(torch.tensor([tokens]))
            self.lengths[slot] = tokens

    def hold(self, slot: int, tokens: int) -> Held | None:
        return None

    def hidden(self, slot: int) -> np.ndarray | None:
        last = self._last.get(slot)
        return None if last is None else last.float().cpu().numpy()

    def close(self, slot: int) -> None:
        self._models[slot] = self._caches[slot] = None
        self._last.pop(slot, None)
        self.lengths[slot] = 0

    def nbytes(self, length: int) -> int:
        return int((self._token_bytes or 0) * length)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _one(self, one: Work) -> np.ndarray:
        model = self._models[one.slot]
        if model is None:
            raise ValueError(f"slot {one.slot} is free")
        tokens = list(one.tokens)
        if one.prompt:
            hidden = self._read(model, one.slot, tokens, one.wanted)
        else:
            hidden = torch.cat([self._read(model, one.slot, [token]) for token in tokens])
        if not one.wanted:
            return np.empty((0, model.config.vocab), np.float32)
        self._last[one.slot] = hidden[-1].clone()
        # Head by head as well: it is a matrix product like any other.
        rows = [model.scores(row[None]).float().cpu().numpy() for row in hidden[-one.wanted :]]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _read(self, model: TorchModel, slot: int, tokens: list[int], wanted: int | None = None) -> Tensor:
        """What the head reads after each of these tokens, or at least after the last that are wanted: [T, dim]."""
        start, stop = self.lengths[slot], self.lengths[slot] + len(tokens)
        ids = torch.tensor([tokens], device=model.device)
        positions = torch.arange(start, stop, device=model.device)[None]
        context = Context(positions=positions, cache=self._caches[slot], upto=_whole(stop), wanted=wanted)
        hidden = model.hidden(ids, context)[0]
        self.lengths[slot] = stop
        return hidden

    def _measure(self, cache: Any, length: int) -> None:
        if self._token_bytes is None:
            self._token_bytes = getattr(cache, "nbytes", 0) / length


def _whole(tokens: int) -> int:
    return -(-tokens // GRAIN) * GRAIN


def _goes_back(cache: Any) -> bool:
    """Whether all policies of a cache can forget their last tokens."""
    try:
        for table in getattr(cache, "tables", {}).values():
            table.check_rewind()
    except OrchardError:
        return False
    return True
