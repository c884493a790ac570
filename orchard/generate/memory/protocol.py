"""What a budgeted sequence offers, whoever runs the model: read, look without keeping, forget what matters least.

A sequence is read in blocks. After each block that brings a store over its budget, every kept token gets a score, and the
best `budget` of each layer stay. No layer ever holds more than budget + block tokens per head.

Positions are packed: after forgetting, what stays is numbered up to the same last position in every layer and head, and keys
are turned to their new places. A conversation may so be longer than the context the model was trained for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

Scoring = Literal["recent", "keydiff", "snap", "probe"]
"""How kept tokens are scored: the newest are the best (StreamingLLM); keys unlike the mean key (KeyDiff); attention of the last
tokens read (SnapKV); attention of tokens that are looked at and not kept (KVzip, EpiCache)."""


class Kept(Protocol):
    """The keys and values of one sequence."""

    budget: int
    """Tokens per layer and key/value head, on average over the layers."""
    block: int
    """At most so many are read before some must go."""
    sinks: int
    """The first so many tokens always stay."""

    @property
    def used(self) -> int:
        """The most tokens that any layer holds now."""
        ...

    @property
    def peak(self) -> int:
        """The most that any layer ever held."""
        ...

    @property
    def room(self) -> int:
        """Tokens that can be read before some must go."""
        ...

    def read(self, tokens: Sequence[int], wanted: int = 0) -> np.ndarray:
        """Keep these tokens, in blocks, forgetting in between where a block would not fit; scores [wanted, V] after the last of
        them. With scoring "probe", whoever calls probes and evicts between blocks: a block that does not fit is a `UsageError`.
        """
        ...

    def probe(self, tokens: Sequence[int]) -> None:
        """Let these tokens look at everything that is kept, and keep nothing of them. Each kept token's score is the largest
        attention (softmax over the kept and the tokens themselves) that any of them, in any query head of its group, gives it."""
        ...

    def evict(self, budgets: Sequence[int] | None = None) -> None:
        """Keep the best tokens: `budget` in every layer, or `budgets` by layer that has a store. The sinks stay, and so do the
        newest few where the scoring says so."""
        ...

    def keys(self, layer: int) -> np.ndarray:
        """The rotated keys of a layer, float32 [H, tokens, D]: for whoever measures how layers differ."""
        ...

    def save(self) -> dict[str, np.ndarray]:
        """Everything, as arrays that a file can hold."""
        ...

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `save` gave; `BadFile` where it belongs to another model or budget, and nothing has changed."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        ...
