"""All connections of a server at a glance: how many there are, and which of them wait for nothing.

Where there is no room, a newcomer is worth more than the one that has been idle longest: those who only hold connections lose
them, and those who ask are served.
"""

from __future__ import annotations

from typing import Protocol

from orchard.serve.settings import Limits


class Guest(Protocol):
    """What stands on the floor: a connection, or one that is to become one."""

    def give_up(self) -> None: ...

    def last_answer(self) -> None: ...


class Floor:
    """All connections of a server: how many there are, and which are idle, the longest first."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.draining = False
        self.open: set[Guest] = set()
        self.idle: dict[Guest, None] = {}

    def come(self, one: Guest) -> bool:
        """Whether there is room for one more. Where there is none, one that waits for nothing goes."""
        if len(self.open) >= self.limits.connections:
            longest = next(iter(self.idle), None)
            if longest is None:
                return False
            longest.give_up()
        self.open.add(one)
        self.idle[one] = None
        return True

    def busy(self, one: Guest) -> None:
        self.idle.pop(one, None)

    def rest(self, one: Guest) -> None:
        self.idle.pop(one, None)
        self.idle[one] = None

    def leave(self, one: Guest) -> None:
        self.open.discard(one)
        self.idle.pop(one, None)
