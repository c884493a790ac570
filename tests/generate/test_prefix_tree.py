"""The tree of beginnings against a plain list of them, and what it costs: look-ups and bytes, counted."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.generate.prefix import GRAIN, Prefixes
from orchard.generate.prefix_tree import KEEPING, Node, Tree
from orchard.generate.protocol import Held

Ids = tuple[int, ...]
SIZE = 16
"""Bytes of a block here."""


def prompt(letters: Sequence[int], rest: int = 0) -> Ids:
    return tuple(letter for letter in letters for _ in range(GRAIN)) + (9,) * rest


def piece_of(ids: Ids, variant: str | None) -> np.ndarray:
    """What a runner gives for the last block of these tokens, or for all of them: it depends on every one."""
    return np.random.default_rng([len(variant or ""), *ids[::GRAIN]]).integers(0, 256, SIZE, np.uint8)


def held(ids: Ids, variant: str | None, whole: bool) -> Held:
    if whole:
        return Held(ids, piece_of(ids, variant), whole=True)
    return Held(ids, tuple(piece_of(ids[: at + GRAIN], variant) for at in range(0, len(ids), GRAIN)))


class Listed:
    """All pieces in one list, used last at the end: what the tree must do, in plain steps."""

    def __init__(self, limit: int, whole: bool) -> None:
        self.limit, self.whole = limit, whole
        self.pieces: list[tuple[str | None, Ids]] = []

    @property
    def nbytes(self) -> int:
        ways = {(variant, ids[:at]) for variant, ids in self.pieces for at in range(0, len(ids) + 1, GRAIN)}
        return KEEPING * len(ways) + SIZE * len(self.pieces)

    def add(self, ids: Ids, variant: str | None) -> None:
        ends = range(len(ids), 0, -len(ids) if self.whole else -GRAIN) if ids else ()
        for end in ends:
            self.pieces = [one for one in self.pieces if one != (variant, ids[:end])] + [(variant, ids[:end])]
        while self.nbytes > self.limit:
            del self.pieces[0]

    def find(self, ids: Ids, variant: str | None) -> int:
        usable = [
            len(one) for name, one in self.pieces if name == variant and len(one) < len(ids) and one == ids[: len(one)]
        ]
        if usable and self.whole:
            self.pieces.remove((variant, ids[: max(usable)]))
            self.pieces.append((variant, ids[: max(usable)]))
        elif usable:
            self.add(ids[: max(usable)], variant)
        return max(usable, default=0)

    def drop(self, variant: str | None) -> None:
        self.pieces = [one for one in self.pieces if one[0] != variant]


def nodes_of(tree: Tree) -> Iterator[Node]:
    waiting = list(tree.roots.values())
    for node in waiting:
        waiting += node.children.values()
        yield node


def sound(tree: Tree) -> None:
    """Every byte is counted, every node leads to something, and no block is without those before it."""
    nodes = list(nodes_of(tree))
    assert tree.nbytes == sum(KEEPING + (node.data.nbytes if node.data is not None else 0) for node in nodes)
    assert tree.nbytes <= tree.limit
    assert {node for node in nodes if node.data is not None} == set(tree.recent)
    for node in nodes:
        assert node.data is not None or node.children
        if node.data is not None and not node.whole and node.parent is not None and node.parent.parent is not None:
            assert node.parent.data is not None and not node.parent.whole


VARIANTS = st.sampled_from([None, "poet"])
PROMPTS = st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 2))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PROMPTS, VARIANTS),
        st.tuples(st.just("find"), PROMPTS, VARIANTS),
        st.tuples(st.just("drop"), st.just(([], 0)), VARIANTS),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(STEPS, st.integers(0, 14), st.booleans())
def test_the_tree_finds_and_forgets_what_a_list_would(
    steps: list[tuple[str, tuple[list[int], int], str | None]], pieces: int, whole: bool
) -> None:
    limit = pieces * (KEEPING + SIZE)
    kept, listed = Prefixes(limit=limit), Listed(limit, whole)
    for what, (letters, rest), variant in steps:
        ids = prompt(letters, rest)
        if what == "add":
            kept.add(held(prompt(letters), variant, whole), variant)
            listed.add(prompt(letters), variant)
        elif what == "drop":
            kept.drop(variant)
            listed.drop(variant)
        else:
            use = kept.find(ids, variant)
            tokens = listed.find(ids, variant)
            assert (use.tokens if use is not None else 0) == tokens
            if use is not None:
                wanted = held(ids[:tokens], variant, whole)
                assert use.held.ids == wanted.ids and use.held.whole == whole
                assert np.array_equal(np.array(use.held.data), np.array(wanted.data))
        assert kept.nbytes == listed.nbytes and len(kept) == len(listed.pieces)
        sound(kept._tree)


@settings(max_examples=50)
@given(st.lists(st.tuples(PROMPTS, st.booleans(), st.booleans()), max_size=25), st.integers(1, 12))
def test_blocks_and_pieces_side_by_side(steps: list[tuple[tuple[list[int], int], bool, bool]], pieces: int) -> None:
    """No runner gives both, but nothing breaks where one does."""
    kept = Prefixes(limit=pieces * (KEEPING + SIZE))
    for (letters, rest), whole, add in steps:
        if add and letters:
            kept.add(held(prompt(letters), None, whole))
        else:
            use = kept.find(prompt(letters, rest))
            if use is not None:
                wanted = held(use.held.ids, None, use.held.whole)
                assert np.array_equal(np.array(use.held.data), np.array(wanted.data))
        sound(kept._tree)


def test_looking_up_costs_one_step_a_block_however_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Prefixes()
    for number in range(300):
        kept.add(held((*prompt([1] * (number % 7)), *(number + 5,) * GRAIN), None, False))
    asked = 0
    look = Tree.child

    def counted(tree: Tree, node: Node, key: bytes) -> Node | None:
        nonlocal asked
        asked += 1
        return look(tree, node, key)

    monkeypatch.setattr(Tree, "child", counted)
    for ids, steps in (
        (prompt([1] * 6, 1), 6),
        (prompt([1] * 30, 1), 7),  # the seventh block is not known
        (prompt([2] * 30, 1), 1),
        (prompt([1, 1], 0), 1),  # a token is left to read
        ((), 0),
    ):
        asked = 0
        kept.find(ids)
        assert asked == steps


def test_memory_is_what_is_counted() -> None:
    """Bookkeeping as well: ids of many tokens, objects and tables."""
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(0, 50_000, GRAIN * blocks).tolist()) for blocks in (500, *[1] * 500)]
    data = [[np.zeros(200, np.uint8) for _ in range(len(ids) // GRAIN)] for ids in prompts]
    kept = Prefixes()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for ids, blocks in zip(prompts, data, strict=True):
            kept.add(Held(ids, tuple(block.copy() for block in blocks)))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * kept.nbytes < grown <= kept.nbytes
