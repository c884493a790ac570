"""Prompts that begin alike are read once: keys and values of earlier prompts, kept up to a number of bytes.

What is kept always comes from reading a prompt, never from writing an answer, and the runner promises that reading gives the
same bytes however a prompt is cut. So an answer is the same, bit for bit, whether or not something was found here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchard.core.errors import UsageError
from orchard.generate.prefix_file import Names, read, write
from orchard.generate.prefix_tree import GRAIN, Node, Tree
from orchard.generate.protocol import Held, Use

LIMIT = 256 << 20

__all__ = ["GRAIN", "LIMIT", "Prefixes"]


class Prefixes:
    """Safe to share between threads. Beginnings that prompts share are there once; what was used longest ago goes first, from
    the ends. Somebody who is using what goes keeps it until done.

    A variant is another set of weights over the same base (an adapter): what it read is of no use to others.
    """

    def __init__(self, runner: Any = None, limit: int = LIMIT) -> None:
        """`limit`: bytes that may be kept, bookkeeping included; 0 keeps nothing. `runner`: whose keys and values they are, for
        files; one that holds nothing has no `signature`."""
        if limit < 0:
            raise UsageError(f"room for {limit} bytes", hint="use 0 to keep nothing")
        self.limit = limit
        self._runner = runner
        self._tree = Tree(limit)
        self._owners: dict[str, weakref.ref[Any]] = {}  # who read what is kept of a variant
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:  # whoever adds may be above the limit until something else has gone
            return self._tree.nbytes

    def __len__(self) -> int:
        """Pieces: a block of GRAIN tokens is one, and so is what can only be used whole."""
        return len(self._tree.recent)

    def find(self, ids: Sequence[int], variant: str | None = None) -> Use | None:
        """The longest usable beginning of a prompt. At least one token is left to read: its scores are wanted."""
        with self._lock:
            nodes, tokens = self._known(ids[: max(0, len(ids) - 1)], variant)
            self._tree.used(nodes)
            data = tuple(node.data for node in nodes if node.data is not None)
            whole = bool(nodes) and nodes[0].whole
        return Use(Held(tuple(ids[:tokens]), data[0] if whole else data, whole), tokens) if tokens else None

    def worth(self, ids: Sequence[int], found: Use | None, variant: str | None = None) -> int:
        """How many tokens of a prompt that was read are worth keeping; 0: none, or no more than there already are."""
        tokens = len(ids) // GRAIN * GRAIN
        if not self.limit or tokens <= (found.tokens if found is not None else 0):
            return 0
        with self._lock:
            return tokens if self._known(ids, variant)[1] < tokens else 0

    def add(self, held: Held, variant: str | None = None) -> None:
        """Keep what a runner held, but for blocks that are here already."""
        blocks, rest = divmod(len(held.ids), GRAIN)
        arrays = (held.data,) if isinstance(held.data, np.ndarray) else held.data
        whole = held.whole or (isinstance(held.data, np.ndarray) and len(held.ids) > GRAIN)
        if any(array.dtype != np.uint8 or array.ndim != 1 for array in arrays):
            raise ValueError("keys and values are kept as rows of bytes")
        if len(arrays) != (1 if whole else blocks + bool(rest)):
            raise ValueError(f"{len(arrays)} arrays of keys and values for {len(held.ids)} tokens")
        if not blocks or not self.limit or (whole and rest):  # the last: never found, as prompts are followed by blocks
            return
        kept = [*[None] * (blocks - 1), *arrays] if whole else arrays[:blocks]
        with self._lock:
            self._follow(variant)
            self._tree.add(held.ids, variant, kept, whole)

    def drop(self, variant: str | None) -> None:
        """Forget all that a variant read."""
        with self._lock:
            self._tree.drop(variant)

    def clear(self) -> None:
        with self._lock:
            self._tree = Tree(self.limit)

    # Files ----------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, ids: Sequence[int], variant: str | None = None) -> int:
        """Write what is kept of this prompt's beginning, whole or not at all. Answers how many tokens that is; 0: no file."""
        names = self._signed([variant])
        with self._lock:
            nodes, tokens = self._known(ids, variant)
            entries = self._tree.entries(nodes, [name for name, _ in names])
        if entries:
            write(Path(path), entries, names)
        return tokens if entries else 0

    def load(self, path: str | Path) -> int:
        """Take up what `save` wrote; answers the tokens of the longest beginning. A file for another model, or a damaged one,
        raises `BadFile`."""
        return self._read(path)[0]

    def save_all(self, path: str | Path) -> int:
        """Write all that is kept, whole or not at all; answers how many pieces (see `len`). 0: no file. Left out is what
        belongs to variants that the runner no longer has."""
        with self._lock:
            variants = list(self._tree.roots)
        names = self._signed(variants)
        with self._lock:
            entries = self._tree.entries(reversed(self._tree.recent), [name for name, _ in names])
        if entries:
            write(Path(path), entries, names)
        return sum(entry.data is not None for entry in entries)

    def load_all(self, path: str | Path) -> int:
        """Take up what `save_all` wrote, as far as it was used last and there is room, and as far as its variants are here
        with the same weights; answers how many pieces. Raises as `load`."""
        return self._read(path)[1]

    def _read(self, path: str | Path) -> tuple[int, int]:
        """Tokens of the longest beginning, and pieces."""
        taken = read(Path(path), self.limit, self._signature, self._fits)
        with self._lock:
            for variant in taken.variants:
                self._follow(variant)
            self._tree.graft(taken.entries, taken.variants)
        return taken.longest, sum(entry.data is not None for entry in taken.entries)

    def _known(self, ids: Sequence[int], variant: str | None) -> tuple[list[Node], int]:
        """What there is of the beginning of some tokens, and how many it is for. With the lock held."""
        self._follow(variant)
        path = self._tree.path(ids, variant)
        nodes = self._tree.usable(path)
        return nodes, GRAIN * (path.index(nodes[-1]) + 1) if nodes else 0

    def _follow(self, variant: str | None) -> None:
        """Forget what a variant read when its name has gone to another one. With the lock held."""
        owner = self._owner(variant) if variant is not None else None
        if variant is None or owner is None:
            return
        before = self._owners.get(variant)
        if before is None or before() is not owner:
            if before is not None:
                self._tree.drop(variant)
            self._owners[variant] = weakref.ref(owner)

    def _signed(self, variants: Sequence[str | None]) -> Names:
        """Those variants that the runner has, and their signatures."""
        return [(name, signature) for name in variants if (signature := self._signature(name)) is not None]

    def _owner(self, variant: str | None) -> Any:
        return self._runner if variant is None else getattr(self._runner, "variants", {}).get(variant)

    def _signature(self, variant: str | None) -> str | None:
        return getattr(self._owner(variant), "signature", None)

    def _fits(self, variant: str | None, ids: tuple[int, ...], data: np.ndarray, whole: bool) -> bool:
        return bool(self._owner(variant).fits(Held(ids, data if whole else (data,), whole)))
