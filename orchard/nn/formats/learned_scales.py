"""Scales to begin with: those that give a weight back with the least squared error, group by group.

A grid of clips first (the value furthest from zero comes to lie so many steps out; more than the last level cuts it off), then
steps to the bottom of the parabola that the error is as long as no code changes: s = Σ h w (c - z) / Σ h (c - z)². That is
Newton's step, and because codes change with the scale it is taken a few times; a step that does not help is not kept. `h` weighs
errors: with the mean square of the input that meets a weight, what is least is the error of the outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.nn.formats.base import PIECE, as_half, finite_or_nan

STEPS = 4
GRID = 20
"""Clips that are tried, evenly between a little more than the whole range of a group and `LEAST` of it."""
MOST = 1.03
LEAST = {2: 0.25, 4: 0.5, 8: 0.9}


def best_scales(
    values: Tensor,
    *,
    zero: float,
    bits: int,
    half: bool = True,
    either: bool = False,
    importance: Tensor | None = None,
) -> Tensor:
    """Scales [..., groups] in float32 of values [..., groups, group]; half-precision numbers with `half`, and above zero unless
    `either` sign will do. A group without any value gets zero, one with a value that is not finite gets not-a-number.
    `importance` broadcasts to the values."""
    values = finite_or_nan(values.detach().float())
    rows = values.flatten(0, -2)
    weights = None if importance is None else importance.detach().float().expand(values.shape).flatten(0, -2)
    # Many passes over the same values: on a processor they go faster in pieces that its cache holds.
    step = len(rows) if rows.is_cuda else max(1, PIECE // rows.shape[-1])
    pieces = range(0, len(rows), max(step, 1))
    found = []
    for at in pieces:
        piece, weight = rows[at : at + step], None if weights is None else weights[at : at + step]
        best, least = _best(piece, weight, zero, bits, half)
        if either:
            turned, other = _best(-piece, weight, zero, bits, half)
            best = torch.where(other < least, -turned, best)
        found.append(best)
    return (torch.cat(found) if found else rows.new_zeros(0)).reshape(values.shape[:-1])


def _best(values: Tensor, weights: Tensor | None, zero: float, bits: int, half: bool) -> tuple[Tensor, Tensor]:
    top = 2**bits - 1
    # The furthest value may lie on either side, and the sides need not have the same number of steps.
    whole = torch.maximum(values.amax(-1) / (top - zero), values.amin(-1) / -zero)
    best = _stored(whole, half)
    least = _error(values, weights, best, zero, top)
    for number in range(GRID):
        share = MOST - (MOST - LEAST[bits]) * number / (GRID - 1)
        best, least = _better(values, weights, _stored(whole * share, half), best, least, zero, top)
    for _ in range(STEPS):
        steps = _codes(values, best, zero, top).sub_(zero)
        above = steps * values if weights is None else steps * values * weights
        below = steps.square_() if weights is None else steps.square_().mul_(weights)
        newton = above.sum(-1) / below.sum(-1)
        usable = newton.isfinite() & (newton > 0)
        best, least = _better(values, weights, _stored(newton.where(usable, best), half), best, least, zero, top)
    return best, least


def _better(
    values: Tensor, weights: Tensor | None, other: Tensor, best: Tensor, least: Tensor, zero: float, top: int
) -> tuple[Tensor, Tensor]:
    error = _error(values, weights, other, zero, top)
    better = error < least
    return other.where(better, best), error.where(better, least)


def _error(values: Tensor, weights: Tensor | None, scales: Tensor, zero: float, top: int) -> Tensor:
    off = _codes(values, scales, zero, top).sub_(zero).mul_(scales[..., None]).sub_(values).square_()
    return (off if weights is None else off.mul_(weights)).sum(-1)


def _codes(values: Tensor, scales: Tensor, zero: float, top: int) -> Tensor:
    inverse = scales.reciprocal().masked_fill(scales == 0, 0.0)
    return (values * inverse[..., None]).add_(zero).round_().clamp_(0, top)


def _stored(scales: Tensor, half: bool) -> Tensor:
    """Scales as they will be used."""
    return as_half(scales).float() if half else scales
