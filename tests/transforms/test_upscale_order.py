"""Orders of channels: as good as the best of all permutations, and never a copy for two readers."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.transforms.upscale_order import EXACT, LEFT, RIGHT, Reader, Wish, arrange

ENDS = st.sampled_from([None, None, LEFT, RIGHT])


def satisfied(order: tuple[int, ...], wish: Wish) -> bool:
    at = [place for place, item in enumerate(order) if item in wish.items]
    if at[-1] - at[0] + 1 != len(at):
        return False
    return {LEFT: at[0] == 0, RIGHT: at[-1] == len(order) - 1, None: True}[wish.end]


def spared(orders: list[tuple[int, ...]], readers: list[Reader]) -> int:
    return sum(reader.cost for reader in readers if all(satisfied(orders[w.block], w) for w in reader.wishes))


@st.composite
def cases(draw: st.DrawFn, blocks: int = 1) -> tuple[list[list[int]], list[Reader]]:
    sizes = [draw(st.integers(1, 5 if blocks == 1 else 3)) for _ in range(blocks)]
    rows = [[10 * block + item for item in range(size)] for block, size in enumerate(sizes)]
    readers = []
    for _ in range(draw(st.integers(1, 5))):
        chosen = draw(st.sets(st.sampled_from(range(blocks)), min_size=1))
        wishes = tuple(
            Wish(block, draw(st.frozensets(st.sampled_from(rows[block]), min_size=1)), draw(ENDS)) for block in chosen
        )
        readers.append(Reader(wishes, draw(st.integers(1, 9))))
    return rows, readers


@given(cases())
@settings(max_examples=80)
def test_no_order_spares_more(case: tuple[list[list[int]], list[Reader]]) -> None:
    rows, readers = case
    orders = arrange(rows, readers)
    assert sorted(orders[0]) == rows[0]
    assert spared(orders, readers) == max(spared([order], readers) for order in permutations(rows[0]))


@given(cases(blocks=2))
@settings(max_examples=40)
def test_no_orders_of_two_blocks_spare_more(case: tuple[list[list[int]], list[Reader]]) -> None:
    rows, readers = case
    orders = arrange(rows, readers)
    assert [sorted(order) for order in orders] == rows
    best = max(spared([one, two], readers) for one in permutations(rows[0]) for two in permutations(rows[1]))
    assert spared(orders, readers) == best


@given(st.integers(1, 200), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_two_readers_never_copy(size: int, chance: object) -> None:
    sample, randint = chance.sample, chance.randint  # type: ignore[attr-defined]
    readers = [Reader((Wish(0, frozenset(sample(range(size), randint(1, size)))),), 1) for _ in range(2)]
    assert spared(arrange([range(size)], readers), readers) == 2


def test_nested_sets_and_chains_never_copy() -> None:
    nested = [Reader((Wish(0, frozenset(range(0, 12, 12 // n))),), n) for n in (1, 2, 4, 12)]
    chain = [Reader((Wish(0, frozenset({3 * k % 13, 3 * (k + 1) % 13})),), 1) for k in range(11)]
    for readers in (nested, chain):
        assert spared(arrange([range(13)], readers), readers) == sum(reader.cost for reader in readers)


def test_many_readers_are_no_trouble() -> None:
    sets = [frozenset((7 * k + 3 * i) % 64 for i in range(30)) for k in range(EXACT + 20)]
    readers = [Reader((Wish(0, part),), len(part)) for part in sets]
    (order,) = arrange([range(64)], readers)
    assert sorted(order) == list(range(64)) and spared([order], readers) >= 2 * max(map(len, sets))


def test_what_nobody_wants_stays() -> None:
    assert arrange([[3, 1, 2], [5, 4]], [Reader((Wish(1, frozenset({4})),), 1)])[0] == (3, 1, 2)
