"""k-means of many rows of numbers at once, each with as few means as a palette has entries.

Numbers are sorted once, and sums over any stretch of them are differences of prefix sums. A step of Lloyd's then looks
only at the borders between means, so it costs next to nothing however many numbers there are. Three palettes are worked
out for each row, and the one of least error after rounding to half precision is taken:

- begun with the best division of 128 stretches of numbers, found exactly by dynamic programming; the stretches are as
dense as the cube
  root of the numbers' density, as means are when there are many (Panter and Dite, 1951),
- begun as a uniform grid between the least and the largest number,
- that grid as it is: so that no palette is worse than rounding to it.

A row of no more different numbers than means keeps them all. Nothing is random.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.nn.formats.base import as_half

STEPS = 100
PIECE = 1 << 20
"""Numbers that are sorted at a time: prefix sums are kept in double precision."""
BINS = 128
"""Stretches of numbers that are divided exactly."""


def tables_of(values: Tensor, counts: Tensor | None, means: int) -> Tensor:
    """Sorted palettes float16 [..., means] of values [..., n], each counting as `counts` says. Not-a-number stays in
    its row."""
    rows = values.flatten(0, -2)
    weights = None if counts is None else counts.flatten(0, -2)
    step = max(1, PIECE // max(1, rows.shape[-1]))
    made = [
        _tables(rows[at : at + step], None if weights is None else weights[at : at + step], means)
        for at in range(0, len(rows), step)
    ]
    return torch.cat(made).reshape(*values.shape[:-1], means)


def codes_of(values: Tensor, tables: Tensor) -> Tensor:
    """The number of the nearest entry, uint8; the first of several that are equal."""
    between = tables.float()
    between = ((between[..., 1:] + between[..., :-1]) / 2).contiguous()
    codes = torch.searchsorted(between, values.contiguous().nan_to_num(nan=0.0), out_int32=True)
    return codes.masked_fill_(tables[..., :1].isnan(), 0).to(torch.uint8)


class _Sorted:
    """Rows of sorted numbers with sums over every stretch from the beginning: of counts, of numbers, of squares."""

    def __init__(self, values: Tensor, counts: Tensor | None) -> None:
        self.values, order = values.sort(-1)
        numbers = self.values.double()
        counts = torch.ones_like(numbers) if counts is None else counts.gather(-1, order).double()
        weighted = counts * numbers
        self.mass, self.sum, self.square = _prefix(counts), _prefix(weighted), _prefix(weighted * numbers)

    def at(self, borders: Tensor) -> tuple[Tensor, Tensor]:
        """Mass and sum of the numbers between borders [rows, n - 1], [rows, n] each."""
        places = torch.searchsorted(self.values, borders.float())
        first, last = torch.zeros_like(places[:, :1]), torch.full_like(places[:, :1], self.values.shape[-1])
        places = torch.cat([first, places, last], -1)
        return self.mass.gather(-1, places).diff(), self.sum.gather(-1, places).diff()

    def loss(self, tables: Tensor) -> Tensor:
        """What the squared error of each row is, less the sum of all squares."""
        means = tables.double()
        mass, total = self.at((means[:, 1:] + means[:, :-1]) / 2)
        return (mass * means.square() - 2 * total * means).sum(-1)


def _tables(values: Tensor, counts: Tensor | None, means: int) -> Tensor:
    broken = values.isnan().any(-1, keepdim=True)
    largest = float(torch.finfo(torch.float16).max)
    values = values.masked_fill(broken, 0.0).clamp(-largest, largest)
    if counts is not None:
        counts = _usable(counts)
        least = values.masked_fill(counts == 0, torch.inf).amin(-1, keepdim=True)
        values = torch.where(counts == 0, least, values)  # what does not count must not draw a grid
    numbers = _Sorted(values, counts)
    uniform = _grid(numbers.values, means)
    tried = torch.stack([as_half(_lloyd(numbers, _divided(numbers, means))), as_half(_lloyd(numbers, uniform))])
    tried = torch.cat([tried, as_half(uniform)[None]]).sort(-1).values
    best = torch.stack([numbers.loss(tables) for tables in tried]).argmin(0)
    tables = tried.gather(0, best[None, :, None].expand(1, -1, means)).squeeze(0)
    few, all_of_them = _different(numbers.values, means)
    return torch.where(few, as_half(all_of_them), tables).masked_fill(broken, torch.nan)


def _lloyd(numbers: _Sorted, means: Tensor) -> Tensor:
    for _ in range(STEPS):
        mass, total = numbers.at((means[:, 1:] + means[:, :-1]) / 2)
        moved = torch.where(mass > 0, total / mass, means).sort(-1).values  # one without numbers stays where it is
        if torch.equal(moved, means):
            break
        means = moved
    return means


def _grid(values: Tensor, means: int) -> Tensor:
    least, most = values[:, :1].double(), values[:, -1:].double()
    return least + (most - least) * torch.linspace(0, 1, means, dtype=torch.float64, device=values.device)


def _divided(numbers: _Sorted, means: int) -> Tensor:
    """The best division of some stretches of numbers among the means, by dynamic programming: exact where the numbers
    are few."""
    places = _stretches(numbers)
    mass, total, square = (part.gather(-1, places) for part in (numbers.mass, numbers.sum, numbers.square))
    step = max(1, (PIECE << 2) // places.shape[-1] ** 2)
    made = [_best_division(*part, means) for part in zip(mass.split(step), total.split(step), square.split(step))]
    cuts = torch.cat(made)
    mass, total = mass.gather(-1, cuts).diff(), total.gather(-1, cuts).diff()
    # One that gets nothing lies with the last number: it does not matter, and tables stay sorted.
    return torch.where(mass > 0, total / mass, numbers.values[:, -1:].double()).sort(-1).values


def _stretches(numbers: _Sorted) -> Tensor:
    """Places [rows, BINS + 1] between which numbers are taken together, as dense as the cube root of their density."""
    count = numbers.values.shape[-1]
    bins = min(BINS, count)
    ends = torch.linspace(0, count, bins + 1, device=numbers.values.device).round().long()
    if bins == count:
        return ends.expand(len(numbers.values), -1)
    edges, mass = numbers.values[:, ends.clamp_max(count - 1)].double(), numbers.mass[:, ends].diff()
    share = (mass * edges.diff().square()).pow(1 / 3).cumsum(-1)
    share = torch.nn.functional.pad(share, (1, 0))
    wanted = torch.arange(1, bins, dtype=torch.float64, device=share.device) / bins * share[:, -1:]
    after = torch.searchsorted(share, wanted).clamp(1, bins)
    low, high = share.gather(-1, after - 1), share.gather(-1, after)
    along = ((wanted - low) / (high - low)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(0, 1)
    borders = torch.lerp(edges.gather(-1, after - 1), edges.gather(-1, after), along)
    inner = torch.searchsorted(numbers.values, borders.float())
    return torch.cat([ends[:1].expand(len(inner), 1), inner, ends[-1:].expand(len(inner), 1)], -1)


def _best_division(mass: Tensor, total: Tensor, square: Tensor, means: int) -> Tensor:
    """Of prefix sums [rows, n + 1] of stretches: the places [rows, means + 1] that divide them with the least squared
    error."""
    off = _between(square) - _between(total).square() / _between(mass).clamp_min(torch.finfo(torch.float64).tiny)
    cost = off.clamp_min(0).float()
    cost.masked_fill_(torch.ones_like(cost[0], dtype=torch.bool).tril(-1), torch.inf)
    best, choices = cost[:, 0], []
    for _ in range(means - 1):
        best, before = (best[:, :, None] + cost).min(1)
        choices.append(before)
    cuts = [torch.full_like(choices[0][:, :1], mass.shape[-1] - 1)]
    for before in reversed(choices):
        cuts.append(before.gather(-1, cuts[-1]))
    return torch.cat([torch.zeros_like(cuts[0]), *reversed(cuts)], -1)


def _between(prefix: Tensor) -> Tensor:
    """Sums [rows, from, to]."""
    return prefix[:, None, :] - prefix[:, :, None]


def _different(values: Tensor, means: int) -> tuple[Tensor, Tensor]:
    """Whether sorted rows have no more different numbers than there are means, and those numbers (the last one repeated)."""
    rank = torch.cat([torch.zeros_like(values[:, :1]), values.diff() != 0], -1).cumsum(-1).long()
    kept = values[:, -1:].repeat(1, means + 1)
    kept.scatter_(-1, rank.clamp_max(means), values)
    return rank[:, -1:] < means, kept[:, :means]


def _usable(counts: Tensor) -> Tensor:
    """Counts with a largest of one in every row; ones where nothing counts."""
    most = counts.amax(-1, keepdim=True)
    return torch.where(most > 0, counts / most.clamp_min(torch.finfo(torch.float32).tiny), 1.0)


def _prefix(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))
