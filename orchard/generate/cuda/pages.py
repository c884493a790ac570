"""Which page holds which part of which sequence: memory is taken for whole sequences, and beginnings can be shared.

A page belongs to as many sequences as have it in their table. Before a page that others have too is written to, its owner gets
a copy of its own. Page 0 belongs to nobody: rows that only fill a batch are written there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orchard.core.errors import UsageError
from orchard.ops.kernels.triton.rows import PAGE, Pages, make_pages, page_bytes
from orchard.ops.plan.steps import StoreSpec


class PagedStores:
    """Pages of all layers for up to `count` sequences of up to `context` tokens; `pages` of them, page 0 among them."""

    def __init__(self, specs: Sequence[StoreSpec], count: int, context: int, pages: int, device: torch.device) -> None:
        self.count = count
        width = -(-context // PAGE)
        self.table = torch.zeros(count + 1, width, dtype=torch.int32, device=device)
        """The last line is that of rows that only fill a batch."""
        self.layers: list[Pages] = [make_pages(spec, pages, self.table) for spec in specs]
        self.bytes_per_page = sum(page_bytes(spec) for spec in specs)
        self._owned: list[list[int]] = [[] for _ in range(count)]
        self._free = list(range(pages - 1, 0, -1))
        self._owners = [0] * pages
        self.shared = 0
        """How often a page belongs to one sequence more than to its first."""

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody has."""
        return len(self._owners) - 1 - len(self._free)

    def open(self, slot: int, length: int) -> None:
        """Pages for a sequence of so many tokens; nothing is taken where there are not enough."""
        need = -(-length // PAGE)
        if need > self.table.shape[1] or need > len(self._free):
            raise UsageError(
                f"no memory for a sequence of {length:,} tokens: {need:,} pages are needed and {len(self._free):,} free",
                hint="ask for fewer tokens (max_tokens) or fewer requests at once",
            )
        self._owned[slot] = [self._take() for _ in range(need)]
        self._tell(slot)

    def share(self, source: int, target: int, tokens: int) -> None:
        """The first tokens of one sequence for another as well: whole pages are shared, the rest of one is copied."""
        whole, rest = divmod(tokens, PAGE)
        theirs, mine = self._owned[source], self._owned[target]
        for place in range(whole):
            self._drop(mine[place])
            mine[place] = theirs[place]
            self._owners[theirs[place]] += 1
            self.shared += 1
        if rest:
            self._copy(theirs[whole], mine[whole])
        self._tell(target)

    def own(self, slot: int, start: int, stop: int) -> None:
        """Make sure that nobody else sees what is about to be written to tokens start … stop - 1."""
        mine, changed = self._owned[slot], False
        for place in range(start // PAGE, -(-stop // PAGE)):
            page = mine[place]
            if self._owners[page] == 1:
                continue
            if not self._free:
                raise UsageError("no memory for a page of its own", hint="ask for fewer requests at once")
            mine[place] = self._take()
            self._copy(page, mine[place])
            self._drop(page)
            changed = True
        if changed:
            self._tell(slot)

    def close(self, slot: int) -> None:
        for page in self._owned[slot]:
            self._drop(page)
        self._owned[slot] = []

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._owners[page] -= 1
        if self._owners[page]:
            self.shared -= 1
        else:
            self._free.append(page)

    def _copy(self, page: int, to: int) -> None:
        for layer in self.layers:
            for kept in (layer.k, layer.v, layer.k_scale, layer.v_scale):
                if kept is not None:
                    kept[to] = kept[page]

    def _tell(self, slot: int) -> None:
        """The table on the device gets the slot's line."""
        pages = torch.tensor(self._owned[slot], dtype=torch.int32)
        self.table[slot, : len(pages)] = pages.to(self.table.device)
