"""A rule against going round in circles.

A small model that takes the likeliest token each time may say the same sentence over and over until its room is gone. When
the last tokens are one stretch said `ROUNDS` times, one more round is made unlikely: the answer ends there, or, where a grammar
says when it may end, goes on with another token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from orchard.generate.protocol import State

ROUNDS = 3
SPAN = 32
"""Tokens: what goes round must have gone at least so far. A few equal numbers in a list are no circle."""
LONGEST = 192
"""Tokens of one round."""
PENALTY = np.float32(60.0)


class NoLoops:
    """Looks only at the tokens so far, so it can be shared and rolled back. `ends`: tokens that may end the answer there;
    none where something else says when it ends."""

    def __init__(self, ends: Collection[int] = ()) -> None:
        self._ends = sorted(ends)

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        again = _next_rounds(state.output[-ROUNDS * LONGEST :])
        if not again:
            return scores
        lower = scores.copy()
        if self._ends:
            lower[self._ends] = scores.max() + PENALTY
        else:
            lower[again] -= PENALTY
        return lower


def _next_rounds(tokens: Sequence[int]) -> list[int]:
    """Tokens that would begin one more round of whatever goes round."""
    found = []
    for period in range(1, min(LONGEST, len(tokens) - 1) + 1):
        span = max(period * ROUNDS, SPAN)
        if len(tokens) < span:
            break
        if tokens[-1] != tokens[-1 - period]:  # nearly always, so the rest is seldom done
            continue
        if tokens[-span + period :] == tokens[-span:-period]:
            found.append(tokens[-period])
    return found
