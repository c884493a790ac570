"""Writes down what a running model chooses: a `Trace` for the simulator.

Only passes that keep all their rows to the last layer are taken, which answers do; a prompt drops rows on its way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchard.cache.experts.trace import Trace
from orchard.core.errors import UsageError
from orchard.ops.plan.steps import Experts


class Recorder:
    """Hears of every pass. Shapes: N tokens, L layers, K chosen, H lookahead, P guesses."""

    def __init__(self, layers: Sequence[Experts], *, lookahead: int = 2) -> None:
        shapes = {(step.gate.count, step.k) for step in layers}
        if len(shapes) != 1:
            raise UsageError(
                "layers with different numbers of experts make no trace", hint="record a model whose layers are alike"
            )
        self.experts, self.k = shapes.pop()
        self.lookahead = lookahead
        self._layers = len(layers)
        self._guesses = min(2 * self.k, self.experts)
        self._passes: list[tuple[np.ndarray, ...]] = []
        self._now: list[np.ndarray] | None = None

    def begin(self, rows: int) -> None:
        shape = (rows, self._layers)
        ahead = (*shape, self.lookahead, self._guesses)
        self._now = [
            np.zeros((*shape, self.k), np.int16),
            np.zeros((*shape, self.k), np.float32),
            np.full(ahead, -1, np.int16),
            np.zeros(ahead, np.float32),
        ]

    def layer(self, layer: int, chosen: np.ndarray, weights: np.ndarray) -> None:
        if self._now is None or len(chosen) != len(self._now[0]):
            self._now = None
            return
        self._now[0][:, layer], self._now[1][:, layer] = chosen, weights

    def guess(self, layer: int, distance: int, mass: np.ndarray) -> None:
        if self._now is None or distance > self.lookahead or len(mass) != len(self._now[0]):
            return
        order = np.argsort(-mass, axis=1, kind="stable")[:, : self._guesses]
        self._now[2][:, layer, distance - 1] = order
        self._now[3][:, layer, distance - 1] = np.take_along_axis(mass, order, 1)

    def end(self) -> None:
        if self._now is not None:
            self._passes.append(tuple(self._now))
        self._now = None

    def trace(self, model: str) -> Trace:
        """What was recorded so far."""
        if not self._passes:
            raise UsageError("nothing was recorded", hint="let the model answer something first")
        chosen, scores, ahead, ahead_scores = (np.concatenate(part) for part in zip(*self._passes, strict=True))
        passes = np.repeat(np.arange(len(self._passes), dtype=np.int32), [len(part[0]) for part in self._passes])
        return Trace(model, self.experts, chosen, scores, passes, ahead, ahead_scores)
