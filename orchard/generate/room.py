"""Who has a slot, and how much memory that takes: the limits that make rows wait or lose their place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from orchard.core.errors import UsageError
from orchard.generate.batch import Seat
from orchard.generate.protocol import Slots, Use

MARGIN = 64
"""Tokens that a row must have room for beyond those it has, before it gets a slot; twice as many each time it lost one."""
LEAST = 64 << 20
"""Bytes: no guess at the memory of a machine is lower."""


class Room:
    """The slots and the rows in them (`seats`, in the order they came in). Memory is counted by the tokens that rows have."""

    def __init__(self, slots: Slots, limit: int | None) -> None:
        """`limit`: bytes of keys and values; None: half of what this machine has left."""
        self.slots = slots
        self.limit = available() // 2 if limit is None else limit
        self.seats: list[Seat] = []
        self.free = list(range(slots.count))[::-1]
        self.unread = 0
        """Rows whose prompt is still being read."""
        self._most = 0  # bytes when all rows are as long as they can get

    def tokens(self, seat: Seat) -> int:
        """Tokens of a row's that its slot holds."""
        return self.slots.lengths[seat.slot]

    def used(self) -> int:
        now: int | None = getattr(self.slots, "used", None)
        return sum(self.slots.nbytes(max(1, self.tokens(seat))) for seat in list(self.seats)) if now is None else now

    def fits(self, seat: Seat) -> bool:
        """Whether there is memory for one row more: all it has, and some tokens more for everybody."""
        nbytes, row = self.slots.nbytes, seat.row
        length = len(row.request.ids) + len(row.state.output)
        if self._most + nbytes(row.length) <= self.limit:
            return True
        needed = nbytes(min(row.length, length + (MARGIN << min(seat.thrown, 6))))
        others = (max(self.tokens(one), len(one.row.prompt)) + MARGIN for one in self.seats)
        return needed + sum(map(nbytes, others)) <= self.limit

    def short_of(self, growth: Sequence[tuple[Seat, int]]) -> bool:
        """Whether rows that grow by so many tokens need more memory than there may be."""
        if self._most <= self.limit:
            return False
        more = {seat.slot: tokens for seat, tokens in growth}
        nbytes = self.slots.nbytes
        return sum(nbytes(self.tokens(seat) + more.get(seat.slot, 0)) for seat in self.seats) > self.limit

    def lower(self) -> None:
        """Make do with what is in use now."""
        self.limit = max(min(self.limit, self.used()), min(self.limit, LEAST))

    def open(self, seat: Seat, use: Use | None) -> int:
        """Give a row a free slot; answers how many tokens of `use` it holds. Raises what the runner raises."""
        slot, row = self.free[-1], seat.row
        held = self.slots.open(slot, row.length, use, row.request.adapter)
        reserve = getattr(self.slots, "reserve", None)  # a runner whose memory grows by copying has it
        if reserve is not None:
            try:
                reserve(slot, min(row.length, len(row.prompt) + 1))
            except BaseException:
                self.slots.close(slot)
                raise
        self.free.pop()
        seat.slot, seat.cost = slot, self.slots.nbytes(row.length)
        self._most += seat.cost
        self.seats.append(seat)
        seat.reading = True
        self.unread += 1
        return held

    def close(self, seat: Seat) -> None:
        """Free a row's slot, if it has one."""
        if seat.slot < 0:
            return
        slot, seat.slot = seat.slot, -1
        self._most -= seat.cost
        self.has_read(seat)
        self.seats.remove(seat)
        self.slots.close(slot)
        self.free.append(slot)
        seat.leader = None

    def has_read(self, seat: Seat) -> None:
        """A row's prompt is in its slot, or will not be."""
        if seat.reading:
            seat.reading = False
            self.unread -= 1

    def victim(self, than: Seat | None = None) -> Seat | None:
        """Who has to go first: one whose caller does not fetch, else the youngest of the lowest priority. `than`: only one that
        matters less than this one."""
        worst = min(self.seats, key=_importance, default=None)
        if worst is None or than is None or worst.batch.paused:
            return worst
        return worst if worst.row.request.priority < than.row.request.priority else None


def _importance(seat: Seat) -> tuple[bool, int, int]:
    return not seat.batch.paused, seat.row.request.priority, -seat.order


def too_large(tokens: int, limit: int) -> UsageError:
    return UsageError(
        f"no memory for {tokens:,} tokens within {limit:,} bytes",
        hint="ask for fewer tokens (max_tokens), shorten the prompt, or give the engine more memory (kv_bytes)",
    )


def available() -> int:
    """Bytes of memory that this process may still take, by the machine and by its container."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        most, now = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        found += [int(most) - int(now)] if most.strip().isdigit() else []
    except (OSError, ValueError):  # another system, or no limit
        pass
    if not found and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return max(min(found, default=4 << 30), 2 * LEAST)
