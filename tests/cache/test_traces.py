"""Traces on disk, prefetchers, misses, and the simulated line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from orchard.cache.experts import BudgetTooSmall, OtherModel
from orchard.cache.experts.link import Hardware, Link
from orchard.cache.experts.misses import Skip, Substitute, Wait, misses_named
from orchard.cache.experts.prefetch import Guess, History, NextGates, Nothing, Threshold, prefetcher_named
from orchard.cache.experts.simulate import Replay
from orchard.cache.experts.trace import Trace
from orchard.core.errors import BadFile, UsageError


def small(tokens: int = 6, layers: int = 3, k: int = 2, experts: int = 8) -> Trace:
    dice = np.random.default_rng(0)
    chosen = np.stack([[dice.permutation(experts)[:k] for _ in range(layers)] for _ in range(tokens)])
    ahead = np.repeat(chosen[:, :, None], 2, 2)
    ahead[:, 0, 1] = -1  # nobody looks two layers ahead of the first
    return Trace(
        "tiny",
        experts,
        chosen.astype(np.int16),
        np.full(chosen.shape, 0.5, np.float32),
        np.arange(tokens, dtype=np.int32),
        ahead.astype(np.int16),
        np.full(ahead.shape, 0.4, np.float32),
        {"text": "x"},
    )


def test_there_and_back(tmp_path: Path) -> None:
    trace = small()
    trace.save(tmp_path / "t")
    back = Trace.open(tmp_path / "t", model="tiny")
    assert (back.model, back.experts, back.facts, back.layers, back.k) == ("tiny", 8, {"text": "x"}, 3, 2)
    assert all(np.array_equal(getattr(back, name), getattr(trace, name)) for name in ("chosen", "scores", "ahead"))


def test_a_trace_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    small().save(tmp_path / "t")
    with pytest.raises(OtherModel, match="'tiny', not of 'huge'"):
        Trace.open(tmp_path / "t", model="huge")


def test_damaged_traces_are_refused(tmp_path: Path) -> None:
    small().save(tmp_path / "t")
    data = (tmp_path / "t").read_bytes()
    for size in (0, 5, 60, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(BadFile):
            Trace.open(tmp_path / "cut")
    save_file({"chosen": np.zeros(3)}, tmp_path / "other")
    with pytest.raises(BadFile, match="no trace"):
        Trace.open(tmp_path / "other")
    with pytest.raises(BadFile, match="read"):
        Trace.open(tmp_path / "nothing")


@pytest.mark.parametrize(
    "change",
    [
        {"experts": 3},
        {"chosen": np.zeros((6, 3), np.int16)},
        {"scores": np.zeros((6, 3, 1), np.float32)},
        {"passes": np.array([0, 1, 1, 3, 4, 5], np.int32)},
        {"passes": np.array([1, 2, 3, 4, 5, 6], np.int32)},
        {"ahead": np.full((6, 3, 2, 2), 99, np.int16)},
        {"ahead_scores": np.zeros((6, 3, 2, 1), np.float32)},
    ],
)
def test_traces_that_make_no_sense(change: dict[str, object]) -> None:
    with pytest.raises(BadFile):
        replace(small(), **change)  # type: ignore[arg-type]


def test_perfect_guesses_leave_no_misses_and_hide_the_reads() -> None:
    trace = small(tokens=20)
    plain = Replay(trace, Nothing(), Hardware(transfer=1.0, compute=10.0), prompt=4)
    ahead = Replay(trace, NextGates(1), Hardware(transfer=1.0, compute=10.0), prompt=4)
    assert ahead.in_flight == 4 and plain.in_flight == 2
    for policy in ("least-stale", "belady"):
        blind, sighted = plain.run(policy, 4), ahead.run(policy, 4)
        assert sighted.counters.misses == 0 and blind.counters.misses > 60
        assert sighted.seconds < blind.seconds
        # Only the first layer of a token has nobody's computing to hide behind.
        assert sighted.seconds <= 20 * (3 * 10.0 + 2 * 1.0)
        assert sighted.first < sighted.seconds
    with pytest.raises(BudgetTooSmall):
        plain.run("lru", 1)


def test_tokens_of_one_pass_want_their_experts_together() -> None:
    trace = replace(small(), passes=np.array([0, 0, 0, 1, 1, 1], np.int32))
    replay = Replay(trace)
    union = len(set(trace.chosen[:3, 0].ravel().tolist()))
    assert replay.events[1].needs is not None and len(replay.events[1].needs[1]) == union
    assert replay.run("lru", replay.working_set).counters.passes == 2


def test_prefetchers() -> None:
    guess = Guess(3, 1, k=2, ranked=[(5, 0.5), (1, 0.3), (4, 0.1), (2, 0.05)], previous=[7, 6])
    assert Nothing().choose(guess) == [] and Nothing(3).lookahead == 0
    assert NextGates(1, extra=1).choose(guess) == [(5, 0.5), (1, 0.3), (4, 0.1)]
    assert NextGates(2, extra=1).in_flight(2) == 8
    assert Threshold(1, 0.2).choose(guess) == [(5, 0.5), (1, 0.3)]
    assert [unit for unit, _ in History().choose(guess)] == [7, 6]
    with pytest.raises(UsageError, match="no prefetcher"):
        prefetcher_named("luck")
    with pytest.raises(UsageError, match="lookahead"):
        NextGates(-1)


def test_misses() -> None:
    mass = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], np.float32)
    chosen = np.array([[0, 1], [3, 2]], np.int32)
    weights = np.array([[0.6, 0.4], [0.5, 0.5]], np.float32)
    one, its = chosen.copy(), weights.copy()
    assert Wait().settle(one, its, mass, []) == 0 and np.array_equal(one, chosen)
    assert Substitute().settle(one, its, mass, [1, 2]) == 2
    assert one.tolist() == [[2, 1], [1, 2]] and np.array_equal(its, weights)
    one, its = chosen.copy(), weights.copy()
    assert Skip().settle(one, its, mass, [1]) == 2
    assert one.tolist() == [[1, 1], [3, 3]]
    assert np.allclose(its, [[0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(UsageError):
        misses_named("panic")


def test_the_line_serves_what_is_urgent_first() -> None:
    link = Link(1.0)
    for unit in range(3):
        link.ask((0, unit), 0.0, ahead=True)
    link.ask((1, 0), 0.5, ahead=False)
    assert link.wait([(1, 0)], 0.5) == 2.0  # after the one under way
    link.cancel((0, 2), 1.5)  # its slot went to another before its turn came
    link.ask((2, 0), 1.6, ahead=True)
    assert link.wait([(2, 0)], 1.7) == 3.0
    assert link.wait([(0, 1)], 1.8) == 4.0
    assert link.wait([(0, 0)], 9.0) == 9.0
