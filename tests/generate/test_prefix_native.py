"""Kept beginnings and the native engine's stores: blocks are the same bytes whoever read them, and go back as they came."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.codecs import Int8
from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.prefix import GRAIN, Prefixes
from orchard.generate.protocol import Use, Work
from orchard.ops.kernels.native import library, why_not
from tests.generate.test_native_runner import small

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())

KINDS = {
    "bf16": (Store.Config(), "bf16"),
    "f32": (Store.Config(), "f32"),
    "int8": (Store.Config(codec=Int8.Config()), "bf16"),
    "ring": (Store.Config(policy=Window.Config(window=48, sinks=2)), "bf16"),
}
PLAIN = sorted(set(KINDS) - {"ring"})


@cache
def runner(kind: str) -> NativeRunner:
    store, codec = KINDS[kind]
    return NativeRunner(lower(small(store, Store.Config()), stores=codec), threads=1)


def ids_of(kind: str, count: int, seed: int = 7) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, runner(kind).plan.vocab, count).tolist())


def read(slots: Any, slot: int, ids: tuple[int, ...], cuts: Sequence[int] = (), use: Use | None = None) -> np.ndarray:
    """Scores after a prompt, read in pieces."""
    at = slots.open(slot, len(ids) + 8, use)
    for cut in sorted({cut for cut in cuts if at < cut < len(ids)}):
        slots.run([Work(slot, ids[at:cut], prompt=True)])
        at = cut
    scores = slots.run([Work(slot, ids[at:], wanted=1, prompt=True)])[0]
    return np.array(scores)


@pytest.mark.parametrize("kind", PLAIN)
@settings(max_examples=10)
@given(cuts=st.lists(st.integers(1, 5 * GRAIN - 1), max_size=4))
def test_a_block_is_the_same_bytes_after_any_cut_and_before_any_end(kind: str, cuts: list[int]) -> None:
    start = ids_of(kind, 3 * GRAIN)
    slots = runner(kind).slots(2)
    read(slots, 0, (*start, *ids_of(kind, 2 * GRAIN, seed=1)), cuts)
    read(slots, 1, (*start, *ids_of(kind, GRAIN, seed=2)))
    one, other = slots.hold(0, 5 * GRAIN), slots.hold(1, 4 * GRAIN)
    assert one is not None and other is not None and not one.whole
    assert [np.array_equal(a, b) for a, b in zip(one.data, other.data, strict=False)] == [True] * 3 + [False]


@pytest.mark.parametrize("kind", PLAIN)
@settings(max_examples=20)
@given(taken=st.integers(1, 3 * GRAIN), used=st.integers(1, 3 * GRAIN), more=st.integers(1, 70))
def test_what_is_put_back_is_what_was_taken(kind: str, taken: int, used: int, more: int) -> None:
    used = min(used, taken)
    slots = runner(kind).slots(1)
    read(slots, 0, ids_of(kind, 3 * GRAIN))
    stores, other = slots._stores, runner(kind).program.stores(2, used + more)
    held = stores.take(0, taken)
    other.put(1, used, held, taken)
    again, wanted = other.take(1, used), stores.take(0, used)
    assert len(again) == len(wanted) == -(-used // GRAIN)
    assert all(map(np.array_equal, again, wanted))
    assert not any(block.any() for block in other.take(0, used))  # nobody else was written to


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_answer_from_kept_blocks(kind: str) -> None:
    start = ids_of(kind, 3 * GRAIN)
    first, second = (*start, *ids_of(kind, 100, seed=1)), (*start, *ids_of(kind, 90, seed=2))
    kept, slots = Prefixes(runner(kind)), runner(kind).slots(3)
    for slot, ids in enumerate((start, first)):
        read(slots, slot, ids)
        held = slots.hold(slot, kept.worth(ids, None))
        assert held is not None and held.whole == (kind == "ring")
        kept.add(held)
        slots.close(slot)
    assert len(kept) == (2 if kind == "ring" else 4)
    use = kept.find(second)
    assert use is not None and use.tokens == len(start)
    hot, cold = read(slots, 0, second, use=use), read(slots, 1, second)
    assert np.array_equal(hot, cold)
    hot, cold = (np.array(slots.run([Work(slot, [5, 6, 7], wanted=3)])[0]) for slot in (0, 1))
    assert np.array_equal(hot, cold)


@pytest.mark.parametrize("kind", PLAIN)
def test_known_blocks_are_not_copied_again(kind: str) -> None:
    ids = ids_of(kind, 4 * GRAIN + 3)
    kept, slots = Prefixes(runner(kind)), runner(kind).slots(1)
    read(slots, 0, ids[: 2 * GRAIN])
    held = slots.hold(0, 2 * GRAIN)
    assert held is not None
    kept.add(held)
    slots.close(0)
    use = kept.find(ids)
    read(slots, 0, ids, use=use)
    longer = slots.hold(0, kept.worth(ids, use))
    assert use is not None and longer is not None and len(longer.data) == 4
    assert longer.data[0] is use.held.data[0] and longer.data[1] is use.held.data[1]
    slots.close(0)
    read(slots, 0, ids)
    alone = slots.hold(0, 4 * GRAIN)
    assert alone is not None and all(map(np.array_equal, longer.data, alone.data))


def test_bytes_that_do_not_fit_are_refused() -> None:
    slots = runner("bf16").slots(1)
    read(slots, 0, ids_of("bf16", 2 * GRAIN))
    held = slots._stores.take(0, 2 * GRAIN)
    other = runner("bf16").program.stores(1, 2 * GRAIN)
    for tokens, data, count in (
        (2 * GRAIN, held, 2 * GRAIN),  # no room for one more
        (0, held, 2 * GRAIN),
        (GRAIN + 1, held[:1], GRAIN),
        (GRAIN, held[:1], 2 * GRAIN),
        (GRAIN, (held[0][:-1], held[1]), 2 * GRAIN),
        (GRAIN, np.concatenate(held), 2 * GRAIN),
        (GRAIN, tuple(block.view(np.int8) for block in held), 2 * GRAIN),
    ):
        with pytest.raises(ValueError, match=r"held tokens|keys and values"):
            other.put(0, tokens, data, count)
    ring = runner("ring").slots(1)
    read(ring, 0, ids_of("ring", 2 * GRAIN))
    piece = ring._stores.take(0, 2 * GRAIN)
    assert isinstance(piece, np.ndarray)
    with pytest.raises(ValueError, match="held tokens"):
        runner("ring").program.stores(1, 300).put(0, GRAIN, piece, 2 * GRAIN)
