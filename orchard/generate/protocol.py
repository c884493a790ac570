"""What the engine asks of others: a model to score tokens, its stores, and rules that bend the scores.

Shapes: B sequences, T new tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from orchard.core.context import Context, KVCache


class Stores(KVCache, Protocol):
    """A model's stores for a batch; `orchard.cache.store.Cache` is the real one."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences, in this order."""


class Shape(Protocol):
    """The two numbers of a model's config that the engine needs."""

    @property
    def context(self) -> int: ...

    @property
    def vocab(self) -> int: ...


class Model(Protocol):
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


@dataclass(frozen=True)
class State:
    """All that the choice of the next token may depend on, besides the scores: the tokens so far.

    A value, not an object that changes: going back (speculation, preemption) is keeping an older one.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()

    def plus(self, token_id: int) -> State:
        return replace(self, output=(*self.output, token_id))


class Rule(Protocol):
    """Bends the scores [V] (float32, on the CPU) of one sequence before a token is chosen; -inf rules a token out.

    The answer depends on the arguments only, and the scores handed in are left as they are. A rule that follows the
    output with a machine of its own (a grammar) brings it to where `state.output` stands, forwards or back.
    """

    def __call__(self, scores: Tensor, state: State) -> Tensor: ...
