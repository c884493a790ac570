"""Episodes: clustered the same way every time, matched by direction; budgets of layers add up; words without a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.generate.memory.episodes import Utterance, clustered, segmented
from orchard.generate.memory.lexical import Lexical
from orchard.generate.memory.sensitivity import drift, layer_budgets
from tests.generate.memory.test_torch_kept import IDS, MODEL


def test_segments_hold_everything_in_order() -> None:
    talk = [Utterance(f"u{number}", (number, number + 1)) for number in range(10)]
    found = segmented(talk, 4)
    assert [len(one.utterances) for one in found] == [4, 4, 2] and found[2].text == "u8\nu9"
    assert [token for one in found for token in one.tokens] == [token for one in talk for token in one.tokens]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10**6), st.integers(1, 4))
def test_clusters_that_are_apart_are_found(episodes: int, each: int, seed: int, medoids: int) -> None:
    dice = np.random.default_rng(seed)
    truth = dice.permutation(np.repeat(np.arange(episodes), each))
    lengths = dice.uniform(0.1, 9, (len(truth), 1))
    vectors = lengths * (np.eye(8)[truth] + dice.normal(0, 0.02, (len(truth), 8)))
    found = clustered(vectors, episodes, medoids)
    again = clustered(vectors * 3, episodes, medoids)
    assert found.members == again.members and found.medoids == again.medoids
    assert sorted(number for mine in found.members for number in mine) == list(range(len(truth)))
    assert [mine[0] for mine in found.members] == sorted(mine[0] for mine in found.members)
    for number, mine in enumerate(found.members):
        assert len({int(truth[place]) for place in mine}) == 1
        chosen = found.medoids[number]
        assert set(chosen) <= set(mine) and list(chosen) == sorted(chosen) and len(chosen) == min(medoids, each)
        where, near = found.match(5 * np.eye(8)[truth[mine[0]]])
        assert where == number and 0.9 < near <= 1.0001
    grown = found.plus(-2 * np.ones(8))
    assert len(grown) == len(found) + 1 and grown.match(-np.ones(8)) == (len(found), pytest.approx(1.0))


def test_no_more_episodes_than_there_are_different_segments() -> None:
    found = clustered(np.ones((5, 3)), 4)
    assert len(found) == 1 and found.members == ((0, 1, 2, 3, 4),)
    for bad in (np.empty((0, 3)), np.ones(3), np.full((2, 2), np.nan)):
        with pytest.raises(UsageError):
            clustered(bad)
    with pytest.raises(UsageError):
        clustered(np.ones((2, 2)), 0)


def test_words_without_a_model() -> None:
    embed = Lexical(width=256)
    texts = ["the tea and the milk", "the boat and the sea", "the sea and the wind", "tea with milk"]
    embed.learn(texts)
    rows = embed([*texts, "", "Is there MILK for the tea?"])
    assert rows.shape == (6, 256) and np.allclose(np.linalg.norm(rows[[0, 1, 2, 3, 5]], axis=1), 1, atol=1e-6)
    near = rows[5] @ rows[:4].T
    assert set(near.argsort()[2:].tolist()) == {0, 3} and not rows[4].any()
    plain = Lexical(width=256)(texts)
    assert rows[1] @ rows[0] < plain[1] @ plain[0]  # words that all texts share count less
    with pytest.raises(UsageError):
        Lexical(1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 2), min_size=1, max_size=12),
    st.integers(8, 400),
    st.floats(0.5, 4),
    st.floats(0, 1),
    st.integers(1, 8),
)
def test_budgets_of_layers_add_up(drifts: list[float], budget: int, alpha: float, floor: float, least: int) -> None:
    made = layer_budgets(drifts, budget, alpha=alpha, floor=floor, least=least)
    assert sum(made) == budget * len(drifts) and min(made) >= max(floor * budget, least)
    for one, other in zip(range(len(made)), range(1, len(made))):
        if drifts[one] > drifts[other]:
            assert made[one] >= made[other] - 1
    assert layer_budgets([0.3] * 4, budget) == layer_budgets([0.0] * 4, budget) == [budget] * 4


def test_drift_is_of_what_old_tokens_change() -> None:
    found = drift(MODEL, IDS, window=8, sinks=2)
    assert len(found) == 2 and found[0] == pytest.approx(0, abs=1e-6) and found[1] > 1e-4
    wider = drift(MODEL, IDS, window=48, sinks=2)
    assert wider[1] < found[1]
    assert torch.is_inference_mode_enabled() is False
    with pytest.raises(UsageError):
        drift(MODEL, IDS, window=60, sinks=0)
    for bad in ([], [float("nan")]):
        with pytest.raises(UsageError):
            layer_budgets(bad, 8)
    with pytest.raises(UsageError):
        layer_budgets([1.0], 8, least=9)
