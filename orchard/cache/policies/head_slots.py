"""Slots that differ from head to head, because each head keeps the tokens that matter to it.

The tokens of a head stand in order, without gaps, from its first slot on. `HeadSlots` gives every head the same number of slots.
`FlatSlots` shares one pool among the heads of a layer: a head may hold more than another, all together no more than before.

Shapes: B sequences, H key/value heads, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orchard.cache.policies.base import Placement, Policy, Slots, spread
from orchard.core.errors import UsageError

NEVER = torch.iinfo(torch.long).max
Move = Callable[[Tensor], Tensor]
"""How the rectangle of what is held, a part [B, H, S, …], becomes the tensor of a store."""


class HeadSlots(Slots):
    """`positions` is [B, H, capacity + 1]. What a policy remembers of the tokens between two times of forgetting is kept here."""

    def __init__(self, policy: Policy, batch: int, heads: int, length: int, device: torch.device | None) -> None:
        super().__init__(policy, batch, length, device)
        self.heads = heads
        self.positions = self.positions.repeat(1, heads, 1)
        self.bound = 0
        """No sequence holds more tokens per head than this: known without looking at tensors."""
        self.longest = 0
        """Nor does a single head hold more than this."""
        self.peak = 0
        self.scores: Tensor | None = None
        """[B, H, S] of the first S slots, where something has looked at them."""
        self.queries: list[list[Any]] = []
        """By step: who looked last."""

    def fits(self, positions: Tensor) -> bool:
        """Whether the new tokens [B, T] find room. Asks the tensors only when the bound says no."""
        if self.bound + positions.shape[1] <= self.capacity:
            return True
        new = positions >= 0
        first = torch.where(new, positions, NEVER).amin(1)
        held = self._counts(first) + new.sum(-1)
        if int(held.max()) > self.capacity:
            return False
        self.bound = int(held.max()) - positions.shape[1]  # padding takes no room
        return True

    def place(self, positions: Tensor, upto: int | None) -> Placement:
        self.check_limit(positions)
        if not torch.compiler.is_compiling():
            self._admit(positions)
        new = positions[:, None, :]
        first = torch.where(new >= 0, new, NEVER).amin(2, keepdim=True)
        stays = (self.positions >= 0) & (self.positions < first)
        stays[:, :, self.width :] = False
        self.positions.masked_fill_(~stays, -1)  # a position that is sent again replaces what it was, and all after it
        count = stays.sum(-1, keepdim=True)
        index = torch.where(new >= 0, count + (new >= 0).cumsum(-1) - 1, self.width).clamp(max=self.width)
        self.positions.scatter_(2, index, new.expand(-1, self.heads, -1))
        upto = self.reach(upto)
        seen = self.positions[:, :, :upto]
        return Placement(
            index=self._cells(index, count, new), positions=seen, valid=seen >= 0, upto=upto, with_new=False
        )

    def fill(self, positions: Tensor, capacity: int) -> Move:
        """Hold just these [B, H, S] (-1: fewer), in as many slots as are said; how parts follow."""
        batch, heads, count = positions.shape
        self.capacity = capacity
        self.limit = None
        self.positions = torch.full((batch, heads, capacity + 1), -1, dtype=torch.long, device=positions.device)
        self.positions[:, :, :count] = positions
        self.bound = self.longest = int((positions >= 0).sum(-1).amax())
        self.scores, self.queries = None, []
        return lambda part: _padded(part, capacity + 1)

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.scores = None if self.scores is None else self.scores.index_select(0, rows)
        self.queries = [[seen.keep(rows) for seen in step] for step in self.queries]

    def reach(self, upto: int | None) -> int:
        upto = self.width if upto is None else min(upto, self.width)
        return upto if torch.compiler.is_compiling() else min(upto, self.longest)

    @property
    def width(self) -> int:
        """Slots of the longest head."""
        return self.positions.shape[2] - 1

    # Inside -----------------------------------------------------------------------------------------------------------

    def _admit(self, positions: Tensor) -> None:
        if not self.fits(positions):
            raise UsageError(
                f"{positions.shape[1]} tokens do not fit beside {self.used} in {self.capacity} slots",
                hint="read in smaller blocks, and evict in between",
            )
        self.bound += positions.shape[1]
        self.longest = min(self.longest + positions.shape[1], self.width)
        self.peak = max(self.peak, self.bound)
        assert self.bound <= self.capacity

    def _counts(self, first: Tensor) -> Tensor:
        """Tokens per head [B] before position `first` [B]."""
        held = self.positions[:, :, : self.width]
        return ((held >= 0) & (held < first[:, None, None])).sum(-1).amax(-1)

    def _cells(self, index: Tensor, count: Tensor, new: Tensor) -> Tensor:
        return index


class FlatSlots(HeadSlots):
    """`cells` [B, H, S] says where in the pool of its layer a slot is. A pool is the tensor [B, H, capacity + 1, …] of a store
    without its last column, row after row; the tokens of a step lie side by side in it, head after head."""

    def __init__(self, policy: Policy, batch: int, heads: int, length: int, device: torch.device | None) -> None:
        super().__init__(policy, batch, heads, length, device)
        self.cells = torch.zeros_like(self.positions)  # an empty slot shows any cell but a bin

    def shown(self, part: Tensor, upto: int) -> Tensor:
        cells = self.cells[:, :, :upto]
        pool = part.flatten(1, 2)[:, None]
        return pool.gather(2, spread(cells.flatten(1, 2)[:, None], pool)).reshape(*cells.shape, *part.shape[3:])

    def write(self, part: Tensor, new: Tensor, placement: Placement) -> None:
        pool = part.view(part.shape[0], 1, -1, *part.shape[3:])
        cells = placement.index.flatten(1, 2)[:, None]
        pool.scatter_(2, spread(cells, pool), new.flatten(1, 2)[:, None].to(part.dtype))

    def fill(self, positions: Tensor, capacity: int) -> Move:
        batch, heads, _ = positions.shape
        held = positions >= 0
        counts = held.sum(-1)
        total = int(counts.sum(-1).amax())
        width = int(counts.amax()) + capacity - total // heads
        super().fill(positions, width)
        self.capacity, self.bound = capacity, -(-total // heads)
        order = held.flatten(1, 2).cumsum(-1).unflatten(1, (heads, -1)) - 1
        cells = torch.where(held, self._cell(order), capacity)
        self.cells = torch.zeros_like(self.positions)
        self.cells[:, :, : positions.shape[2]] = torch.where(held, cells, 0)

        def move(part: Tensor) -> Tensor:
            made = part.new_zeros((batch, heads, capacity + 1, *part.shape[3:]))
            pool = made.view(batch, 1, -1, *part.shape[3:])
            pool.scatter_(2, spread(cells.flatten(1, 2)[:, None], pool), part.flatten(1, 2)[:, None])
            return made

        return move

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.cells = self.cells.index_select(0, rows)

    @property
    def used(self) -> int:
        """Of a sequence that holds the most, on average over its heads."""
        held = (self.positions[:, :, : self.width] >= 0).sum((1, 2))
        return -(-int(held.amax()) // self.heads)

    def _counts(self, first: Tensor) -> Tensor:
        held = self.positions[:, :, : self.width]
        total = ((held >= 0) & (held < first[:, None, None])).sum((1, 2))
        return (total + self.heads - 1) // self.heads

    def _cell(self, order: Tensor) -> Tensor:
        """Where the n-th token of a pool lies."""
        return order // self.capacity * (self.capacity + 1) + order % self.capacity

    def _cells(self, index: Tensor, count: Tensor, new: Tensor) -> Tensor:
        """Cells of a step's tokens [B, H, T]: they come after all that is held, one token of every head after another."""
        head = torch.arange(self.heads, device=index.device)[None, :, None]
        order = count.sum(1, keepdim=True) + ((new >= 0).cumsum(-1) - 1) * self.heads + head
        last = self.heads * self.capacity - 1
        cells = torch.where(index < self.width, self._cell(order.clamp(0, last)), self.capacity)
        self.cells.scatter_(2, index, cells)
        return cells


def _padded(part: Tensor, slots: int) -> Tensor:
    made = part.new_zeros((*part.shape[:2], slots, *part.shape[3:]))
    made[:, :, : part.shape[2]] = part
    return made
