"""Who is evicted: by hand for each policy, and the oracle against every other choice there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.experts.policies import POLICIES, Key, policy_named
from orchard.cache.experts.prefetch import NextGates, Nothing
from orchard.cache.experts.simulate import Replay
from orchard.cache.experts.table import Table
from orchard.cache.experts.trace import Trace


def order(name: str, *happens: str) -> str:
    """Keys are letters of layer 0: `+a` prefetched, `a` used, `.` a new pass, `(a)` used and its layer ended."""
    policy = policy_named(name)
    for word in happens:
        key = (0, ord(word[-1]))
        if word == ".":
            policy.begin_pass()
        elif word[0] == "+":
            policy.prefetched(key)
        else:
            policy.used(key)
            if word[0] == "-":
                policy.released(key)
    return "".join(chr(unit) for _, unit in policy.order())


def test_first_in_first_out() -> None:
    assert order("fifo", "a", "+b", "c", "a", "+a") == "abc"


def test_least_recently_used_by_when_use_ended_and_whether_prefetch_counts() -> None:
    assert order("lru", "a", "b", "+c", "a", "+b") == "bca"
    assert order("lru-touch", "a", "b", "+c", "a", "+b") == "cab"
    assert order("lru", "a", "+b", "-a") == "ba"


def test_least_often_used() -> None:
    assert order("lfu", "a", "a", "b", "+c", "b", "b") == "cab"


def test_least_stale_keeps_what_this_pass_has_touched() -> None:
    assert order("least-stale", ".", "a", "b", "c", ".", "+c", "a") == "bca"
    assert order("least-stale", ".", "a", "b", ".", ".", "c", "b") == "acb"
    # Within a pass what came first goes first, used or not: LRU would drop what was prefetched.
    assert order("least-stale", ".", "a", "+b", "a") == "ab"
    assert order("lru", ".", "a", "+b", "a") == "ba"


def test_gate_scores_fade() -> None:
    policy = policy_named("gate-score")
    policy.used((0, 1), 0.9)
    policy.used((0, 2), 0.5)
    assert list(policy.order()) == [(0, 2), (0, 1)]
    policy.begin_pass()
    policy.begin_pass()
    policy.used((0, 3), 0.3)
    assert list(policy.order()) == [(0, 2), (0, 1), (0, 3)]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_running_layer_is_never_evicted(name: str) -> None:
    table = Table(4, policy_named(name))
    table.begin_pass()
    for layer in range(6):
        needs = [(layer, unit) for unit in (0, 1, 2)]
        for key in table.need(layer, (0, 1, 2)):
            assert table.admit(key) is not None
        for unit in range(5):
            for key in table.expect(layer + 1, [unit]):
                table.admit(key, ahead=True)
            assert all(key in table.slot for key in needs)
        assert len(table.slot) == 4 == len(set(table.slot.values()))


def trace_of(chosen: np.ndarray, ahead: np.ndarray | None = None, experts: int = 6) -> Trace:
    tokens, layers, _ = chosen.shape
    guesses = np.full((tokens, layers, 1, 1), -1) if ahead is None else ahead
    return Trace(
        "random",
        experts,
        chosen.astype(np.int16),
        np.ones(chosen.shape, np.float32),
        np.arange(tokens, dtype=np.int32),
        guesses.astype(np.int16),
        np.ones(guesses.shape, np.float32),
    )


def fewest_misses(replay: Replay, capacity: int) -> int:
    """By trying every choice of victim: the least number of demand misses there can be."""
    states: dict[frozenset[Key], int] = {frozenset(): 0}
    for event in replay.events:
        held: frozenset[Key] = frozenset()
        if event.needs is not None:
            held = frozenset((event.needs[0], unit) for unit in event.needs[1])
            states = _admitted(states, held, held, capacity, cost=1)
        for layer, units in event.expects:
            for unit, _ in units:
                states = _admitted(states, frozenset([(layer, unit)]), held, capacity, cost=0)
    return min(states.values())


def _admitted(
    states: dict[frozenset[Key], int], keys: frozenset[Key], held: frozenset[Key], capacity: int, *, cost: int
) -> dict[frozenset[Key], int]:
    after: dict[frozenset[Key], int] = {}
    for state, misses in states.items():
        missing = keys - state
        total = misses + cost * len(missing)
        options = [state | missing]
        while len(next(iter(options))) > capacity:
            options = list({one - {gone} for one in options for gone in one - held - keys})
            if not options:
                options = [state]  # a prefetch without a free slot does not happen
                break
        for one in options:
            after[one] = min(after.get(one, total), total)
    return after


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_choice_of_victims_beats_the_oracle(data: st.DataObject) -> None:
    tokens, layers, capacity = 4, 3, data.draw(st.integers(2, 5))
    unit = st.integers(0, 3)
    chosen = np.array(
        data.draw(st.lists(st.lists(unit, min_size=2, max_size=2, unique=True), min_size=12, max_size=12))
    )
    guess = np.array(data.draw(st.lists(unit, min_size=12, max_size=12)))
    trace = trace_of(chosen.reshape(tokens, layers, 2), guess.reshape(tokens, layers, 1, 1), experts=4)
    for prefetcher in (Nothing(), NextGates(1)):
        replay = Replay(trace, prefetcher)
        oracle = replay.run("belady", capacity).counters
        if capacity > 2:  # with every slot held by the running layer a prefetch may or may not happen
            assert oracle.misses == fewest_misses(replay, capacity)
        for name in POLICIES:
            assert replay.run(name, capacity).counters.misses >= oracle.misses


def test_all_units_of_a_small_world_fit() -> None:
    pairs = np.array(list(product(range(3), range(3))))
    chosen = np.stack([pairs[pairs[:, 0] != pairs[:, 1]]], 1)
    for name in POLICIES:
        counters = Replay(trace_of(chosen)).run(name, 3).counters
        assert (counters.misses, counters.evictions) == (3, 0)
