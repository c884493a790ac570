"""The requests that one caller handed in together, and the pieces that wait to be fetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from orchard.generate.request import Piece
from orchard.generate.row import Row

WAITING = 64
"""Pieces for each of its rows that a caller may leave unfetched before its rows pause."""


class Seat:
    """A row and where it stands with the scheduler."""

    __slots__ = (
        "alone",
        "batch",
        "common",
        "cost",
        "found",
        "leader",
        "order",
        "reading",
        "row",
        "skipped",
        "slot",
        "thrown",
    )

    def __init__(self, row: Row, batch: Batch, order: int) -> None:
        self.row = row
        self.batch = batch
        self.order = order
        """Who came first; a row that lost its slot keeps it."""
        self.slot = -1
        """-1: it has none."""
        self.reading = False
        """Whether its slot does not hold its whole prompt yet."""
        self.cost = 0
        """Bytes of its stores at its full length."""
        self.found = 0
        """Tokens of its prompt that were known when it got its slot."""
        self.leader: Seat | None = None
        self.common = 0
        """The row that is reading the same beginning, and how many tokens that is."""
        self.skipped = 0
        """How many calls for prompts have gone by since it last was in one."""
        self.thrown = 0
        """How often it has lost its slot."""
        self.alone = False
        """Run it by itself: a call with others failed, and it must be seen whose fault that is."""


class Batch:
    """`pieces` are taken by the caller's thread; everything else belongs to whoever drives the scheduler."""

    __slots__ = ("closed", "error", "left", "pieces", "seats", "stopped", "whole")

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self.stopped = stopped
        self.seats: Sequence[Seat] = ()
        self.pieces: deque[tuple[int, Piece]] = deque()
        self.left = 0
        """Rows that have not ended."""
        self.whole = 0
        self.error: BaseException | None = None
        """What the caller's next look raises, after all pieces: only where there is a single request."""
        self.closed = False

    def fill(self, seats: Sequence[Seat]) -> None:
        self.seats, self.left, self.whole = seats, len(seats), len(seats)

    @property
    def paused(self) -> bool:
        """Whether nobody fetches what is there."""
        return len(self.pieces) >= WAITING * self.whole

    @property
    def resting(self) -> bool:
        """The same for rows that have no slot: it takes more of a reason to begin again than to go on."""
        return 2 * len(self.pieces) >= WAITING * self.whole

    @property
    def ready(self) -> bool:
        """Whether its caller has no need to wait."""
        return bool(self.pieces) or not self.left or self.closed

    def push(self, seat: Seat, piece: Piece) -> None:
        self.pieces.append((seat.row.index, piece))
