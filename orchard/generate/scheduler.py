"""Many requests at once, without a thread of its own: whoever waits for a piece moves everybody on.

A step drops what was cancelled, lets waiting rows in, runs all rows that are answering in one call and then one chunk of prompts
in another. So long prompts hold nobody up for longer than a chunk, and a row that comes late is read in the next step. Rows
never look at each other, and what is read as a prompt or as an answer depends on a row alone: company, the time of coming, and
the loss of a slot on the way change no token.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from orchard.core.errors import OrchardError, UsageError
from orchard.generate.batch import Batch, Seat
from orchard.generate.prefix import Prefixes
from orchard.generate.protocol import Runner
from orchard.generate.reading import Reading
from orchard.generate.request import Piece
from orchard.generate.room import Room, too_large
from orchard.generate.row import Row
from orchard.generate.steps import Steps

if TYPE_CHECKING:
    from orchard.generate.speculative.speculator import Speculator

TRIES = 3
"""Steps in which nothing happens before that is called a fault."""


class Scheduler:
    """Several threads may call `submit`, `next` and `close`; one at a time has the driver's seat."""

    def __init__(
        self,
        runner: Runner,
        prefixes: Prefixes,
        *,
        slots: int,
        chunk: int,
        kv_bytes: int | None,
        speculator: Callable[[], Speculator],
    ) -> None:
        self._turn = threading.Condition()
        self._driving = False
        self._sleepers = 0  # threads that wait for the driver
        self._coming: deque[Batch] = deque()
        self._closing: deque[Batch] = deque()
        self._batches: list[Batch] = []
        self._waiting: list[Seat] = []  # the first to be let in stands last
        self._order = 0
        self._make = (runner, slots, kv_bytes, chunk)
        self._prefixes = prefixes
        self._speculator = speculator
        self._room: Room | None = None
        self.counts: Counter[str] = Counter()
        self.sizes: Counter[int] = Counter()

    # What callers do --------------------------------------------------------------------------------------------------

    def submit(self, rows: Sequence[Row], stopped: Callable[[], bool]) -> Batch:
        """Hand in rows. Nothing is done for them before somebody drives."""
        batch = Batch(stopped)
        batch.fill([Seat(row, batch, 0) for row in rows])
        for seat in batch.seats:
            try:
                for piece in seat.row.begin():
                    batch.push(seat, piece)
            except Exception as error:
                self._failed(seat, error)
                continue
            if seat.row.finished:
                batch.left -= 1
        self._coming.append(batch)
        return batch

    def next(self, batch: Batch) -> tuple[int, Piece] | None:
        """The next piece, and the place of its request; None when all answers have ended. Drives if nobody else does."""
        while not batch.pieces:
            if not batch.left or batch.closed:
                if batch.pieces:  # came between the two looks
                    break
                if batch.error is not None:
                    error, batch.error = batch.error, None
                    raise error
                return None
            self._drive(batch)
        return batch.pieces.popleft()

    def close(self, batch: Batch) -> None:
        """End all answers of a batch without a last piece; their slots are free at once, or after the step under way."""
        if batch.closed:
            return
        batch.closed = True
        self._closing.append(batch)
        with self._turn:  # reentrant: this may be called when a forgotten stream is collected, anywhere
            if not self._driving:
                self._sweep()

    def facts(self) -> dict[str, Any]:
        """Numbers for those who watch."""
        room = self._room
        running = len(room.seats) if room is not None else 0
        names = ("steps", "tokens", "prompt_tokens", "cached_tokens", "preempted", "requests", "errors", "cancelled")
        return {
            "waiting": len(self._waiting) + sum(batch.left for batch in list(self._coming)),
            "running": running,
            "slots": self._make[1],
            "kv_bytes": room.used() if room is not None else 0,
            "kv_limit": room.limit if room is not None else self._make[2],
            **{name: self.counts[name] for name in names},
            "batch_sizes": dict(sorted(dict(self.sizes).items())),
        }

    # Driving ----------------------------------------------------------------------------------------------------------

    def _drive(self, batch: Batch) -> None:
        """Step until this batch has something, or wait while somebody else does."""
        with self._turn:
            while self._driving:
                if batch.ready:
                    return
                self._sleepers += 1
                try:
                    self._turn.wait()
                finally:
                    self._sleepers -= 1
            if batch.ready:
                return
            self._driving = True
        try:
            idle = 0
            while not batch.ready:
                idle = 0 if self.step() else idle + 1
                if idle >= TRIES:
                    raise OrchardError("no request can go on", hint="this is a fault of Orchard: report it")
                if self._sleepers:
                    with self._turn:
                        self._turn.notify_all()
        finally:
            with self._turn:
                self._driving = False
                self._sweep()
                if self._sleepers:
                    self._turn.notify_all()

    def step(self) -> bool:
        """One round for everybody; whether anything happened. For whoever has the driver's seat."""
        self.counts["steps"] += 1
        if self._closing:
            self._sweep()
        room = self._room or self._made()
        happened = self._welcome() if self._coming else False
        happened |= self._stop_cancelled()
        if self._waiting:
            happened |= self._admit(room)
        happened |= self._steps.answers()
        happened |= self._steps.prompts()
        return happened

    def _made(self) -> Room:
        runner, slots, kv_bytes, chunk = self._make
        room = Room(runner.slots(slots), kv_bytes)
        self._reading = Reading(room, chunk)
        self._steps = Steps(self, room, self._reading, self._prefixes, runner, self._speculator)
        self._room = room
        return room

    def _welcome(self) -> bool:
        while self._coming:
            batch = self._coming.popleft()
            if batch.closed or not batch.left:
                continue
            self._batches.append(batch)
            self.counts["requests"] += batch.left
            for seat in batch.seats:
                if not seat.row.finished:
                    seat.order, self._order = self._order, self._order + 1
                    insort(self._waiting, seat, key=_line)
        return True

    def _stop_cancelled(self) -> bool:
        stopped = [batch for batch in self._batches if batch.stopped()]
        for batch in stopped:
            for seat in [seat for seat in batch.seats if not seat.row.finished]:
                self.counts["cancelled"] += 1
                piece = seat.row.cancel()
                self._leave(seat)
                batch.push(seat, piece)
                self.ended(seat)
        return bool(stopped)

    def _sweep(self) -> None:
        """Free what closed batches had."""
        while self._closing:
            batch = self._closing.popleft()
            for seat in batch.seats:
                if not seat.row.finished:
                    seat.row.finished = True
                    self._leave(seat)
            if batch in self._batches:
                self._batches.remove(batch)
            batch.left = 0
            batch.seats = ()

    def _admit(self, room: Room) -> bool:
        """Let waiting rows in, as long as there are slots and memory; one that matters more takes the place of another."""
        happened = False
        while (seat := self._first()) is not None:
            if not room.free or not room.fits(seat):
                victim = room.victim(seat) if room.seats else None
                if victim is not None:
                    self.preempt(victim)
                    happened = True
                    continue
                if room.seats or not room.free:
                    return happened
                tokens = len(seat.row.prompt) + len(seat.row.state.output) + 1
                if room.slots.nbytes(min(tokens, seat.row.length)) > room.limit:
                    self.fail(seat, too_large(tokens, room.limit))
                    happened = True
                    continue
            if not self._open(room, seat):
                return happened
            happened = True
        return happened

    def _first(self) -> Seat | None:
        """The next row to be let in. Callers who do not fetch what they have get no more."""
        return next((seat for seat in reversed(self._waiting) if not seat.batch.resting), None)

    def _open(self, room: Room, seat: Seat) -> bool:
        """Give the first waiting row a slot. False where there is no memory now, but may be when others have ended."""
        request = seat.row.request
        use = None if seat.row.unscored else self._prefixes.find(request.ids, request.adapter)
        try:
            seat.found = room.open(seat, use)
        except Exception as error:
            if isinstance(error, UsageError) and "no memory" in str(error) and room.seats:
                return False
            self.fail(seat, error)
            return True
        self._waiting.remove(seat)
        if not seat.thrown:
            seat.row.cached = seat.found
        self._reading.follow(seat)
        return True

    # What becomes of rows: for `Steps` too -----------------------------------------------------------------------------

    def preempt(self, seat: Seat) -> None:
        """Take a row's slot away; it is read again later, and goes on where it was."""
        self.counts["preempted"] += 1
        seat.thrown += 1
        self._leave(seat)
        insort(self._waiting, seat, key=_line)

    def fail(self, seat: Seat, error: BaseException) -> None:
        """End one row, and no other."""
        self._leave(seat)
        self._failed(seat, error)

    def ended(self, seat: Seat) -> None:
        """A row has given its last piece. Its slot is free in this step."""
        self._leave(seat)
        batch = seat.batch
        batch.left -= 1
        if not batch.left and batch in self._batches:
            self._batches.remove(batch)

    def _failed(self, seat: Seat, error: BaseException) -> None:
        self.counts["errors"] += 1
        batch = seat.batch
        if batch.whole == 1:
            seat.row.finished = True
            batch.error = error
        else:
            batch.push(seat, seat.row.fail(error))
        self.ended(seat)

    def _leave(self, seat: Seat) -> None:
        if self._room is not None and seat.slot >= 0:
            self._room.close(seat)
            self._reading.left(seat)
            self._steps.forget(seat)
        elif seat in self._waiting:
            self._waiting.remove(seat)


def _line(seat: Seat) -> tuple[int, int]:
    """Rows wait in this order, the first to be let in last."""
    return seat.row.request.priority, -seat.order
