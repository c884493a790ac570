"""Steps on the embedding, which is a large part of a small model."""

from __future__ import annotations

from orchard.recipes.compressing.ends import Ends
from orchard.recipes.compressing.step import Step
from orchard.recipes.compressing.steps import step


@step
def embed4(group: int = 64) -> Step:
    """Keep the embedding (and a head of its own) in four bits. `qat` trains it; this only rounds.

    group: weights that share a scale
    """
    return Step(Ends(bits=4, group=group), costs=(1.01, 1.08))


@step
def embed8(group: int = 64) -> Step:
    """Keep the embedding (and a head of its own) in eight bits.

    group: weights that share a scale
    """
    return Step(Ends(bits=8, group=group), costs=(1.0, 1.01))
