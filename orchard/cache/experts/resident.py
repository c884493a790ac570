"""Units in memory under a budget: slots taken once, filled from a file of records, ahead of time where that can be known.

`ensure` says which units the running layer needs and returns their slots; they stay there until the next `ensure`. Reads
that are missing go out together (several threads and the caller read at once), `prefetch` reads while the caller computes.
One caller at a time: a model that runs layer by layer is one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from orchard.cache.experts.counters import Counters
from orchard.cache.experts.errors import BudgetTooSmall
from orchard.cache.experts.policies import Key, LeastStale, Policy
from orchard.cache.experts.readers import Readers
from orchard.cache.experts.records import Records, pages
from orchard.cache.experts.table import NO_SCORES, Admitted, Table

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Loading:
    """Units on their way into slots."""

    slots: list[int]
    """Of all units that were asked for, in their order."""
    waits: list[Key]
    """Those that are not there yet."""


class Resident:
    """A budget of bytes over a file of records."""

    def __init__(
        self,
        records: Records,
        budget_bytes: int,
        policy: Policy | None = None,
        *,
        working_set: int = 1,
        threads: int = 2,
    ) -> None:
        """`working_set`: units that one layer needs at once. `threads`: readers beside the caller."""
        working_set = max(working_set, 1)
        self.records = records
        self.working_set = working_set
        self.slot_bytes = records.record_bytes
        count = min(budget_bytes // self.slot_bytes, sum(layer.units for layer in records.layers))
        if budget_bytes < working_set * self.slot_bytes:
            needed = working_set * self.slot_bytes
            raise BudgetTooSmall(
                budget=budget_bytes, needed=needed, what=f"the {working_set} units a layer needs at once"
            )
        self.pages = pages(self.slot_bytes, count)
        """All slots [slots, bytes]."""
        self.table = Table(count, policy or LeastStale())
        self._changed = threading.Condition()
        self._readers = Readers(records, self.pages, self.table, self._changed, threads)
        self.table.busy = self._readers.reading

    # What the caller asks for -------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A forward pass begins. What was to be prefetched for the last one and was not begun is called off."""
        with self._changed:
            self._readers.call_off()
            self.table.begin_pass()

    def ensure(self, layer: int, units: Iterable[int], scores: Mapping[int, float] = NO_SCORES) -> list[int]:
        """The slots of these units, in their order, read where they were missing. They are held until the next call."""
        loading = self.start(layer, units, scores)
        self.finish(loading)
        return loading.slots

    def start(self, layer: int, units: Iterable[int], scores: Mapping[int, float] = NO_SCORES) -> Loading:
        """Like `ensure`, but does not wait: what is in memory can be computed while the rest is read (`finish`)."""
        keys = [(layer, unit) for unit in units]
        wanted = len(set(keys))
        if wanted > self.slots:
            raise BudgetTooSmall(
                budget=self.nbytes, needed=wanted * self.slot_bytes, what=f"the {wanted} units asked for at once"
            )
        with self._changed:
            missing = self.table.need(layer, (unit for _, unit in keys), scores)
            late = [key for key in dict.fromkeys(keys) if self._readers.hurry(key)]
            self.table.counters.late += len(late)
            for key in missing:
                self._readers.enqueue(self._admit(key, scores.get(key[1], 0.0)))
            waits = [*late, *missing]
            if all(key in self.table.slot for key in keys):
                return Loading([self.table.slot[key] for key in keys], waits)
        # While a slot was waited for, a read of another of these units failed and gave its slot back.
        self.finish(Loading([], waits))
        raise AssertionError("a unit without a slot whose read did not fail")

    def finish(self, loading: Loading) -> None:
        """Wait for what `start` began. Raises what went wrong; then nothing is held."""
        if not loading.waits:
            return
        start = time.perf_counter()
        try:
            self._readers.finish(loading.waits)
        except BaseException:
            self.rest()
            raise
        self.counters.waited += time.perf_counter() - start

    def prefetch(self, layer: int, units: Sequence[int], scores: Mapping[int, float] = NO_SCORES) -> None:
        """Begin to read units that may be needed soon. Returns at once."""
        with self._changed:
            for key in self.table.expect(layer, units, scores):
                admitted = self.table.admit(key, scores.get(key[1], 0.0), ahead=True)
                if admitted is None:
                    break
                self._readers.enqueue(admitted, ahead=True)

    def pin(self, layer: int, units: Iterable[int]) -> list[int]:
        """Like `ensure`, and kept until `unpin`."""
        keys = [(layer, unit) for unit in units]
        with self._changed:
            needed = self.table.pinned_with(keys) + self.working_set
            if needed > self.slots:
                raise BudgetTooSmall(
                    budget=self.nbytes,
                    needed=needed * self.slot_bytes,
                    what="what is pinned, and a layer's units beside it",
                )
        slots = self.ensure(layer, (unit for _, unit in keys))
        with self._changed:
            self.table.pin(set(keys))
        return slots

    def unpin(self, layer: int, units: Iterable[int]) -> None:
        with self._changed:
            self.table.unpin({(layer, unit) for unit in units})

    def rest(self) -> None:
        """No layer runs: nothing is held but what is pinned."""
        with self._changed:
            self.table.rest()

    # What is there ------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self.table.slots

    @property
    def free(self) -> int:
        """Slots that are not pinned: as many units as can be asked for at once."""
        return self.slots - self.table.pinned

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self.slots * self.slot_bytes

    @property
    def counters(self) -> Counters:
        return self.table.counters

    @cached_property
    def memory(self) -> Tensor:
        """The same bytes for torch."""
        import torch

        return torch.from_numpy(self.pages)

    def resident(self, layer: int) -> list[int]:
        """Units of a layer that are there or on their way."""
        with self._changed:
            return self.table.resident(layer)

    def ready(self, layer: int) -> list[int]:
        """Units of a layer that have been read."""
        with self._changed:
            return [unit for unit in self.table.resident(layer) if not self._readers.pending((layer, unit))]

    def arrays(self, layer: int, slot: int) -> dict[str, Tensor]:
        """The named arrays in a slot that holds a unit of this layer. Views: valid as long as the slot is held."""
        return self.records.arrays(layer, self.memory[slot])

    def stacked(self, layer: int, name: str) -> Tensor:
        """One named array of all slots [slots, ...], for layers whose records are alike. A view."""
        return self.records.layers[layer].arrays[name].view(self.memory)

    def close(self) -> None:
        """Stop the readers. The memory goes when nobody looks at it any more."""
        self._readers.close()

    def __enter__(self) -> Resident:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # a constructor that failed, an interpreter that ends
            self._readers.close()

    def _admit(self, key: Key, score: float) -> Admitted:
        """A slot for a key that is needed. Reads that stand in the way are waited for."""
        while (admitted := self.table.admit(key, score)) is None:
            if not self._readers.waiting():
                self.table.rest()
                raise BudgetTooSmall(
                    budget=self.nbytes,
                    needed=(self.slots + 1) * self.slot_bytes,
                    what="what is pinned and what this layer needs",
                )
            self._changed.wait()
        return admitted
