"""A tree of token blocks: prompts that begin alike share a path from the root, and each block's bytes are there once.

An edge is GRAIN tokens, so following a prompt costs one look-up per block, however many prompts are kept. A block is of use
only together with those before it. Whoever uses a block uses them too, and is noted from the deepest up, so a block is always
older than the one before it: what was used longest ago is always the end of a path. Keys and values of rings cannot be cut
into blocks. They lie in one piece at the end of their path, are of use for exactly its length, and grow old each by itself.
"""

from __future__ import annotations

import struct
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

GRAIN = 64
"""Beginnings are used up to a multiple of this many tokens."""
KEEPING = 1280
"""Bytes of bookkeeping of a node, besides its keys and values: ids, tables, objects. Rather more than less."""


class Node:
    """The tokens of one block after those of its parent; `data` is None where the path only leads on."""

    __slots__ = ("__weakref__", "_parent", "children", "data", "key", "whole")

    def __init__(self, parent: Node | None, key: bytes) -> None:
        self._parent = weakref.ref(parent) if parent is not None else None  # no circles: a tree's memory goes at once
        self.key = key
        self.children: dict[bytes, Node] = {}
        self.data: np.ndarray | None = None
        self.whole = False

    @property
    def parent(self) -> Node | None:
        return self._parent() if self._parent is not None else None


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A node on its way to a file or from one. Parents come before their children."""

    parent: int
    """The place of its parent's entry; -1 - v: it is a first block of variant v."""
    key: bytes
    data: np.ndarray | None
    whole: bool


class Tree:
    """Not for several threads at once: `prefix.Prefixes` sees to that."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        """All bytes of keys and values, and of bookkeeping."""
        self.roots: dict[str | None, Node] = {}
        self.recent: OrderedDict[Node, None] = OrderedDict()
        """Nodes that have data, used last at the end."""

    def child(self, node: Node, key: bytes) -> Node | None:
        return node.children.get(key)

    def path(self, ids: Sequence[int], variant: str | None) -> list[Node]:
        """The nodes that a prompt leads to, as far as it is known."""
        found: list[Node] = []
        node = self.roots.get(variant)
        for key in keys_of(ids) if node is not None else ():
            node = self.child(node, key) if node is not None else None
            if node is None:
                break
            found.append(node)
        return found

    def usable(self, path: Sequence[Node]) -> list[Node]:
        """The longest beginning of a path that can be used: its blocks, or the one node whose data are for all of it."""
        blocks = 0
        while blocks < len(path) and path[blocks].data is not None and not path[blocks].whole:
            blocks += 1
        for depth in range(len(path), blocks, -1):
            if path[depth - 1].whole:
                return [path[depth - 1]]
        return list(path[:blocks])

    def used(self, nodes: Sequence[Node]) -> None:
        """Nodes with data, parents before their children, have been of use."""
        for node in reversed(nodes):
            self.recent.move_to_end(node)

    def add(self, ids: Sequence[int], variant: str | None, data: Sequence[np.ndarray | None], whole: bool) -> None:
        """Keep what is given for each block; None: nothing for this one. What is there already stays."""
        node, nodes = self._root(variant), []
        for key, block in zip(keys_of(ids), data, strict=True):
            node = self._grow(node, key)
            if block is not None and self._fill(node, block, whole):
                nodes.append(node)
        self.used(nodes)
        self._shrink()

    def graft(self, entries: Sequence[Entry], variants: Sequence[str | None]) -> None:
        """Take up a part of another tree; its first entries count as used last."""
        nodes: list[Node] = []
        filled: list[Node] = []
        for entry in entries:
            parent = nodes[entry.parent] if entry.parent >= 0 else self._root(variants[-1 - entry.parent])
            nodes.append(self._grow(parent, entry.key))
            if entry.data is not None and self._fill(nodes[-1], entry.data, entry.whole):
                filled.append(nodes[-1])
        self.used(filled)
        for node in nodes:
            self._prune(node)  # where a part ends before the data that it leads to
        self._shrink()

    def entries(self, nodes: Iterable[Node], variants: Sequence[str | None]) -> list[Entry]:
        """These nodes, where they are of these variants, and those before them."""
        places = {self.roots[name]: -1 - v for v, name in enumerate(variants) if name in self.roots}
        entries: list[Entry] = []
        for node in nodes:
            chain = list(takewhile(lambda one: one not in places, _upwards(node)))
            if chain and chain[-1].parent is None:
                continue  # the root of another variant
            for one in reversed(chain):
                assert one.parent is not None
                entries.append(Entry(places[one.parent], one.key, one.data, one.whole))
                places[one] = len(entries) - 1
        return entries

    def drop(self, variant: str | None) -> None:
        waiting = [self.roots[variant]] if variant in self.roots else []
        for node in waiting:  # grows on the way
            waiting += node.children.values()
        for node in reversed(waiting):
            if node.data is not None:
                self._empty(node)

    def _root(self, variant: str | None) -> Node:
        if variant not in self.roots:
            self.roots[variant] = Node(None, b"")
            self.nbytes += KEEPING
        return self.roots[variant]

    def _grow(self, parent: Node, key: bytes) -> Node:
        node = self.child(parent, key)
        if node is None:
            node = parent.children[key] = Node(parent, key)
            self.nbytes += KEEPING
        return node

    def _fill(self, node: Node, data: np.ndarray, whole: bool) -> bool:
        """Give a node its data, unless it has them; False: it has a block, which can do more than a piece for one length."""
        if node.data is not None and (whole or not node.whole):
            return node.whole == whole
        if node.data is not None:
            self.nbytes -= node.data.nbytes
        # A view would keep alive more than is counted, and nobody may change what others share.
        node.data, node.whole = data if data.base is None else data.copy(), whole
        node.data.flags.writeable = False
        self.nbytes += node.data.nbytes
        self.recent[node] = None
        return True

    def _empty(self, node: Node) -> None:
        """Forget a node's data, and the way to it where it leads nowhere else."""
        assert node.data is not None
        self.nbytes -= node.data.nbytes
        node.data, node.whole = None, False
        del self.recent[node]
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Take away a node that holds nothing and leads nowhere, and so on upwards."""
        while node.data is None and not node.children:
            parent = node.parent
            if parent is None:
                self.roots = {name: root for name, root in self.roots.items() if root is not node}
            elif parent.children.get(node.key) is not node:
                return  # gone already
            else:
                del parent.children[node.key]
            self.nbytes -= KEEPING
            if parent is None:
                return
            node = parent

    def _shrink(self) -> None:
        while self.nbytes > self.limit and self.recent:
            self._empty(next(iter(self.recent)))


def keys_of(ids: Sequence[int]) -> Iterator[bytes]:
    """The whole blocks of some tokens, each as bytes: as they are in files, and a fifth of the memory of a tuple."""
    width, count = 8 * GRAIN, len(ids) // GRAIN * GRAIN
    try:
        raw = struct.pack(f"<{count}q", *ids[:count])
    except struct.error:  # numbers that no vocabulary reaches: nothing is known of them
        return iter(())
    return (raw[at : at + width] for at in range(0, len(raw), width))


def _upwards(node: Node) -> Iterator[Node]:
    at: Node | None = node
    while at is not None:
        yield at
        at = at.parent
