"""What to do when a chosen expert is not in memory: wait for it, take another one, or do without.

Waiting changes no number. The other two trade quality for time, and are only taken when they are asked for by name.
Shapes: N tokens, K chosen, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import numpy as np

from orchard.core.errors import UsageError


class Misses(ABC):
    """Changes choices in place before they are loaded."""

    name: str
    exact: bool = False
    """Whether results stay what they would be with everything in memory."""

    @abstractmethod
    def settle(self, chosen: np.ndarray, weights: np.ndarray, mass: np.ndarray, here: Collection[int]) -> int:
        """`chosen` and `weights` [N, K] are changed where an expert is not `here`; `mass` [N, E] is what the router gave
        all experts. Returns how many choices were changed. What is still missing afterwards is waited for."""


class Wait(Misses):
    """Exact."""

    name = "wait"
    exact = True

    def settle(self, chosen: np.ndarray, weights: np.ndarray, mass: np.ndarray, here: Collection[int]) -> int:
        return 0


class Substitute(Misses):
    """The best expert that is here and not chosen yet takes the place, with the same weight; none: wait."""

    name = "substitute"

    def settle(self, chosen: np.ndarray, weights: np.ndarray, mass: np.ndarray, here: Collection[int]) -> int:
        present = np.zeros(mass.shape[1], bool)
        present[list(here)] = True
        changed = 0
        for row, column in np.argwhere(~present[chosen]):
            open_to = present.copy()
            open_to[chosen[row]] = False
            if open_to.any():
                chosen[row, column] = int(np.where(open_to, mass[row], -1.0).argmax())
                changed += 1
        return changed


class Skip(Misses):
    """The others share the weight of what is missing. A token all of whose experts are missing waits for its first."""

    name = "skip"

    def settle(self, chosen: np.ndarray, weights: np.ndarray, mass: np.ndarray, here: Collection[int]) -> int:
        present = np.zeros(mass.shape[1], bool)
        present[list(here)] = True
        changed = 0
        for row in np.flatnonzero((~present[chosen]).any(1)):
            stays = present[chosen[row]]
            if not stays.any():
                stays[int(weights[row].argmax())] = True
            total, kept = float(weights[row].sum()), float(weights[row][stays].sum())
            first = int(chosen[row][stays][0])
            changed += int((~stays).sum())
            chosen[row][~stays] = first  # somebody has to be named: one that is here anyway, with no weight
            weights[row][~stays] = 0.0
            if kept > 0:
                weights[row][stays] *= total / kept
        return changed


MISSES: dict[str, type[Misses]] = {kind.name: kind for kind in (Wait, Substitute, Skip)}


def misses_named(name: str) -> Misses:
    if name not in MISSES:
        raise UsageError(f"no way to handle misses called {name!r}", hint="one of " + ", ".join(MISSES))
    return MISSES[name]()
