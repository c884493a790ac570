"""How a 6×6 block of weights is brought to ten levels and one scale: by trying all that can be right.

The two sets of levels were found by k-means over blocks of normal, heavy-tailed (t with 5 degrees, Laplace) and
SmolLM2's weights, with the scale chosen for each: the first is for blocks without outliers, the second for one that
reaches far to one side. Each may be mirrored. A block tries every set with every scale that brings its furthest value
near the end of the set; the least squared error is taken. No level is exactly zero in the first set; where zeros matter
(a pruned weight) the second one has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIDE = 6
"""Rows and columns of a block."""
LEVELS = (
    (-116, -78, -50, -27, -6, 14, 36, 60, 89, 127),
    (-86, -56, -34, -15, 0, 16, 33, 53, 80, 127),
)
SCALES = (
    0.0,
    *(2.0**exponent / 128 for exponent in range(-23, -10, 2)),
    *(2.0**exponent * (1 + quarter / 4) / 128 for exponent in range(-9, 3) for quarter in range(4)),
    *(2.0**exponent / 128 for exponent in (3, 5, 7, 9, 11, 13, 16)),
    float("nan"),
)
NAN = len(SCALES) - 1
TOP = 127
LARGEST = SCALES[NAN - 1] * TOP
TINY = torch.finfo(torch.float32).tiny
PIECE = 1 << 17
"""Values that are worked on at a time: what a processor's cache holds."""
BELOW, ABOVE, FAR = 2, 2, 5
"""Scales that are tried: so many below the least that cuts nothing off (each cuts off a sixth more), and so many above it.
Of six thousand blocks of weights one is better off with a scale further above, unless it has few different values."""


def best_blocks(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks [..., 36] of values and of how much each counts: header bytes [...] and digits uint8 [..., 36]."""
    rows, weights = values.flatten(0, -2), counts.flatten(0, -2)
    step = max(1, (PIECE if not rows.is_cuda else PIECE << 8) // rows.shape[-1])
    made = [_packed(*piece) for piece in zip(rows.split(step), weights.split(step), strict=True)]
    headers, digits = (torch.cat(part) for part in zip(*made, strict=True))
    return headers.reshape(values.shape[:-1]), digits.reshape(values.shape)


def _packed(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    broken = values.isnan().any(-1)
    values = values.clamp(-LARGEST, LARGEST).masked_fill((counts == 0) | broken[:, None], 0.0)
    counts = counts / counts.amax(-1, keepdim=True).clamp_min(TINY)
    header = _headers(values, counts, ABOVE)
    # A block that was packed before has ten values at most (and zeros that do not count).
    few = ((values.sort(-1).values.diff() != 0).sum(-1) <= len(LEVELS[0])).nonzero().squeeze(-1)
    header[few] = _headers(values[few], counts[few], FAR)
    empty = header == 0
    scales = torch.tensor(SCALES, device=values.device)[header & NAN]
    at = values * scales.reciprocal().masked_fill(empty, 0.0)[:, None]
    digit = torch.stack([_nearest(levels)[0] for levels in _sets(values.device)])[(header >> 6)[:, None], _cell(at)]
    return header.masked_fill(broken, NAN).to(torch.uint8), digit


def _headers(values: Tensor, counts: Tensor, above: int) -> Tensor:
    """The header of least error for each block [n, 36], int64 [n]."""
    scales = torch.tensor(SCALES[:NAN], device=values.device)
    furthest = values.gather(-1, values.abs().argmax(-1, keepdim=True)).squeeze(-1)
    largest = furthest.abs()
    least = torch.searchsorted(scales * TOP, largest).clamp(1, NAN - 1)
    best = torch.full_like(largest, torch.inf)
    header = torch.zeros_like(least)
    for kind, levels in enumerate(_sets(values.device)):
        table, reach = _nearest(levels)[1], _reach(levels, furthest)
        for step in range(-BELOW, above + 1):
            code = (least + step).clamp(1, NAN - 1)
            scale = scales[code]
            allowed = (code == least + step) & ((scale * reach <= largest) | (step == 0))
            at = values * scale.reciprocal()[:, None]
            error = table[_cell(at)].sub_(at).square_().mul_(counts).sum(-1).mul_(scale.square())
            better = allowed & (error < best)
            best = torch.where(better, error, best)
            header = torch.where(better, code | kind << 6, header)
    return header.masked_fill(largest == 0, 0)


def _sets(device: torch.device) -> Tensor:
    """The sets of levels by bits 6 and 7 of a header, [4, 10]."""
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=device)
    return torch.cat([levels, -levels])


def _cell(at: Tensor) -> Tensor:
    """Values in units of a scale, as numbers of the half steps that they lie in: the middle of two levels is always at
    the edge of such a half step, so that a table knows the nearest level."""
    return at.mul(2).floor_().clamp_(-2 * TOP, 2 * TOP - 1).add_(2 * TOP).long()


def _nearest(levels: Tensor) -> tuple[Tensor, Tensor]:
    """The digit and the level nearest to each half step."""
    middle = (torch.arange(4 * TOP, device=levels.device) + 0.5) / 2 - TOP
    digit = (levels[:, None] - middle).abs().argmin(0)
    return digit.to(torch.uint8), levels[digit]


def _reach(levels: Tensor, furthest: Tensor) -> Tensor:
    """The least that the furthest value may come to, in units of a scale: one of the two outermost levels on its side
    is nearest to it then. So what was packed once and is packed again finds the scale that it had."""
    ordered = levels.sort().values
    up, down = (ordered[-2] + ordered[-3]) / 2, -(ordered[1] + ordered[2]) / 2
    return torch.where(furthest > 0, up, down)
