"""States are values: adding a token costs no copy and changes nobody else's tokens."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.generate.protocol import State, Tokens

ids = st.lists(st.integers(0, 9), max_size=12)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=30))
def test_any_tree_of_continuations_equals_tuples(steps: list[tuple[int, int]]) -> None:
    """Each step goes on from some earlier state; the twin copies tuples."""
    states, twins = [State((1, 2))], [()]
    for which, token in steps:
        parent = which % len(states)
        states.append(states[parent].plus(token))
        twins.append((*twins[parent], token))  # type: ignore[arg-type]
    for state, twin in zip(states, twins):
        assert state.output == twin and tuple(state.output) == twin and len(state.output) == len(twin)
        assert list(reversed(state.output)) == list(reversed(twin)) and hash(state.output) == hash(twin)
    for state, twin in zip(states, twins):
        for other, other_twin in zip(states, twins):
            assert (state == other) == (twin == other_twin)
            if state.output.goes_on_from(other.output):
                assert twin[: len(other_twin)] == other_twin


@given(ids, st.slices(15))
def test_slices_and_places(row: list[int], cut: slice) -> None:
    tokens, longer = Tokens(row), Tokens(row).plus(5).plus(6)
    assert tokens[cut] == tuple(row)[cut] and tokens != longer
    parent = Tokens(row)
    parent.plus(77)  # what a continuation adds is not the parent's
    for place in range(-len(row) - 3, len(row) + 3):
        if -len(row) <= place < len(row):
            assert parent[place] == row[place]
        else:
            with pytest.raises(IndexError):
                parent[place]
    assert list(parent) == row and 77 not in parent


def test_states_of_tuples_and_states_that_grew_are_equal() -> None:
    grown = State((1,)).plus(4).plus(5)
    assert grown == State((1,), (4, 5)) and hash(grown) == hash(State((1,), (4, 5)))
    assert repr(grown) == "State(prompt=(1,), output=(4, 5))"
    assert grown != State((2,), (4, 5)) and grown.output != (4, 5, 6) and grown.output != "no tokens"


def test_threads_that_go_on_from_the_same_state_do_not_meet() -> None:
    start = State((1,), range(5))
    for _ in range(200):
        barrier = threading.Barrier(4)
        ends: dict[int, State] = {}

        def go(name: int, barrier: threading.Barrier = barrier, ends: dict[int, State] = ends) -> None:
            barrier.wait()
            ends[name] = start.plus(name).plus(name)

        threads = [threading.Thread(target=go, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(ends[name].output == (0, 1, 2, 3, 4, name, name) for name in range(4))


def test_a_token_costs_the_same_at_any_length() -> None:
    def best(length: int) -> float:
        state, times = State((1,), range(length)), []
        for _ in range(50):
            begun = time.perf_counter()
            for _ in range(20):
                state = state.plus(1)
            times.append(time.perf_counter() - begun)
        return min(times)

    # Copying 100,000 tokens takes hundreds of times as long as one step does.
    assert best(100_000) < 10 * best(10)
