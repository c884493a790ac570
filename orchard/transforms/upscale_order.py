"""An order of channels in which as many readers as possible read one run of them, which is a view and no copy.

A reader wants a set of channels of a block next to each other, sometimes at one end of it. Whether some sets can all be runs
of one order is the consecutive-ones problem. A PQ-tree (Booth and Lueker, 1976) holds all orders in which the sets so far are
runs: the children of a P node may stand in any order, those of a Q node in theirs or the reverse. Adding a set gives a smaller
tree, or shows that there is no such order. Two sets always fit: the first's own, the shared, the second's own.

Which sets to give up where not all fit is found by trying (`EXACT` readers at most), so that the fewest channels are copied; with
more readers, by taking large sets first. UPSCALE (arXiv 2307.08771) looks for heavy paths of overlapping sets instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXACT = 12
"""Readers of one part of a net for which the best choice is searched for."""
LEFT, RIGHT = -1, -2
"""The two ends of a block."""
Tree = int | tuple[str, tuple["Tree", ...]]
"""A leaf, or P or Q with children."""


@dataclass(frozen=True)
class Wish:
    """What a reader wants of one block: these items in one run, at an end of it if `end` says which."""

    block: int
    items: frozenset[int]
    end: int | None = None

    @property
    def leaves(self) -> frozenset[int]:
        return self.items if self.end is None else self.items | {self.end}


@dataclass(frozen=True)
class Reader:
    """All that has to hold for a reader to need no copy, and what a copy would cost."""

    wishes: tuple[Wish, ...]
    cost: int


def arrange(blocks: Sequence[Sequence[int]], readers: Sequence[Reader]) -> list[tuple[int, ...]]:
    """An order for each block that spares the most copies. What nobody wishes anything of stays as it is."""
    orders = [tuple(block) for block in blocks]
    for members in _connected(readers):
        mine = [readers[place] for place in members]
        cells = _Cells([wish for reader in mine for wish in reader.wishes], blocks)
        best = cells.best(mine)
        for block, tree in best.items():
            orders[block] = cells.order(block, tree)
    return orders


class _Cells:
    """Trees over cells: items of a block that exactly the same wishes are for never need to be told apart."""

    def __init__(self, wishes: Sequence[Wish], blocks: Sequence[Sequence[int]]) -> None:
        self.items: dict[int, list[tuple[int, ...]]] = {}
        self.cell_of: dict[tuple[int, int], int] = {}
        for number in sorted({wish.block for wish in wishes}):
            here = [wish for wish in wishes if wish.block == number]
            cells: dict[tuple[bool, ...], list[int]] = {}
            for item in blocks[number]:
                cells.setdefault(tuple(item in wish.items for wish in here), []).append(item)
            self.items[number] = [tuple(cell) for cell in cells.values()]
            for place, cell in enumerate(self.items[number]):
                self.cell_of |= {(number, item): place for item in cell}

    def leaves(self, wish: Wish) -> frozenset[int]:
        ends = frozenset() if wish.end is None else frozenset({wish.end})
        return frozenset(self.cell_of[wish.block, item] for item in wish.items) | ends

    def best(self, readers: Sequence[Reader]) -> dict[int, Tree]:
        """Trees by block that satisfy the readers worth most together."""
        order = sorted(readers, key=lambda reader: -reader.cost)
        wanted = [[(wish.block, self.leaves(wish)) for wish in reader.wishes] for reader in order]
        costs = [reader.cost for reader in order]
        trees: dict[int, Tree] = {
            block: ("Q", (LEFT, _node("P", tuple(range(len(cells)))), RIGHT)) for block, cells in self.items.items()
        }
        found: tuple[int, dict[int, Tree]] = (-1, trees)

        def search(place: int, spared: int, trees: dict[int, Tree]) -> None:
            nonlocal found
            if spared > found[0]:
                found = (spared, trees)
            if place == len(order) or spared + sum(costs[place:]) <= found[0]:
                return
            fitted = _with(trees, wanted[place])
            if fitted is not None:
                search(place + 1, spared + costs[place], fitted)
            if fitted is None or len(order) <= EXACT:
                search(place + 1, spared, trees)

        search(0, 0, trees)
        return found[1]

    def order(self, block: int, tree: Tree) -> tuple[int, ...]:
        cells = _frontier(tree)
        if cells[0] == RIGHT:
            cells = cells[::-1]
        return tuple(item for cell in cells[1:-1] for item in self.items[block][cell])


def _connected(readers: Sequence[Reader]) -> list[list[int]]:
    """Readers that wish something of the same blocks, directly or through others."""
    groups: list[tuple[set[int], list[int]]] = []
    for place, reader in enumerate(readers):
        blocks, members = {wish.block for wish in reader.wishes}, [place]
        apart = []
        for theirs, others in groups:
            if theirs & blocks:
                blocks, members = blocks | theirs, others + members
            else:
                apart.append((theirs, others))
        groups = [*apart, (blocks, members)] if blocks else groups
    return [members for _, members in groups]


def _with(trees: dict[int, Tree], wanted: Sequence[tuple[int, frozenset[int]]]) -> dict[int, Tree] | None:
    trees = dict(trees)
    for block, leaves in wanted:
        tree = reduced(trees[block], leaves)
        if tree is None:
            return None
        trees[block] = tree
    return trees


# The tree -------------------------------------------------------------------------------------------------------------


def reduced(tree: Tree, leaves: frozenset[int]) -> Tree | None:
    """The orders of a tree in which these leaves are next to each other; None where there is none. All leaves are in the tree."""
    if isinstance(tree, int) or _fill(tree, leaves) != 0.5:
        return tree
    kind, children = tree
    fills = [_fill(child, leaves) for child in children]
    touched = [place for place, fill in enumerate(fills) if fill]
    if len(touched) == 1:
        inner = reduced(children[touched[0]], leaves)
        if inner is None:
            return None
        return kind, (*children[: touched[0]], inner, *children[touched[0] + 1 :])
    if kind == "P":
        return _reduced_any(children, fills, leaves)
    first, last = touched[0], touched[-1]
    if any(fill != 1 for fill in fills[first + 1 : last]):
        return None
    left, right = _full_last(children[first], leaves), _full_last(children[last], leaves)
    if left is None or right is None:
        return None
    return "Q", (*children[:first], *left, *children[first + 1 : last], *right[::-1], *children[last + 1 :])


def _reduced_any(children: tuple[Tree, ...], fills: list[float], leaves: frozenset[int]) -> Tree | None:
    empty, full, partial = (
        tuple(child for child, fill in zip(children, fills, strict=True) if fill == wanted) for wanted in (0, 1, 0.5)
    )
    if len(partial) > 2:
        return None
    sides = [_full_last(child, leaves) for child in partial]
    if any(side is None for side in sides):
        return None
    left = sides[0] if sides else ()
    right = sides[1] if len(sides) == 2 else ()
    middle = (_node("P", full),) if full else ()
    assert left is not None and right is not None
    run = (*left, *middle, *right[::-1])
    return _node("P", (*empty, _node("Q", run) if len(run) > 1 else run[0]))


def _full_last(tree: Tree, leaves: frozenset[int]) -> tuple[Tree, ...] | None:
    """A tree as a row of trees with all that is in `leaves` at its end; None where it cannot be."""
    if isinstance(tree, int) or _fill(tree, leaves) != 0.5:
        return (tree,)
    kind, children = tree
    fills = [_fill(child, leaves) for child in children]
    if kind == "P":
        parts = {
            wanted: tuple(c for c, f in zip(children, fills, strict=True) if f == wanted) for wanted in (0, 1, 0.5)
        }
        children = (
            *((_node("P", parts[0]),) if parts[0] else ()),
            *parts[0.5],
            *((_node("P", parts[1]),) if parts[1] else ()),
        )
        fills = [_fill(child, leaves) for child in children]
    elif fills[0] > fills[-1]:
        children, fills = children[::-1], fills[::-1]
    if fills != sorted(fills) or fills.count(0.5) > 1:
        return None
    row: list[Tree] = []
    for child in children:
        inner = _full_last(child, leaves)
        if inner is None:
            return None
        row += inner
    return tuple(row)


def _fill(tree: Tree, leaves: frozenset[int]) -> float:
    """1: all of it is in `leaves`; 0: none; else a half."""
    if isinstance(tree, int):
        return 1 if tree in leaves else 0
    fills = {_fill(child, leaves) for child in tree[1]}
    return fills.pop() if len(fills) == 1 else 0.5


def _node(kind: str, children: tuple[Tree, ...]) -> Tree:
    """A node; of one child, the child."""
    return children[0] if len(children) == 1 else (kind, children)


def _frontier(tree: Tree) -> tuple[int, ...]:
    return (tree,) if isinstance(tree, int) else tuple(leaf for child in tree[1] for leaf in _frontier(child))
