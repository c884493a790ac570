"""A torch model as a runner: read prompts in chunks, then one token of every live sequence per step.

Gradients are off inside each call and untouched outside, because callers get control back between calls.
Shapes: B sequences, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from orchard.core.context import Context, KVCache
from orchard.core.errors import UsageError
from orchard.generate.protocol import Held, Runner, Shape, Use

GRAIN = 64
"""Stores are looked at up to a multiple of this: cost follows what is cached, and shapes change seldom."""


class Stores(KVCache, Protocol):
    """A model's stores for a batch; `orchard.cache.store.Cache` is the real one."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences, in this order."""


class TorchModel(Protocol):
    """A causal model over token ids; `orchard.models.language.decoder.Decoder` is one."""

    @property
    def config(self) -> Shape: ...

    @property
    def device(self) -> torch.device: ...

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        """What the head reads: [B, T, dim] for ids [B, T]."""

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores [..., V] of the next token."""

    def cache(self, *, batch: int, length: int) -> Stores:
        """Empty stores for `batch` sequences of up to `length` tokens."""


def runner_of(model: Runner | TorchModel) -> Runner:
    """A runner as it is; a torch model wrapped into one."""
    return model if isinstance(model, Runner) else TorchRunner(model)


class TorchRunner:
    """Runs a torch model on whatever device it is."""

    def __init__(self, model: TorchModel) -> None:
        self.model = model

    @property
    def config(self) -> Shape:
        return self.model.config

    def begin(self, prompts: Sequence[Sequence[int]], *, length: int, held: Sequence[Use | None] = ()) -> Forward:
        """Nothing is held here, so prompts are always read whole."""
        return Forward(self.model, prompts, length=length)


class Forward:
    """`read` chunk after chunk, `first` once, then `step`; `keep` drops finished sequences."""

    def __init__(self, model: TorchModel, prompts: Sequence[Sequence[int]], *, length: int) -> None:
        """`length`: no sequence will be longer."""
        self.model = model
        self.lengths = [len(prompt) for prompt in prompts]
        self.longest = max(self.lengths)
        self.starts = [0] * len(prompts)
        self._length = length
        self._prompts = prompts
        self._stores = self._empty_stores()
        self._last: list[Tensor | None] = [None] * len(prompts)

    @torch.inference_mode()
    def _empty_stores(self) -> Stores:
        try:
            return self.model.cache(batch=len(self.lengths), length=self._length)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise UsageError(
                f"no memory for {len(self.lengths)} sequences of {self._length:,} tokens",
                hint="ask for fewer tokens (max_tokens) or fewer requests at once",
            ) from error

    @torch.inference_mode()
    def read(self, start: int, stop: int) -> None:
        """Read tokens start … stop - 1 of every prompt that has them; the others see padding on the right."""
        stop = min(stop, self.longest)
        rows = [prompt[start:stop] for prompt in self._prompts]
        ids = torch.tensor([[*row, *[0] * (stop - start - len(row))] for row in rows], device=self.model.device)
        places = torch.arange(start, stop, device=self.model.device)
        lengths = torch.tensor(self.lengths, device=self.model.device)
        positions = torch.where(places[None] < lengths[:, None], places[None], -1)
        hidden = self._hidden(ids, positions, stop)
        for row, length in enumerate(self.lengths):
            if start < length <= stop:
                self._last[row] = hidden[row, length - 1 - start].clone()  # not a view: the chunk can be freed

    @torch.inference_mode()
    def first(self) -> np.ndarray:
        """Scores [B, V] after the prompts: only each prompt's last token goes through the head."""
        last, self._last = [hidden for hidden in self._last if hidden is not None], []
        return self._scores(torch.stack(last))

    @torch.inference_mode()
    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Scores [B, V] after one more token of each sequence."""
        positions = torch.tensor(self.lengths, device=self.model.device)[:, None]
        self.lengths = [length + 1 for length in self.lengths]
        hidden = self._hidden(torch.tensor(ids, device=self.model.device)[:, None], positions, max(self.lengths))
        return self._scores(hidden[:, 0])

    def extend(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Scores [B, V] after some more tokens of each sequence, in one call, padded on the right."""
        if max(map(len, tokens)) == 1:
            return self.step([ids[0] for ids in tokens])
        return self._extended(tokens)

    @torch.inference_mode()
    def _extended(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        width = max(map(len, tokens))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens], device=self.model.device)
        places = [
            [*range(length, length + len(row)), *[-1] * (width - len(row))]
            for length, row in zip(self.lengths, tokens, strict=True)
        ]
        self.lengths = [length + len(row) for length, row in zip(self.lengths, tokens, strict=True)]
        hidden = self._hidden(ids, torch.tensor(places, device=self.model.device), max(self.lengths))
        return self._scores(torch.stack([hidden[row, len(ids) - 1] for row, ids in enumerate(tokens)]))

    def hold(self, row: int, tokens: int) -> Held | None:
        return None

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        self._stores.keep(torch.tensor(rows, device=self.model.device))

    def _hidden(self, ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        upto = min(-(-longest // GRAIN) * GRAIN, self._length)
        return self.model.hidden(ids, Context(positions=positions, cache=self._stores, upto=upto))

    def _scores(self, hidden: Tensor) -> np.ndarray:
        scores: np.ndarray = self.model.scores(hidden).float().cpu().numpy()
        return scores
