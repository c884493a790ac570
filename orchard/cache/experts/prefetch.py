"""Which units to read before anybody has asked for them.

While layer l computes, the gates of the layers after it are applied to what layer l was given: most of what they choose is
what they will choose when their turn comes (SpecMD, arXiv 2602.03921, and the offloading systems it compares). Before the
first layer the embedding of the token stands for that. A prefetcher sees one such guess at a time and says what to read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from orchard.core.errors import UsageError


@dataclass(frozen=True)
class Guess:
    """What is known of a layer that will run `distance` layers from now."""

    layer: int
    distance: int
    k: int
    """Units that the layer will take (for several tokens: as many as they may take together)."""
    ranked: Sequence[tuple[int, float]] = ()
    """Units by what the layer's gate gives them now, the highest first."""
    previous: Sequence[int] = ()
    """Units that the layer took in the last pass."""


class Prefetcher(ABC):
    """`lookahead`: how many layers ahead it wants to hear of. `asks_gates`: whether it looks at `Guess.ranked`."""

    name: str
    asks_gates: bool = True

    def __init__(self, lookahead: int = 1) -> None:
        if lookahead < 0:
            raise UsageError(f"a lookahead of {lookahead} layers", hint="use 0 or more")
        self.lookahead = lookahead

    @abstractmethod
    def choose(self, guess: Guess) -> list[tuple[int, float]]:
        """Units to read, with their scores, the surest first."""

    def in_flight(self, k: int) -> int:
        """Units that are wanted at once: those of the running layer, and what is read ahead for the next ones."""
        return k * (self.lookahead + 1)


class Nothing(Prefetcher):
    """Every unit is read when it is needed."""

    name = "none"
    asks_gates = False

    def __init__(self, lookahead: int = 0) -> None:
        super().__init__(0)

    def choose(self, guess: Guess) -> list[tuple[int, float]]:
        return []


class NextGates(Prefetcher):
    """The k best of each gate ahead, and `extra` more."""

    name = "gates"

    def __init__(self, lookahead: int = 1, extra: int = 0) -> None:
        super().__init__(lookahead)
        self.extra = extra

    def choose(self, guess: Guess) -> list[tuple[int, float]]:
        return list(guess.ranked[: guess.k + self.extra])

    def in_flight(self, k: int) -> int:
        return super().in_flight(k) + self.extra * self.lookahead


class Threshold(Prefetcher):
    """Every unit that a gate ahead gives more than `least`: few when it is sure, many when it is not."""

    name = "threshold"

    def __init__(self, lookahead: int = 1, least: float = 0.05) -> None:
        super().__init__(lookahead)
        self.least = least

    def choose(self, guess: Guess) -> list[tuple[int, float]]:
        return [(unit, score) for unit, score in guess.ranked if score > self.least]


class History(Prefetcher):
    """What the layers ahead took in the last pass."""

    name = "history"
    asks_gates = False

    def choose(self, guess: Guess) -> list[tuple[int, float]]:
        return [(unit, 0.0) for unit in guess.previous]


PREFETCHERS: dict[str, type[Prefetcher]] = {kind.name: kind for kind in (Nothing, NextGates, History, Threshold)}


def prefetcher_named(name: str, lookahead: int = 1) -> Prefetcher:
    if name not in PREFETCHERS:
        raise UsageError(f"no prefetcher called {name!r}", hint="one of " + ", ".join(PREFETCHERS))
    return PREFETCHERS[name](lookahead)
