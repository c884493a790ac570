"""A text in pieces that can be judged as it grows: sentences, or stretches of them.

Where a piece ends depends only on the text up to there, so any way of cutting a stream into deltas gives the same pieces.
Very short sentences are kept together (`b. o. m. b.` must not become four), and very long ones are cut at a space.
"""

from __future__ import annotations

LEAST = 24
"""Characters that a piece has before a full stop can end it."""
MOST = 160
"""Characters from which on any space ends it."""
LONGEST = 1024
"""A piece without any space (base64, say) ends here."""
_STOPS = frozenset(".!?…;:")
_CLOSERS = frozenset("\"'”’)]»*_")
_WIDE_STOPS = frozenset("。！？")


class Segmenter:
    """`push` characters; it says at which of them a piece ends."""

    def __init__(self) -> None:
        self.length = 0
        self._stopped = False

    def push(self, character: str) -> bool:
        """Whether the piece ends with this character."""
        self.length += 1
        ends = self._ends(character)
        if ends:
            self.cut()
        return ends

    def cut(self) -> None:
        """The piece ends here, whatever it holds."""
        self.length, self._stopped = 0, False

    def _ends(self, character: str) -> bool:
        if character.isspace():
            stopped, self._stopped = self._stopped, False
            return (self.length >= LEAST and (stopped or character == "\n")) or self.length >= MOST
        if character in _STOPS:
            self._stopped = True
        elif character not in _CLOSERS:
            self._stopped = False
        return (character in _WIDE_STOPS and self.length >= LEAST) or self.length >= LONGEST
