"""What the gates of later layers would choose now: the same norm and router, applied to what an earlier layer was given.

These are guesses, so they are computed in plain float32 from the routers' unpacked weights; the choice itself is the engine's.
Shapes: N tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from orchard.ops.kernels.packing import values
from orchard.ops.plan.steps import Embed, Experts, Plan

if TYPE_CHECKING:
    from orchard.ops.kernels.native.program import Program


class Gates:
    """The routers of all layers with experts, as dense matrices."""

    def __init__(self, plan: Plan, layers: Sequence[Experts]) -> None:
        self._layers = layers
        self._embed = next(step for step in plan.steps if isinstance(step, Embed))
        self._routers = [_dense(plan, step) for step in layers]

    def embedded(self, program: Program, rows: int) -> np.ndarray:
        """The embeddings of a call whose first step has run."""
        return program.buffer(self._embed.to, rows)

    def mass(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Probabilities [N, E] that a layer's router would give tokens with these inputs."""
        norm, eps, router, bias = self._routers[layer]
        if norm is not None:
            x = x * (norm / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + eps))
        scores = x @ router if bias is None else x @ router + bias
        powers = np.exp(scores - scores.max(1, keepdims=True))
        found: np.ndarray = powers / powers.sum(1, keepdims=True)
        return found

    def ranked(self, layer: int, mass: np.ndarray) -> list[tuple[int, float]]:
        """Experts by what all tokens together give them; for one token that is its own order."""
        k = self._layers[layer].k
        if len(mass) > 1:  # an expert counts where it is among a token's best
            least = np.partition(mass, -k, axis=1)[:, -k, None]
            mass = np.where(mass >= least, mass, mass * 1e-3)
        total = mass.sum(0)
        return [(int(unit), float(total[unit])) for unit in np.argsort(-total, kind="stable")]


def _dense(plan: Plan, step: Experts) -> tuple[np.ndarray | None, float, np.ndarray, np.ndarray | None]:
    matrix = step.router
    dense = values(plan.tensors[matrix.tensor], matrix.kind, matrix.rows, matrix.cols, matrix.group, matrix.minimum)
    router = np.ascontiguousarray(dense.astype(np.float32).T)
    norm = None if step.norm is None else plan.tensors[step.norm.tensor]
    bias = None if step.router_bias is None else plan.tensors[step.router_bias]
    return norm, 0.0 if step.norm is None else step.norm.eps, router, bias
