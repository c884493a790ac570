"""A made-up trace with the numbers of OLMoE: 16 layers of 64 experts, 8 a token; popular experts, some of which stay.

Per layer popularity falls by Zipf's law (exponent 0.6) and each chosen expert stays for the next token with 30 %. A gate one
layer ahead is right about 90 % of the experts, two ahead 80 %, three ahead 70 %: what it knows further away it also knows
nearer. What it gets wrong are experts that nobody chose, and behind them come as many further wrong ones.
"""

from __future__ import annotations

import numpy as np

from orchard.cache.experts.trace import Trace
from orchard.core.seeds import fold

LAYERS, EXPERTS, CHOSEN, TOKENS = 16, 64, 8, 200
ZIPF, REUSE, ACCURACY, EXTRA = 0.6, 0.3, (0.9, 0.8, 0.7), 8


def synthetic(seed: int, tokens: int = TOKENS, layers: int = LAYERS, experts: int = EXPERTS, k: int = CHOSEN) -> Trace:
    dice = np.random.default_rng(fold(seed, "specmd trace"))
    popularity = np.arange(1, experts + 1) ** -ZIPF
    favours = [popularity[dice.permutation(experts)] for _ in range(layers)]
    chosen = np.zeros((tokens, layers, k), np.int16)
    ahead = np.full((tokens, layers, len(ACCURACY), k + EXTRA), -1, np.int16)
    for token in range(tokens):
        for layer in range(layers):
            before = chosen[token - 1, layer] if token else np.zeros(0, np.int16)
            chosen[token, layer] = mine = _choose(dice, favours[layer], before, k)
            certainty = dice.random(k)
            wrong = dice.permutation(np.setdiff1d(np.arange(experts), mine))
            for distance, accuracy in enumerate(ACCURACY[: layer + 1]):
                guesses = np.where(certainty < accuracy, mine, wrong[:k])
                others = wrong[~np.isin(wrong, guesses)][:EXTRA]
                ahead[token, layer, distance] = [*guesses, *others]
    falling = np.linspace(1.0, 0.5, k + EXTRA, dtype=np.float32)
    return Trace(
        "synthetic",
        experts,
        chosen,
        np.full(chosen.shape, 1 / k, np.float32),
        np.arange(tokens, dtype=np.int32),
        ahead,
        np.broadcast_to(falling, ahead.shape).copy(),
    )


def _choose(dice: np.random.Generator, favour: np.ndarray, before: np.ndarray, k: int) -> np.ndarray:
    stays = before[dice.random(len(before)) < REUSE]
    left = favour.copy()
    left[stays] = 0
    fresh = dice.choice(len(favour), k - len(stays), replace=False, p=left / left.sum())
    return np.concatenate([stays, fresh]).astype(np.int16)
