"""The two calls of a step: one for all rows that are answering, one for a chunk of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from orchard.core.errors import OrchardError, UsageError
from orchard.generate.batch import Seat
from orchard.generate.prefix import Prefixes
from orchard.generate.protocol import Runner, Work
from orchard.generate.reading import Reading
from orchard.generate.room import Room, too_large

if TYPE_CHECKING:
    from collections import Counter

    from orchard.generate.speculative.drafting import Draft
    from orchard.generate.speculative.speculator import Speculator


class Office(Protocol):
    """What a scheduler does with rows when a call is over."""

    counts: Counter[str]
    sizes: Counter[int]

    def preempt(self, seat: Seat) -> None: ...

    def fail(self, seat: Seat, error: BaseException) -> None: ...

    def ended(self, seat: Seat) -> None: ...


BURST = 8
"""Tokens of each row that a device may choose by itself before anybody is told: text waits for so many steps at most."""


class Steps:
    """Both answer whether anything happened."""

    def __init__(
        self,
        office: Office,
        room: Room,
        reading: Reading,
        prefixes: Prefixes,
        runner: Runner,
        speculator: Callable[[], Speculator],
    ) -> None:
        self._office = office
        self._room = room
        self._reading = reading
        self._prefixes = prefixes
        self._runner = runner
        self._speculator = speculator
        self._used_speculator: Speculator | None = None

    # Answers ----------------------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """One call for all rows whose prompt has been read, and whose caller fetches what there is."""
        seats = self._answering()
        lonely = [seat for seat in seats if seat.alone]
        if lonely:
            seats = [seat for seat in seats if not seat.alone]
        happened = self._answer(seats) if seats else False
        for seat in lonely:
            happened |= self._answer([seat]) if seat.slot >= 0 else False
        return happened

    def _answering(self) -> list[Seat]:
        return [seat for seat in self._room.seats if not (seat.reading or seat.batch.paused)]

    def _answer(self, seats: list[Seat]) -> bool:
        lengths = self._room.slots.lengths
        given = [seat.row.pending(lengths[seat.slot]) for seat in seats]
        if max(map(len, given)) > self._reading.chunk:
            return self._catch_up(seats, given)
        try:
            drafts = self._drafts(seats, given)
        except Exception as error:
            for seat in [seat for seat in seats if seat.row.request.speculation is not None]:
                self._office.fail(seat, error)
            return True
        growth = [(seat, len(ids)) for seat, ids in zip(seats, given, strict=True)]
        if drafts is not None and self._room.short_of(_longer(growth, drafts)):
            drafts = [draft.first(0) for draft in drafts]  # nobody loses anything for guesses
        if not self._has_memory(growth):
            return True  # somebody had to go: the rest is for the next step
        if drafts is None:
            work = [Work(seat.slot, ids, 1) for seat, ids in zip(seats, given, strict=True)]
            if steps := self._ahead(seats, given):
                return self._answer_many(seats, work, steps)
        else:
            work = [
                Work(seat.slot, (*ids, *draft.ids), 1 + len(draft))
                for seat, ids, draft in zip(seats, given, drafts, strict=True)
            ]
        scores = self._run(seats, work)
        if scores is None:
            return True
        self._office.sizes[len(seats)] += 1
        done = 0
        try:
            for place, seat in enumerate(seats):
                self._take(seat, scores[place], None if drafts is None else drafts[place])
                done += 1
        except BaseException:  # an interrupt: the scores of the others are lost
            self._lost(seats[done:])
            raise
        return True

    def _ahead(self, seats: list[Seat], given: list[tuple[int, ...]]) -> int:
        """Tokens that the device can choose by itself: where it can, no row's rules have a say, and nobody's prompt waits."""
        if not hasattr(self._room.slots, "greedy_many") or self._room.unread:
            return 0
        if not all(seat.row.plain and len(ids) == 1 for seat, ids in zip(seats, given, strict=True)):
            return 0
        steps = min(BURST, *(seat.row.limit - len(seat.row.state.output) for seat in seats))
        return steps if steps > 1 and not self._room.short_of([(seat, steps) for seat in seats]) else 0

    def _answer_many(self, seats: list[Seat], work: list[Work], steps: int) -> bool:
        """Several tokens of every row in one go. One that ends before leaves the rest behind with its slot."""
        slots: Any = self._room.slots
        found = self._run(seats, work, lambda work: slots.greedy_many(work, steps))
        if found is None:
            return True
        self._office.sizes[len(seats)] += steps
        done = 0
        try:
            for seat, tokens in zip(seats, found, strict=True):
                self._take(seat, tokens, None)
                done += 1
        except BaseException:
            self._lost(seats[done:])
            raise
        return True

    def _catch_up(self, seats: list[Seat], given: list[tuple[int, ...]]) -> bool:
        """Rows that lost their slot, with a long answer to be read again: a chunk of it, and nothing else in this call."""
        chunk = self._reading.chunk
        long = [(seat, ids[:chunk]) for seat, ids in zip(seats, given, strict=True) if len(ids) > chunk]
        if self._has_memory([(seat, len(ids)) for seat, ids in long]):
            self._run([seat for seat, _ in long], [Work(seat.slot, ids) for seat, ids in long])
        others = [seat for seat, ids in zip(seats, given, strict=True) if len(ids) <= chunk and seat.slot >= 0]
        if others:
            self._answer(others)
        return True

    def _take(self, seat: Seat, scores: np.ndarray | list[int], draft: Draft | None) -> None:
        """What a row makes of its scores, or of tokens that were chosen for it."""
        row, batch = seat.row, seat.batch
        before = len(row.state.output)
        try:
            if isinstance(scores, list):
                for piece in row.take_best(scores):
                    batch.push(seat, piece)
            elif draft is None or not len(draft):
                batch.push(seat, row.take(scores[0]))
                for piece in row.follow():
                    batch.push(seat, piece)
            else:
                for piece in row.take_many(scores, draft):
                    batch.push(seat, piece)
        except Exception as error:
            self._office.counts["tokens"] += len(row.state.output) - before
            self._office.fail(seat, error)
            return
        self._office.counts["tokens"] += len(row.state.output) - before
        seat.alone = False
        if draft is not None and self._used_speculator is not None:
            self._settle(seat, draft, before)
        if row.finished:
            self._office.ended(seat)

    # Prompts ----------------------------------------------------------------------------------------------------------

    def prompts(self) -> bool:
        """One call for a chunk of prompts; then rows that waited for their beginnings get them."""
        if not self._room.unread:
            return False
        copied = self._reading.copy()
        chosen = self._reading.next()
        if not chosen:
            return copied
        seats = [seat for seat, _ in chosen]
        if not self._has_memory([(seat, len(tokens)) for seat, tokens in chosen]):
            return True
        lengths = self._room.slots.lengths
        work = []
        for seat, tokens in chosen:
            ended = lengths[seat.slot] + len(tokens) >= len(seat.row.prompt)
            wanted = len(tokens) if seat.row.unscored else int(ended and self._wants_scores(seat))
            work.append(Work(seat.slot, tokens, wanted, prompt=True))
        scores = self._run(seats, work)
        if scores is None:
            return True
        self._office.counts["prompt_tokens"] += sum(len(tokens) for _, tokens in chosen)
        done = -1  # nobody has begun
        try:
            for place, (seat, tokens) in enumerate(chosen):
                if seat.row.unscored:
                    seat.row.score(lengths[seat.slot] - len(tokens), scores[place])
                    scores[place] = scores[place][-1:]
            read = [lengths[seat.slot] >= len(seat.row.prompt) for seat in seats]
            for seat, ended in zip(seats, read, strict=True):
                if ended:
                    self._room.has_read(seat)
                    self._think(seat)
                    self._keep(seat)
            self._reading.copy()
            for place, seat in enumerate(seats):
                done = place
                if read[place]:
                    self._begin(seat, scores[place])
        except BaseException:
            self._lost(seats[max(done, 0) :], begun=done >= 0)
            raise
        return True

    def _wants_scores(self, seat: Seat) -> bool:
        """Not where the prompt is read again for an answer that has begun, nor where only the prompt counts."""
        row = seat.row
        return not row.reads_only and len(row.request.ids) + len(row.state.output) == len(row.prompt)

    def _think(self, seat: Seat) -> None:
        if seat.row.thinks and not seat.row.reads_only:
            try:
                seat.row.think(self._room.slots.hidden(seat.slot), getattr(self._runner, "signature", None))
            except Exception as error:
                self._office.fail(seat, error)

    def _keep(self, seat: Seat) -> None:
        """Remember the beginning of a prompt that has just been read."""
        if seat.slot < 0:
            return
        request = seat.row.request
        tokens = self._prefixes.worth(request.ids, None, request.adapter)
        held = self._room.slots.hold(seat.slot, tokens) if tokens > seat.found else None
        if held is not None:
            self._prefixes.add(held, request.adapter)

    def _begin(self, seat: Seat, scores: np.ndarray) -> None:
        if seat.slot < 0:
            return
        self._office.counts["cached_tokens"] += 0 if seat.thrown else seat.row.cached
        if seat.row.reads_only:
            seat.row.finished = True
            self._office.ended(seat)
        elif len(scores):
            self._take(seat, scores, None)

    # Both -------------------------------------------------------------------------------------------------------------

    def _run(
        self, seats: list[Seat], work: list[Work], call: Callable[[list[Work]], list[Any]] | None = None
    ) -> list[Any] | None:
        """The scores, or what `call` gives; None where that failed, and it has been seen to that the others can go on."""
        try:
            return call(work) if call is not None else self._room.slots.run(work)
        except Exception as error:
            memory = isinstance(error, UsageError) and "no memory" in str(error)
            if memory and len(self._room.seats) > 1:
                self._room.lower()  # the machine has less than was thought
            if len(seats) == 1 and not (memory and len(self._room.seats) > 1):
                self._office.fail(seats[0], error)
                return None
            for seat in seats:
                seat.alone = not memory
                self._office.preempt(seat)
            return None
        except BaseException:
            for seat in seats:
                self._office.preempt(seat)
            raise

    def _lost(self, seats: Sequence[Seat], *, begun: bool = True) -> None:
        """An interrupt came while rows took their scores. Where one had begun to, nobody knows how far it came."""
        for place, seat in enumerate(seats):
            if seat.slot >= 0 and begun and not place:
                self._office.fail(seat, OrchardError("an interrupt came between two tokens", hint="ask again"))
            elif seat.slot >= 0:
                self._office.preempt(seat)

    def _has_memory(self, growth: list[tuple[Seat, int]]) -> bool:
        """Whether the rows of a call can grow; otherwise somebody goes, and the call has to wait."""
        if not self._room.short_of(growth):
            return True
        if len(self._room.seats) == 1:
            seat, tokens = growth[0]
            self._office.fail(seat, too_large(self._room.tokens(seat) + tokens, self._room.limit))
            return False
        victim = self._room.victim()
        assert victim is not None
        self._office.preempt(victim)
        return False

    # Guesses ----------------------------------------------------------------------------------------------------------

    def _drafts(self, seats: Sequence[Seat], given: Sequence[Sequence[int]]) -> list[Draft] | None:
        """Guesses for the rows that want some; None where nobody does."""
        if not self._room.slots.goes_back or not any(seat.row.request.speculation for seat in seats):
            return None
        if self._used_speculator is None:
            self._used_speculator = self._speculator()
        rows: Any = [seat.row for seat in seats]
        return self._used_speculator.drafts(rows, sum(map(len, given)))

    def _settle(self, seat: Seat, draft: Draft, before: int) -> None:
        """Forget the guesses that did not come true."""
        from orchard.generate.speculative.accept import agreed

        kept = agreed(seat.row.state.output[before:], draft.ids)
        assert self._used_speculator is not None
        self._used_speculator.settle(seat.row, draft, kept)
        wrong = len(draft) - kept
        if wrong:
            self._room.slots.back(seat.slot, self._room.tokens(seat) - wrong)

    def forget(self, seat: Seat) -> None:
        """A row has left its slot."""
        if self._used_speculator is not None and seat.row.request.speculation is not None:
            self._used_speculator.forget(seat.row.key)

    def facts(self) -> dict[str, Any]:
        return {} if self._used_speculator is None else self._used_speculator.facts()


def _longer(growth: list[tuple[Seat, int]], drafts: Sequence[Draft]) -> list[tuple[Seat, int]]:
    return [(seat, tokens + len(draft)) for (seat, tokens), draft in zip(growth, drafts, strict=True)]
