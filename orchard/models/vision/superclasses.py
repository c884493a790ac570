"""Super-classes for a set of images that has none: classes that a model confuses belong together (arXiv 2309.04354).

Count on images that were held out which classes a dense model takes for which, join both directions into a graph, and cut it
into groups of about the same size: a spectral embedding (Ng, Jordan and Weiss, NIPS 2001) gives the first cut, moves and swaps of
single classes (after Kernighan and Lin, 1970) better it. The paper leaves the way of clustering open.

Shapes: C classes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchard.core.errors import UsageError

Matrix = NDArray[np.float64]
Labels = NDArray[np.int64]


def confusions(shown: Any, taken_for: Any, classes: int) -> Matrix:
    """How often [C, C] an image of a class (row) was taken for each (column)."""
    rows, columns = (np.asarray(side).reshape(-1).astype(np.int64) for side in (shown, taken_for))
    if len(rows) != len(columns):
        raise UsageError(f"{len(rows)} images and {len(columns)} answers", hint="give one answer an image")
    if len(rows) and not 0 <= min(rows.min(), columns.min()) <= max(rows.max(), columns.max()) < classes:
        raise UsageError(f"labels outside 0 to {classes - 1}", hint="number classes from 0 on")
    return np.bincount(rows * classes + columns, minlength=classes**2).reshape(classes, classes).astype(np.float64)


def confusion_graph(counts: Any) -> Matrix:
    """The mean rate [C, C] at which two classes are taken for each other; nothing from a class to itself."""
    counts = np.asarray(counts, np.float64)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or (counts < 0).any() or not np.isfinite(counts).all():
        raise UsageError("this is no table of confusions", hint="give counts [classes, classes] from 0 on")
    rates = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    graph: Matrix = (rates + rates.T) / 2
    np.fill_diagonal(graph, 0)
    return graph


def superclasses(counts: Any, groups: int, *, slack: float = 0.25, starts: int = 8, seed: int = 0) -> Labels:
    """The group [C] of each class, numbered in the order in which they first occur.

    Groups have the mean size or up to `slack` of it more or less, because experts of small groups learn from few images.
    """
    graph = confusion_graph(counts)
    classes = len(graph)
    if not 1 <= groups <= classes:
        raise UsageError(f"{classes} classes make no {groups} groups", hint=f"use 1 to {classes}")
    if not slack >= 0:
        raise UsageError(f"a slack of {slack}", hint="use 0 for equal groups, 0.25 for a quarter more or less")
    mean = classes / groups
    least, most = max(1, math.floor(mean * (1 - slack))), math.ceil(mean * (1 + slack))
    dice = np.random.default_rng(seed)
    points = spectral(graph, groups)
    found = [_better(graph, _first_cut(points, groups, most, dice), groups, least, most) for _ in range(starts)]
    best = max(found, key=lambda labels: _worth(graph, labels, groups))
    _, first, inverse = np.unique(best, return_index=True, return_inverse=True)
    numbered: Labels = np.argsort(np.argsort(first))[inverse].astype(np.int64)
    return numbered


def spectral(graph: Matrix, dims: int) -> Matrix:
    """Classes as points [C, dims] of length 1, near each other where the graph is dense."""
    degree = graph.sum(1)
    scale = 1 / np.sqrt(np.maximum(degree, 1e-12))
    _, vectors = np.linalg.eigh(scale[:, None] * graph * scale[None, :])
    points: Matrix = vectors[:, -dims:]
    points = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    return points


def adjusted_rand(one: Any, other: Any) -> float:
    """How far two groupings agree (Hubert and Arabie, 1985): 1 where they are the same, 0 on average where by chance."""
    left, right = (np.unique(np.asarray(side).reshape(-1), return_inverse=True)[1] for side in (one, other))
    if len(left) != len(right):
        raise UsageError(
            f"groupings of {len(left)} and {len(right)} things", hint="compare groupings of the same things"
        )
    table = np.zeros((left.max(initial=0) + 1, right.max(initial=0) + 1))
    np.add.at(table, (left, right), 1)

    def pairs(counts: Any) -> float:
        return float((counts * (counts - 1) / 2).sum())

    both, ones, others, every = pairs(table), pairs(table.sum(1)), pairs(table.sum(0)), pairs(np.array(len(left)))
    chance = ones * others / every if every else 0.0
    most = (ones + others) / 2
    return 1.0 if most == chance else (both - chance) / (most - chance)


# Inside ---------------------------------------------------------------------------------------------------------------


def _first_cut(points: Matrix, groups: int, most: int, dice: np.random.Generator) -> Labels:
    """Balanced k-means: the points that have most to lose choose first, and a full group takes no more."""
    centres = [points[dice.integers(len(points))]]
    for _ in range(groups - 1):
        far = np.min([((points - centre) ** 2).sum(1) for centre in centres], axis=0)
        chance = far / far.sum() if far.sum() > 1e-12 else np.full(len(points), 1 / len(points))
        centres.append(points[dice.choice(len(points), p=chance)])
    middle, labels = np.stack(centres), np.full(len(points), -1, np.int64)
    for _ in range(20):
        far = ((points[:, None] - middle[None]) ** 2).sum(-1)
        new, room = np.full(len(points), -1, np.int64), np.full(groups, most)
        near = np.sort(far, 1)
        regret = near[:, 1] - near[:, 0] if groups > 1 else near[:, 0]
        for place in np.argsort(-regret, kind="stable"):
            new[place] = min((group for group in range(groups) if room[group]), key=lambda group: far[place, group])
            room[new[place]] -= 1
        if (new == labels).all():
            break
        labels = new
        middle = np.stack([points[labels == g].mean(0) if (labels == g).any() else middle[g] for g in range(groups)])
    return labels


def _worth(graph: Matrix, labels: Labels, groups: int) -> float:
    """The sum over groups of what is confused inside them, a class."""
    member = np.eye(groups)[labels]
    return float((np.einsum("cg,cd,dg->g", member, graph, member) / np.maximum(member.sum(0), 1)).sum())


def _better(graph: Matrix, labels: Labels, groups: int, least: int, most: int) -> Labels:
    """Fill groups that are too small, then take the best move or swap of classes until none is left that gains."""
    labels = labels.copy()
    sizes = np.bincount(labels, minlength=groups)
    while (sizes < least).any():
        small = int(sizes.argmin())
        tried = [(place, small) for place in range(len(labels)) if sizes[labels[place]] > least]
        labels = max((_moved(labels, [one]) for one in tried), key=lambda new: _worth(graph, new, groups))
        sizes = np.bincount(labels, minlength=groups)
    while True:
        moves, swaps = _gains(graph, labels, groups, least, most)
        if max(moves.max(), swaps.max()) <= 1e-12:
            return labels
        if moves.max() >= swaps.max():
            place, group = np.unravel_index(moves.argmax(), moves.shape)
            labels = _moved(labels, [(int(place), int(group))])
        else:
            one, other = np.unravel_index(swaps.argmax(), swaps.shape)
            labels = _moved(labels, [(int(one), int(labels[other])), (int(other), int(labels[one]))])


def _gains(graph: Matrix, labels: Labels, groups: int, least: int, most: int) -> tuple[Matrix, Matrix]:
    """What `_worth` gains by moving a class to a group [C, groups], and by exchanging two classes [C, C]; -inf where that is not
    allowed or changes nothing."""
    member = np.eye(groups)[labels]
    sizes, towards = member.sum(0), graph @ member  # [C, groups]: what a class has in common with each group
    within = (towards * member).sum(0)
    own, size = towards[np.arange(len(labels)), labels], sizes[labels]
    left = (within[labels] - 2 * own) / np.maximum(size - 1, 1) - within[labels] / size
    joined = (within + 2 * towards) / (sizes + 1) - within / np.maximum(sizes, 1)
    allowed = (size[:, None] > least) & (sizes[None] < most) & (member == 0)
    moves: Matrix = np.where(allowed, left[:, None] + joined, -np.inf)
    there = 2 * (towards[:, labels] - own[None] - graph) / size[None]  # the first takes the place of the second
    swaps: Matrix = np.where(labels[:, None] != labels[None], there + there.T, -np.inf)
    return moves, swaps


def _moved(labels: Labels, changes: list[tuple[int, int]]) -> Labels:
    new = labels.copy()
    for place, group in changes:
        new[place] = group
    return new
