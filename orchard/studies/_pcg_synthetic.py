"""Part A of the study of coarse acceptance: a made-up codebook, and pairs of laws that a target and a draft might have over it.

Tokens lie around 64 centres in 16 dimensions. A context is a point near one of them; the target scores tokens by their
likeness to it, the draft by their likeness to a point a little off, and each adds noise of its own to every token. So
the two agree about where the sound lies and disagree about which of many close tokens to name, as codec models do.
"""

from __future__ import annotations

import numpy as np

TOKENS = 2048
DIMENSIONS = 16
CLUSTERS = 64
SPREAD = 0.5
"""Of tokens around a centre, and of contexts around tokens; centres are 4 from the middle."""
SHARPNESS = 20.0
NOISE = 1.2
"""Of each token's score, by itself: chosen so that exact speculation keeps nearly half, as in the published setting."""
OFF = 0.3
"""How far off the draft's point is, in each dimension."""

Laws = tuple[np.ndarray, np.ndarray]
"""What target and draft say in one context: p and q."""


def table(rng: np.random.Generator) -> np.ndarray:
    """The embeddings [tokens, dimensions]."""
    centres = 4 * _unit(rng.normal(size=(CLUSTERS, DIMENSIONS)))
    return centres[np.arange(TOKENS) % CLUSTERS] + SPREAD * rng.normal(size=(TOKENS, DIMENSIONS))


def contexts(embeddings: np.ndarray, count: int, rng: np.random.Generator) -> list[Laws]:
    directions = _unit(embeddings)
    found = []
    for _ in range(count):
        point = embeddings[rng.integers(TOKENS)] + SPREAD * rng.normal(size=DIMENSIONS)
        other = point + OFF * rng.normal(size=DIMENSIONS)
        found.append((_law(directions, point, rng), _law(directions, other, rng)))
    return found


def _law(directions: np.ndarray, point: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    scores = SHARPNESS * directions @ _unit(point) + NOISE * rng.normal(size=TOKENS)
    mass: np.ndarray = np.exp(scores - scores.max())
    return mass / mass.sum()


def _unit(x: np.ndarray) -> np.ndarray:
    unit: np.ndarray = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return unit
