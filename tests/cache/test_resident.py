"""Units under a budget: always the right bytes in the right slot, whatever the policy, and never more than the budget."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.experts import (
    POLICIES,
    BudgetTooSmall,
    Records,
    RecordsUnreadable,
    Resident,
    Source,
    policy_named,
    write_records,
)
from orchard.cache.experts.layout import PAGE
from orchard.core.errors import UsageError

LAYERS, UNITS = 3, 6
SOME = st.integers(0, UNITS - 1)
LAYER = st.tuples(
    st.lists(SOME, min_size=1, max_size=3), st.lists(SOME, max_size=4)
)  # what is needed, what is prefetched


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    path = tmp_path_factory.mktemp("records") / "r"
    sources = [Source(f"l{i}", UNITS, lambda unit, i=i: {"x": torch.full((5,), value(i, unit))}) for i in range(LAYERS)]
    write_records(path, sources)
    return Records.open(path)


def value(layer: int, unit: int) -> float:
    return float(layer * 100 + unit)


def check(resident: Resident, layer: int, units: list[int]) -> None:
    slots = resident.ensure(layer, units)
    for unit, slot in zip(units, slots, strict=True):
        assert torch.equal(resident.arrays(layer, slot)["x"], torch.full((5,), value(layer, unit)))
        assert torch.equal(resident.stacked(layer, "x")[slot], torch.full((5,), value(layer, unit)))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("threads", [0, 2])
@settings(max_examples=15, deadline=None)
@given(
    slots=st.integers(3, 8),
    passes=st.lists(st.lists(LAYER, min_size=LAYERS, max_size=LAYERS), min_size=1, max_size=4),
)
def test_right_bytes_in_every_slot(
    records: Records, policy: str, threads: int, slots: int, passes: list[list[tuple[list[int], list[int]]]]
) -> None:
    with Resident(records, slots * PAGE, policy_named(policy), working_set=3, threads=threads) as resident:
        assert resident.nbytes <= slots * PAGE
        asked = 0
        for layers in passes:
            resident.begin_pass()
            for layer, (units, ahead) in enumerate(layers):
                check(resident, layer, units)
                asked += len(set(units))
                resident.prefetch((layer + 1) % LAYERS, ahead)
        counters = resident.counters
        assert counters.hits + counters.misses == asked
        assert len(resident.table.slot) <= slots
        assert counters.wasted <= counters.prefetched
        assert counters.passes == len(passes)


def test_what_is_resident_is_not_read_again(records: Records) -> None:
    with Resident(records, 4 * PAGE, threads=0) as resident:
        resident.begin_pass()
        check(resident, 0, [1, 2])
        check(resident, 0, [2, 1])
        assert (resident.counters.reads, resident.counters.bytes) == (2, 2 * PAGE)
        assert (resident.counters.hits, resident.counters.misses) == (2, 2)
        assert resident.resident(0) == [1, 2]


def test_a_prefetched_unit_is_a_hit(records: Records) -> None:
    with Resident(records, 4 * PAGE) as resident:
        resident.begin_pass()
        check(resident, 0, [1])
        resident.prefetch(1, [3, 4])
        check(resident, 1, [3, 4])
        assert (resident.counters.hits, resident.counters.misses, resident.counters.prefetched) == (2, 1, 2)


def test_a_prefetch_that_was_evicted_before_use_is_a_collision(records: Records) -> None:
    with Resident(records, 2 * PAGE, policy_named("fifo"), threads=0) as resident:
        resident.begin_pass()
        resident.prefetch(1, [0])
        check(resident, 0, [1, 2])
        check(resident, 1, [0])
        assert (resident.counters.collisions, resident.counters.wasted) == (1, 1)
        resident.begin_pass()
        check(resident, 0, [3])  # never fetched in this pass: an ordinary miss
        assert resident.counters.collisions == 1


def test_the_running_layer_and_what_is_pinned_stay(records: Records) -> None:
    with Resident(records, 4 * PAGE, policy_named("lru"), working_set=2) as resident:
        resident.pin(2, [5])
        slots = resident.ensure(0, [0, 1])
        for unit in range(UNITS):
            resident.prefetch(1, [unit])
        assert resident.resident(0) == [0, 1]
        assert [resident.arrays(0, slot)["x"][0].item() for slot in slots] == [0.0, 1.0]
        assert resident.resident(2) == [5]
        resident.unpin(2, [5])
        check(resident, 1, [0, 1])
        check(resident, 0, [2, 3])
        assert resident.resident(2) == []


def test_budgets_too_small_are_refused(records: Records) -> None:
    with pytest.raises(BudgetTooSmall, match="4 units") as error:
        Resident(records, 3 * PAGE + 1, working_set=4)
    assert error.value.needed == 4 * PAGE
    assert "16,384" in error.value.hint
    with Resident(records, 3 * PAGE, working_set=2) as resident:
        with pytest.raises(BudgetTooSmall, match="at once"):
            resident.ensure(0, [0, 1, 2, 3])
        with pytest.raises(BudgetTooSmall, match="pinned"):
            resident.pin(0, [0, 1])
        resident.pin(0, [0])
        resident.pin(0, [0])  # no second slot for the same unit
        with pytest.raises(BudgetTooSmall):
            resident.ensure(1, [0, 1, 2])
        check(resident, 1, [0, 1])


def test_a_budget_larger_than_the_file_takes_no_more_than_the_file(records: Records) -> None:
    with Resident(records, 1 << 40) as resident:
        assert resident.slots == LAYERS * UNITS


@pytest.mark.parametrize("threads", [0, 2])
def test_a_disk_that_disappears_harms_one_request_only(tmp_path: Path, threads: int) -> None:
    path = tmp_path / "r"
    write_records(path, [Source("l", UNITS, lambda unit: {"x": torch.full((5,), value(0, unit))})])
    whole = path.read_bytes()
    with Resident(Records.open(path), 4 * PAGE, working_set=2, threads=threads) as resident:
        resident.begin_pass()
        check(resident, 0, [0, 1])
        os.truncate(path, PAGE)
        resident.prefetch(0, [4])  # fails unseen: nobody needed it yet
        with pytest.raises(RecordsUnreadable):
            resident.ensure(0, [1, 2])
        check(resident, 0, [0, 1])  # what is resident still serves
        path.write_bytes(whole)
        check(resident, 0, [2, 4])


def test_a_read_that_fails_while_another_slot_is_waited_for(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit 0 is being read ahead and holds one of two slots. While unit 2 waits for it, the read of unit 1 fails."""
    begun, failed = threading.Event(), threading.Event()
    read = Records.read

    def slow_then_broken(self: Records, layer: int, unit: int, out: np.ndarray) -> None:
        if unit == 0:
            begun.set()
            assert failed.wait(30)
            time.sleep(0.05)  # the reader of unit 1 has still to give its slot back
        if unit == 1:
            failed.set()
            raise RecordsUnreadable("gone", hint="look at the disk")
        read(self, layer, unit, out)

    monkeypatch.setattr(Records, "read", slow_then_broken)
    with Resident(records, 2 * PAGE, working_set=2, threads=2) as resident:
        resident.begin_pass()
        resident.prefetch(0, [0])
        assert begun.wait(30)
        with pytest.raises(RecordsUnreadable):
            resident.ensure(0, [1, 2])
        monkeypatch.undo()
        check(resident, 0, [1, 2])


def test_names_of_policies() -> None:
    with pytest.raises(UsageError, match="no eviction policy"):
        policy_named("random")
