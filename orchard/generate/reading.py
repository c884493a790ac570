"""Which prompts are read next, and which need not be read because another row reads the same beginning.

A prompt is cut at multiples of the chunk, counted from its own beginning, whatever else is in the call: a torch model then
always computes the same. Every other call begins with the shortest prompt, so that a small request hardly waits, and every other
with the one that was passed over most often, so that a long one gets its share.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchard.generate.batch import Seat
from orchard.generate.prefix import GRAIN
from orchard.generate.room import Room

SCORED = 64
"""Tokens at a time where the scores of all are wanted: those of a vocabulary are large."""


class Reading:
    """What is to be read of the prompts of the rows that have a slot."""

    def __init__(self, room: Room, chunk: int) -> None:
        self.room = room
        self.chunk = chunk
        self._calls = 0

    def next(self) -> list[tuple[Seat, Sequence[int]]]:
        """The rows of the next call, and the tokens that each is given: at most a chunk in all. Nothing where no prompt is left
        to read."""
        waiting = [seat for seat in self.room.seats if seat.reading and seat.leader is None]
        self._calls += 1
        waiting.sort(key=self._shortest if self._calls % 2 else _longest_passed_over)
        chosen: list[tuple[Seat, Sequence[int]]] = []
        space = self.chunk
        for seat in waiting:
            start = self.room.tokens(seat)
            chunk = min(self.chunk, SCORED) if seat.row.unscored else self.chunk
            tokens = seat.row.prompt[start : (start // chunk + 1) * chunk]
            fits = len(tokens) <= space and not (seat.alone and chosen) and not (chosen and chosen[0][0].alone)
            if fits or not chosen:
                chosen.append((seat, tokens))
                space -= len(tokens)
                seat.skipped = 0
            else:
                seat.skipped += 1
        return chosen

    def follow(self, seat: Seat) -> None:
        """Let a row wait for one that reads, or has read, the same beginning: the more they share the better. Only for one that
        got its slot before it, so that no two wait for each other."""
        if not getattr(self.room.slots, "copies", True) or seat.row.unscored:
            return
        prompt, best = seat.row.prompt, self.room.tokens(seat) + GRAIN - 1
        for other in self.room.seats:
            if other is seat:
                return
            if other.row.request.adapter == seat.row.request.adapter:
                shared = common(prompt, other.row.prompt, best)
                if shared > best:
                    best, seat.leader, seat.common = shared, other, shared

    def copy(self) -> bool:
        """Give rows that wait what the rows they wait for have read by now; whether there were any."""
        waiting = [seat for seat in self.room.seats if seat.leader is not None]
        for seat in waiting:
            leader = seat.leader
            assert leader is not None
            if self.room.tokens(leader) >= seat.common:
                seat.leader = None
                if self.room.slots.copy(leader.slot, seat.slot, seat.common):
                    seat.row.cached = max(seat.row.cached, min(seat.common, len(seat.row.request.ids)))
        return bool(waiting)

    def left(self, gone: Seat) -> None:
        """A row has left its slot: those who waited for it look for another one, or read for themselves."""
        for seat in self.room.seats:
            if seat.leader is gone:
                seat.leader = None
                self.follow(seat)

    def _shortest(self, seat: Seat) -> tuple[int, int]:
        return self._left(seat), seat.order

    def _left(self, seat: Seat) -> int:
        """Tokens of its prompt that are still to be read."""
        return max(0, len(seat.row.prompt) - self.room.tokens(seat))


def _longest_passed_over(seat: Seat) -> tuple[int, int]:
    return -seat.skipped, seat.order


def common(one: Sequence[int], other: Sequence[int], least: int) -> int:
    """How many tokens two prompts begin with alike, but for the last token of `one`, whose scores are wanted; 0 where that is no
    more than `least`."""
    most = min(len(one) - 1, len(other))
    if most <= least or one[: least + 1] != other[: least + 1]:
        return 0
    low, high = least + 1, most  # alike up to low
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
