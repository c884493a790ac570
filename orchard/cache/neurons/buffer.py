"""Rows of the neurons in memory, one after another without gaps, so that a layer of them is one matrix product.

As in LLM in a flash (arXiv 2312.11514): room for the most neurons is taken once. A neuron that goes leaves a hole, and the last
row moves into it; a neuron that comes is put behind the last. Nothing else is copied, however many rows there are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from orchard.cache.experts.records import room
from orchard.core.errors import UsageError

Units = np.ndarray
"""Numbers of neurons, int64."""


class NeuronBuffer:
    """Up to `capacity` of `units` neurons, each a row of `width` numbers. Memory is taken from the system as it is touched."""

    def __init__(self, units: int, width: int, *, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        if not 1 <= capacity <= units:
            raise UsageError(f"a buffer of {capacity} of {units} neurons", hint=f"use 1 to {units}")
        self.units, self.width, self.capacity = units, width, capacity
        self.count = 0
        memory = room(width * dtype.itemsize, capacity)
        self.rows: Tensor = memory.view(dtype)
        self._whole: np.ndarray = memory.numpy().view(f"V{width * dtype.itemsize}")[:, 0]
        """The same memory with a row as one item: moving a few takes a tenth of the time that indexing a tensor does."""
        self.ids = np.full(capacity, -1, np.int64)
        """Which neuron a row belongs to."""
        self.slots = np.full(units, -1, np.int64)
        """Which row a neuron has; -1: none."""

    @property
    def free(self) -> int:
        return self.capacity - self.count

    @property
    def nbytes(self) -> int:
        """Of the rows in use."""
        return self.count * self.width * self.rows.element_size()

    def held(self, units: Units) -> np.ndarray:
        """Which of these neurons have a row."""
        return self.slots[units] >= 0

    def resident(self) -> Units:
        """The neurons of the rows, in their order."""
        return self.ids[: self.count]

    def matrix(self) -> Tensor:
        """[count, width], a view."""
        return self.rows[: self.count]

    def append(self, units: Units, rows: Tensor) -> None:
        """Put neurons that have no row behind the last one."""
        many = len(units)
        if many > self.free:
            raise UsageError(f"{many} neurons do not fit into {self.free} rows", hint="drop some first")
        first, last = self.count, self.count + many
        fresh, places = bool((self.slots[units] < 0).all()), np.arange(first, last)
        if fresh:
            self.slots[units] = places
        if not fresh or bool((self.slots[units] != places).any()):  # one that comes twice has only its last place
            if fresh:
                self.slots[units] = -1
            raise UsageError("a neuron cannot have two rows", hint="append only those that are not held, each once")
        self.rows[first:last] = rows
        self.ids[first:last] = units
        self.count = last

    def drop(self, units: Units) -> None:
        """Take neurons out; the last rows move into the holes. Work goes with the number of neurons, not with that of rows."""
        if not len(units):
            return
        places = self.slots[units]
        if bool((places < 0).any()):
            raise UsageError("a neuron without a row cannot be dropped", hint="look with held()")
        self.slots[units] = -1
        left = self.count - len(units)
        tail = self.ids[left : self.count]
        moved = tail[self.slots[tail] >= 0]
        holes = places[places < left]
        if len(moved):
            self._whole[holes] = self._whole[self.slots[moved]]
            self.ids[holes] = moved
            self.slots[moved] = holes
        self.ids[left : self.count] = -1
        self.count = left
