"""Super-classes from confusions: planted ones are found, groups keep their sizes, agreement is measured as published."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.models.vision import superclasses as parts
from orchard.models.vision.superclasses import adjusted_rand, confusion_graph, confusions, superclasses


def planted(classes: int, groups: int, seed: int, inside: float = 6.0) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(seed)
    truth = dice.permutation(classes) % groups
    counts = dice.poisson(np.where(truth[:, None] == truth, inside, 0.5)).astype(float)
    np.fill_diagonal(counts, 80)
    return counts, truth


@given(st.integers(0, 2**31), st.sampled_from([(24, 4), (30, 5), (40, 8)]))
def test_planted_groups_are_found(seed: int, shape: tuple[int, int]) -> None:
    counts, truth = planted(*shape, seed)
    assert adjusted_rand(superclasses(counts, shape[1], seed=seed % 7), truth) > 0.9


@given(st.integers(0, 2**31), st.integers(2, 23), st.integers(1, 6), st.sampled_from([0.0, 0.25, 1.0]))
def test_sizes_stay_within_the_slack_whatever_the_graph(seed: int, classes: int, groups: int, slack: float) -> None:
    groups = min(groups, classes)
    counts = np.random.default_rng(seed).integers(0, 4, (classes, classes))
    found = superclasses(counts, groups, slack=slack, starts=2)
    sizes = np.bincount(found, minlength=groups)
    mean = classes / groups
    assert len(sizes) == groups and sizes.min() >= max(1, np.floor(mean * (1 - slack)))
    assert sizes.max() <= np.ceil(mean * (1 + slack)) and sizes.sum() == classes
    order = [list(found).index(group) for group in range(groups)]
    assert order == sorted(order)


def test_a_graph_without_confusions_still_gives_groups() -> None:
    assert sorted(np.bincount(superclasses(np.diag([5.0] * 9), 3, slack=0))) == [3, 3, 3]


@given(st.integers(0, 2**31))
def test_gains_are_what_a_change_is_worth(seed: int) -> None:
    dice = np.random.default_rng(seed)
    graph, labels = confusion_graph(dice.integers(0, 9, (10, 10))), dice.permutation(10) % 3
    moves, swaps = parts._gains(graph, labels, 3, 1, 9)
    worth = parts._worth(graph, labels, 3)
    for place, group in itertools.product(range(10), range(3)):
        if group != labels[place]:
            after = parts._worth(graph, parts._moved(labels, [(place, group)]), 3)
            assert moves[place, group] == pytest.approx(after - worth, abs=1e-9)
    for one, other in itertools.combinations(range(10), 2):
        if labels[one] != labels[other]:
            new = parts._moved(labels, [(one, int(labels[other])), (other, int(labels[one]))])
            assert swaps[one, other] == swaps[other, one]
            assert swaps[one, other] == pytest.approx(parts._worth(graph, new, 3) - worth, abs=1e-9)


def test_confusions_become_a_graph_in_both_directions() -> None:
    counts = confusions([0, 0, 0, 0, 1, 1, 2], [0, 0, 1, 2, 1, 0, 2], 3)
    assert counts.tolist() == [[2, 1, 1], [1, 1, 0], [0, 0, 1]]
    assert np.allclose(confusion_graph(counts), [[0, 0.375, 0.125], [0.375, 0, 0], [0.125, 0, 0]])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=9))
def test_the_rand_index_by_counting_pairs(items: list[tuple[int, int]]) -> None:
    one, other = zip(*items, strict=True)
    together = [(a[0] == b[0], a[1] == b[1]) for a, b in itertools.combinations(items, 2)]
    both, left = sum(x and y for x, y in together), sum(x for x, _ in together)
    right, chance = sum(y for _, y in together), 0.0
    chance = left * right / len(together)
    most = (left + right) / 2
    wanted = 1.0 if most == chance else (both - chance) / (most - chance)
    assert adjusted_rand(one, other) == pytest.approx(wanted)
    assert adjusted_rand(one, one) == 1 and adjusted_rand(other, one) == pytest.approx(wanted)


def test_bad_input_is_refused() -> None:
    with pytest.raises(UsageError, match="make no 5 groups"):
        superclasses(np.zeros((3, 3)), 5)
    with pytest.raises(UsageError, match="no table of confusions"):
        superclasses(np.zeros((3, 4)), 2)
    with pytest.raises(UsageError, match="no table of confusions"):
        confusion_graph([[1.0, float("nan")], [0.0, 1.0]])
    with pytest.raises(UsageError, match="slack"):
        superclasses(np.zeros((3, 3)), 2, slack=-1)
    with pytest.raises(UsageError, match="labels outside 0 to 2"):
        confusions([0, 3], [0, 1], 3)
    with pytest.raises(UsageError, match="2 images and 1 answers"):
        confusions([0, 1], [0], 3)
    with pytest.raises(UsageError, match="groupings of 2 and 3"):
        adjusted_rand([0, 1], [0, 1, 2])
