"""Stop strings in streamed text, found wherever token borders fall."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """`push(text)` gives what may be shown, `found` says that the end was met, `finish()` gives what was held back.

    The first stop string to be complete ends the text before it (of two that end at the same character, the longer), so
    the result is the same however the text was cut into pieces. Only what could be the beginning of a stop string is
    held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.found = False
        self._longest = max(map(len, self.stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        if self.found:
            return ""
        text, self._held = self._held + text, ""
        ends = [(start + len(stop), -len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if ends:
            self.found = True
            return text[: min(ends)[2]]
        cut = len(text) - self._possible(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _possible(self, text: str) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            ending = text[-length:]
            if any(stop.startswith(ending) for stop in self.stops):
                return length
        return 0
