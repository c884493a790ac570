"""What passes between drafters, judges and the scheduler: guesses, what is asked of a drafter, what a row must offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from orchard.generate.protocol import State

if TYPE_CHECKING:
    from orchard.generate.request import Request
    from orchard.generate.sampling import Sampler

Choose = Callable[[np.ndarray, State], tuple[int, np.ndarray | None]]
"""How a row chooses among scores [V] that are not the model's own: the token, and the law [V] it was drawn from (float64, sums to
1), or None where nobody will ask for it."""


Forced = Callable[[State], tuple[int, ...]]
"""Tokens that must come next, by a row's rules; none where there is a choice."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens that may come next. `probabilities`: the law [V] that each was drawn from, after the request's own rules; None
    where each is simply named (all the mass on one token)."""

    ids: tuple[int, ...] = ()
    probabilities: Sequence[np.ndarray] | None = None
    sort: int = 0
    """Guesses of a drafter that are equally good have the same number: acceptance is counted for each sort by itself."""

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, count: int) -> Draft:
        """The first few of them."""
        if count >= len(self.ids):
            return self
        laws = None if self.probabilities is None else self.probabilities[:count]
        return Draft(self.ids[:count], laws, self.sort) if count > 0 else NOTHING


NOTHING = Draft()


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """At most `most` guesses for the sequence `key`, which stands at `state`."""

    key: int
    state: State
    most: int
    choose: Choose
    length: int = 0
    """Tokens that it can grow to, its prompt included; 0: not known."""
    forced: Forced | None = None
    """What the answer will be given without asking anybody, so that nobody has to guess it."""


class Drafter(Protocol):
    """Guesses for some sequences at once. What it remembers of a sequence it finds by the key, and can work out again."""

    seconds: float
    """What one guess takes to make, lately."""

    def propose(self, wanted: Sequence[Ask]) -> list[Draft]:
        """One draft for each, perhaps empty. Raises nothing on account of one sequence: it gets no guesses."""
        ...

    def forget(self, key: int) -> None:
        """Free what is kept for a sequence; one that is unknown is no mistake."""


class Speaker(Protocol):
    """A row, as far as speculation knows it."""

    @property
    def key(self) -> int:
        """Its own among all rows of the engine, as long as it lives."""
        ...

    @property
    def request(self) -> Request: ...

    @property
    def state(self) -> State: ...

    @property
    def limit(self) -> int:
        """New tokens that it may have."""
        ...

    @property
    def finished(self) -> bool: ...

    @property
    def sampler(self) -> Sampler: ...
