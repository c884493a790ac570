"""Choosing a token from one row of scores: the native head where it is built, and its plain numpy twin.

Scores are float32 [V]. Each step of the twin is a function of its own, because rules from outside come between them:
`scaled`, `k_best`, `nucleus`, `near_best` bend scores (-inf rules a token out), `pick` chooses. Sums are float64.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from orchard.core.frozen import frozen
from orchard.ops.kernels import native

OUT = np.float32("-inf")


@frozen
class Choice:
    """What `choose` does, in this order; the defaults do nothing."""

    temperature: float = 1.0
    """From 1e-30 to 1e30, which float32 can divide by."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    """1: all."""
    distance: float = float("-inf")
    """Tokens whose score is further below the best one stay out: the logarithm of min_p."""


def greedy(scores: np.ndarray) -> int:
    """The token with the best score, the lowest id among equals; -1 where any score is infinite or NaN."""
    head = _library()
    if head is None:
        return plain_greedy(scores)
    scores = _contiguous(scores)
    return int(head.orchard_sample_greedy(scores.ctypes.data, scores.size))


def choose(scores: np.ndarray, choice: Choice, uniform: float) -> int:
    """The token at which the summed probabilities of those that stay, in the order of ids, pass `uniform`; -1 where any
    score is infinite or NaN."""
    head = _library()
    if head is None:
        return plain_choose(scores, choice, uniform)
    scores = _contiguous(scores)
    return int(
        head.orchard_sample_choose(
            scores.ctypes.data,
            scores.size,
            choice.temperature,
            min(choice.top_k, scores.size),
            choice.top_p,
            choice.distance,
            uniform,
        )
    )


def mask(scores: np.ndarray, bits: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Into `out`: the scores whose bit is set (bit i % 8 of byte i // 8), -inf for the others and those beyond the bits."""
    head = _library()
    if head is None:
        return plain_mask(scores, bits, out)
    scores, bits = _contiguous(scores), np.ascontiguousarray(bits, np.uint8)
    whole = min(scores.size, 8 * bits.size) // 8 * 8
    head.orchard_sample_mask(scores.ctypes.data, bits.ctypes.data, whole, out.ctypes.data)
    if whole < scores.size:
        plain_mask(scores[whole:], bits[whole // 8 :], out[whole:])
    return out


def plain_mask(scores: np.ndarray, bits: np.ndarray, out: np.ndarray) -> np.ndarray:
    """The twin of `mask`."""
    known = min(scores.size, 8 * bits.size)
    out[:] = OUT
    np.copyto(out[:known], scores[:known], where=np.unpackbits(bits, bitorder="little", count=known).view(bool))
    return out


def plain_greedy(scores: np.ndarray) -> int:
    """The twin of `greedy`."""
    best = int(scores.argmax())  # a NaN counts as the largest
    return best if np.isfinite(scores[best]) and np.isfinite(scores.min()) else -1


def plain_choose(scores: np.ndarray, choice: Choice, uniform: float) -> int:
    """The twin of `choose`."""
    if not (np.isfinite(scores.min()) and np.isfinite(scores.max())):  # NaN anywhere makes both NaN
        return -1
    if choice.temperature != 1:
        scores = scaled(scores, choice.temperature)
    if choice.top_k:
        scores = k_best(scores, choice.top_k)
    if choice.top_p < 1:
        scores = nucleus(scores, choice.top_p)
    if choice.distance > OUT:
        scores = near_best(scores, choice.distance)
    return pick(scores, uniform)


def scaled(scores: np.ndarray, temperature: float) -> np.ndarray:
    """Divided by the temperature, and counted from the best score: a tiny temperature gives -inf to the others and never
    +inf to the best."""
    with np.errstate(over="ignore", invalid="ignore"):
        out: np.ndarray = (scores - scores.max()) / np.float32(temperature)
    return out


def k_best(scores: np.ndarray, k: int) -> np.ndarray:
    """The k best stay; the lower id first among equals, so exactly k."""
    if k >= scores.size:
        return scores
    least = np.partition(scores, scores.size - k)[scores.size - k]
    stays = scores > least
    stays[np.flatnonzero(scores == least)[: k - int(np.count_nonzero(stays))]] = True
    return np.where(stays, scores, OUT)


def nucleus(scores: np.ndarray, p: float) -> np.ndarray:
    """The smallest set of likeliest tokens whose share of the mass reaches p stays; at least one."""
    mass = _mass(scores)
    total = mass.sum()
    # All tokens below (1 - p) / V of the mass together have less than 1 - p: the set never needs them. Sort the rest.
    likely = np.flatnonzero(mass >= (1 - p) / mass.size * total)
    order = np.argsort(-scores[likely], kind="stable")  # by score: two masses may differ only by rounding
    count = int(np.count_nonzero(mass[likely[order]].cumsum() < p * total)) + 1
    stays = likely[order[:count]]
    out = np.full_like(scores, OUT)
    out[stays] = scores[stays]
    return out


def near_best(scores: np.ndarray, distance: float) -> np.ndarray:
    """Those at most so far below the best stay; `distance` is negative."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(scores - scores.max() < np.float32(distance), OUT, scores)


def pick(scores: np.ndarray, uniform: float) -> int:
    """The token at which the summed probabilities, in the order of ids, pass `uniform`. At least one is not -inf."""
    left = np.flatnonzero(scores > OUT)
    sums = _mass(scores[left]).cumsum()
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return int(left[min(place, len(left) - 1)])


def _mass(scores: np.ndarray) -> np.ndarray:
    """Probabilities times some number: the best token has 1."""
    wide = scores.astype(np.float64)
    with np.errstate(invalid="ignore"):  # where nothing is left: no number, and nothing stays
        mass: np.ndarray = np.exp(wide - wide.max())
    return mass


def _contiguous(scores: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(scores, dtype=np.float32)


@cache
def _library() -> ctypes.CDLL | None:
    """The native library with the types of these functions; None where it is not built, or older than they are."""
    library = native.library()
    if library is None or not hasattr(library, "orchard_sample_mask"):
        return None
    number, share = ctypes.c_int64, ctypes.c_double
    library.orchard_sample_greedy.argtypes = [ctypes.c_void_p, number]
    library.orchard_sample_greedy.restype = number
    library.orchard_sample_choose.argtypes = [ctypes.c_void_p, number, share, number, share, share, share]
    library.orchard_sample_choose.restype = number
    library.orchard_sample_mask.argtypes = [ctypes.c_void_p, ctypes.c_void_p, number, ctypes.c_void_p]
    library.orchard_sample_mask.restype = None
    return library
