"""The buffer and window of neurons: rows without gaps, the right ones, whatever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.neurons import NeuronBuffer, NeuronWindow
from orchard.core.errors import ConfigError, UsageError

UNITS, WIDTH = 24, 3
SETS = st.sets(st.integers(0, UNITS - 1))


def rows(units: np.ndarray) -> torch.Tensor:
    """A row that tells whose it is."""
    return torch.from_numpy(units).float()[:, None].expand(-1, WIDTH) * torch.tensor([1.0, 10.0, 100.0])


def as_units(found: set[int]) -> np.ndarray:
    return np.array(sorted(found), np.int64)


def last(tokens: list[set[int]], size: int) -> list[set[int]]:
    return tokens[max(0, len(tokens) - size) :]


def is_sound(buffer: NeuronBuffer) -> bool:
    held = buffer.resident()
    same = torch.equal(buffer.matrix(), rows(held)) and bool((buffer.slots[held] == np.arange(len(held))).all())
    return same and int((buffer.slots >= 0).sum()) == len(held) == buffer.count


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SETS, SETS), max_size=12))
def test_rows_stay_without_gaps(changes: list[tuple[set[int], set[int]]]) -> None:
    buffer, inside = NeuronBuffer(UNITS, WIDTH, capacity=UNITS), set[int]()
    for leave, come in changes:
        gone = leave & inside
        buffer.drop(np.array(list(gone), np.int64))
        fresh = come - (inside - gone)
        buffer.append(as_units(fresh), rows(as_units(fresh)))
        inside = inside - gone | fresh
        assert set(buffer.resident().tolist()) == inside and is_sound(buffer)


def test_only_holes_are_written() -> None:
    buffer = NeuronBuffer(UNITS, WIDTH, capacity=UNITS)
    buffer.append(np.arange(UNITS), rows(np.arange(UNITS)))
    before = buffer.rows.clone()
    buffer.drop(np.array([3, 22, 7]))
    changed = (buffer.rows != before).any(1).nonzero()[:, 0].tolist()
    assert changed == [3, 7] and set(buffer.resident()[[3, 7]].tolist()) == {21, 23}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(SETS, min_size=1, max_size=5), max_size=10),
    st.integers(0, 6),
    st.integers(1, UNITS),
    st.integers(0, 12),
)
def test_the_window_holds_what_the_last_tokens_used(
    calls: list[list[set[int]]], size: int, capacity: int, fails: int
) -> None:
    buffer = NeuronBuffer(UNITS, WIDTH, capacity=capacity)
    window, past = NeuronWindow(buffer, size), list[set[int]]()
    for number, tokens in enumerate(calls):
        wanted = set().union(*tokens)
        before = set(buffer.resident().tolist())
        plan = window.begin(as_units(wanted), [as_units(token) for token in last(tokens, size)], len(tokens))
        stay, passing = set(plan.stay.tolist()), set(plan.passing.tolist())
        assert stay | passing == wanted - before and not stay & passing
        if number == fails:  # the disk went away: nothing came in, and these tokens have not been
            assert is_sound(buffer)
            continue
        buffer.append(plan.stay, rows(plan.stay))
        assert wanted - passing <= set(buffer.resident().tolist())
        window.end(plan)
        past += tokens
        recent = set().union(*last(past, size))
        inside = set(buffer.resident().tolist())
        assert inside <= recent and is_sound(buffer)
        if capacity == UNITS:
            assert inside == recent or number > fails
    done = [tokens for number, tokens in enumerate(calls) if number != fails]
    tally = window.tally
    assert tally.tokens == sum(map(len, done)) and tally.wanted == tally.hits + tally.loaded and tally.peak <= capacity


def test_counting_and_forgetting() -> None:
    window = NeuronWindow(NeuronBuffer(UNITS, WIDTH, capacity=UNITS), 2)
    for used in ([1, 2], [2, 3], [2, 4], [1]):
        units = np.array(used)
        plan = window.begin(units, [units], 1)
        window.buffer.append(plan.stay, rows(plan.stay))
        window.end(plan)
    assert set(window.buffer.resident().tolist()) == {1, 2, 4}
    assert (window.tally.loaded, window.tally.hits, window.tally.dropped) == (5, 2, 2)
    window.clear()
    assert window.buffer.count == 0 and window.begin(np.array([2]), [np.array([2])], 1).stay.tolist() == [2]
    window.tally.reset()
    assert window.tally.loaded == 0


def test_what_is_refused() -> None:
    buffer = NeuronBuffer(UNITS, WIDTH, capacity=4)
    buffer.append(np.array([1, 2]), rows(np.array([1, 2])))
    for bad in ([2], [5, 5], [6, 7, 8]):
        with pytest.raises(UsageError):
            buffer.append(np.array(bad), rows(np.array(bad)))
    with pytest.raises(UsageError):
        buffer.drop(np.array([9]))
    assert is_sound(buffer)
    with pytest.raises(UsageError):
        NeuronBuffer(UNITS, WIDTH, capacity=UNITS + 1)
    with pytest.raises(ConfigError):
        NeuronWindow(buffer, -1)
    with pytest.raises(ConfigError):
        NeuronWindow(buffer, 3).begin(np.array([1]), [np.array([1])], 2)
