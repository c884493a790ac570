"""The policy contract: a policy makes slots for a batch and says, step by step, where each new token goes.

Slots are fixed in number, so shapes never change and a step compiles. One slot past the end is a bin: padding and tokens
that are already gone are written there, and nobody reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from orchard.core.errors import ContextOverflow, UnsupportedPair


@dataclass(frozen=True)
class Placement:
    """Where one step's tokens go and what is seen after them.

    `index` [B, T] is the slot each new token is written to ([B, H, T] where heads keep different ones). When `with_new` is
    set, what is seen are the slots as they were before the step followed by all new tokens (some of which may already fall
    out again); otherwise the slots after writing. `positions` and `valid` [B, 1|H, S] describe what is seen, in that order.
    """

    index: Tensor
    positions: Tensor
    valid: Tensor
    upto: int
    with_new: bool = False
    left: Tensor | None = None
    """Which tokens are gone after the step, for whoever wants to make something of them: with `with_new` of what is seen
    [B, 1, S], otherwise of what the slots at `index` held before [B, 1, T]. None: none."""
    writes: bool = True
    """False: the new tokens look and are not kept."""


class Slots:
    """The positions held by the slots of a batch: [B, 1, capacity + 1], -1 where a slot is empty."""

    def __init__(self, policy: Policy, batch: int, length: int, device: torch.device | None) -> None:
        """`length`: no sequence will be longer."""
        self.policy = policy
        self.capacity = capacity = policy.capacity(length)
        self.limit = length if capacity < policy.capacity(length + 1) else None
        self.positions = torch.full((batch, 1, capacity + 1), -1, dtype=torch.long, device=device)

    def place(self, positions: Tensor, upto: int | None) -> Placement:
        """Give each new token (positions [B, T], -1 for padding) a slot, and remember it."""
        self.check_limit(positions)
        return self.policy.place(self, positions, self.reach(upto))

    def check_limit(self, positions: Tensor) -> None:
        # Past the end a token would fall into the bin unseen. On an accelerator the look itself would cost a wait.
        looks = self.limit is not None and positions.device.type == "cpu" and not torch.compiler.is_compiling()
        if looks and positions.numel() and (newest := int(positions.max())) >= self.limit:  # type: ignore[operator]
            raise ContextOverflow(tokens=newest + 1, limit=self.limit)  # type: ignore[arg-type]

    def reach(self, upto: int | None) -> int:
        """How many slots have to be shown, where no sequence is longer than `upto`."""
        return self.capacity if upto is None else min(upto, self.capacity)

    def look(self, positions: Tensor, upto: int | None) -> Placement:
        """Show new tokens what is held, and each other, and keep nothing of them."""
        upto = self.reach(upto)
        new, held = positions[:, None, :], self.positions[:, :, :upto]
        seen = torch.cat([held, new.expand(-1, held.shape[1], -1)], dim=2)
        index = torch.full_like(positions, self.capacity)
        return Placement(index=index, positions=seen, valid=seen >= 0, upto=upto, with_new=True, writes=False)

    def shown(self, part: Tensor, upto: int) -> Tensor:
        """The first slots of a part [B, H, slots, …] of a store, in the order of `positions`."""
        return part[:, :, :upto]

    def write(self, part: Tensor, new: Tensor, placement: Placement) -> None:
        """Write a part of the new tokens [B, H, T, …] to their slots."""
        index = placement.index if placement.index.dim() == 3 else placement.index[:, None, :]
        part.scatter_(2, spread(index, part), new.to(part.dtype))

    @property
    def used(self) -> int:
        """The most tokens that a sequence holds."""
        return int((self.positions[:, :, : self.capacity] >= 0).sum(-1).amax())

    def check_rewind(self) -> None:
        if not self.policy.can_rewind:
            name = type(self.policy).__name__
            raise UnsupportedPair(f"a store with policy {name} cannot go back", hint="use the policy KeepAll")

    def rewind(self, lengths: Tensor) -> None:
        """Forget every token at or after `lengths` [B]."""
        self.check_rewind()
        self.positions.masked_fill_(self.positions >= lengths[:, None, None], -1)

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences, in this order."""
        self.positions = self.positions.index_select(0, rows)


def spread(index: Tensor, part: Tensor) -> Tensor:
    """Slots [B, 1|H, T] as an index into a part [B, H, slots, …] along its slots."""
    return index.unflatten(2, (-1, *[1] * (part.dim() - 3))).expand(-1, part.shape[1], -1, *part.shape[3:])


class Policy(ABC):
    """How many slots there are, where tokens go, and what a query may count on seeing."""

    per_layer: bool = False
    """Whether each layer chooses for itself: then no two share a table."""
    unrotated: bool = False
    """Whether tokens change their places while they are kept: keys are then rotated each time they are read."""

    window: int | None = None
    sinks: int = 0
    can_rewind: bool = True
    tells: bool = False
    """Whether its placements say what leaves (`Placement.left`), every token exactly once."""

    @abstractmethod
    def capacity(self, length: int) -> int:
        """Slots needed for sequences of up to `length` tokens."""

    def slots(self, batch: int, heads: int, length: int, device: torch.device | None) -> Slots:
        """An empty table for a batch."""
        return Slots(self, batch, length, device)

    def native_window(self) -> tuple[int, int] | None:
        """(slots kept, sinks) for the native engine, (0, 0) for everything; None where it has no such policy. A class says
        it itself: what a subclass inherits does not count."""
        return None

    @abstractmethod
    def place(self, slots: Slots, positions: Tensor, upto: int) -> Placement: ...
