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

    `index` [B, T] is the slot each new token is written to. When `with_new` is set, what is seen are the slots as they
    were before the step followed by all new tokens (some of which may already fall out again); otherwise the slots after
    writing. `positions` and `valid` [B, 1, S] describe what is seen, in that order.
    """

    index: Tensor
    positions: Tensor
    valid: Tensor
    upto: int
    with_new: bool = False
    left: Tensor | None = None
    """Which tokens are gone after the step, for whoever wants to make something of them: with `with_new` of what is seen
    [B, 1, S], otherwise of what the slots at `index` held before [B, 1, T]. None: none."""


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
        # Past the end a token would fall into the bin unseen. On an accelerator the look itself would cost a wait.
        looks = self.limit is not None and positions.device.type == "cpu" and not torch.compiler.is_compiling()
        if looks and positions.numel() and (newest := int(positions.max())) >= self.limit:  # type: ignore[operator]
            raise ContextOverflow(tokens=newest + 1, limit=self.limit)  # type: ignore[arg-type]
        return self.policy.place(self, positions, self.capacity if upto is None else min(upto, self.capacity))

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


class Policy(ABC):
    """How many slots there are, where tokens go, and what a query may count on seeing."""

    window: int | None = None
    sinks: int = 0
    can_rewind: bool = True
    tells: bool = False
    """Whether its placements say what leaves (`Placement.left`), every token exactly once."""

    @abstractmethod
    def capacity(self, length: int) -> int:
        """Slots needed for sequences of up to `length` tokens."""

    def native_window(self) -> tuple[int, int] | None:
        """(slots kept, sinks) for the native engine, (0, 0) for everything; None where it has no such policy. A class says
        it itself: what a subclass inherits does not count."""
        return None

    @abstractmethod
    def place(self, slots: Slots, positions: Tensor, upto: int) -> Placement: ...
