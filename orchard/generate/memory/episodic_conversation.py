"""A conversation in episodes: the one that a message belongs to is opened before the message is read.

Reading everything once for each episode whenever something new was said would cost more with every turn. Here an episode that is
opened reads what was said since it was last open, and all is clustered anew only when the conversation has grown by a factor:
each token is then read a bounded number of times on average, however long the talk gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orchard.core.errors import BadFile
from orchard.generate.memory.conversation import Conversation
from orchard.generate.memory.episodes import Embed, Episodes, Segment, Utterance, clustered, segmented
from orchard.generate.memory.protocol import Kept
from orchard.generate.memory.shelf import Shelf

GROWTH = 2.0
"""The conversation is clustered again when it has so many times the tokens that it had the last time."""

Spoken = Callable[[Sequence[int]], list[Utterance]]
"""A conversation's tokens cut into what was said by whom."""


class EpisodicConversation(Conversation):
    """See `Conversation`; `episodic.EpisodicMemory` is the same for a history that is known from the beginning."""

    def __init__(
        self,
        kept: Kept,
        embed: Embed,
        spoken: Spoken,
        *,
        repeat: Sequence[int] = (),
        episodes: int = 4,
        medoids: int = 4,
        segment: int = 4,
        shelf: Shelf | None = None,
    ) -> None:
        super().__init__(kept, repeat)
        self.embed, self.spoken = embed, spoken
        self.count, self.medoids, self.segment = episodes, medoids, segment
        self.shelf = Shelf() if shelf is None else shelf
        self.switches = 0
        self._begin()

    def ready(self, ids: Sequence[int]) -> None:
        """Open the episode that the newest message belongs to. As long as nothing was forgotten there is one that knows all."""
        if not self._whole:
            if len(self.ids) >= GROWTH * self._built:
                self._cluster()
            said = [
                one.text for one in self.spoken(ids)[:-1] if one.text.strip()
            ]  # the last one is still to be answered
            self._switch(said[-1] if said else "")
        super().ready(ids)

    def make_room(self) -> None:
        super().make_room()
        self._whole = False

    def looks(self) -> list[int]:
        if self.episodes is None or not self.episodes.medoids[self.open]:
            return super().looks()
        chosen = [self._segments[place] for place in self.episodes.medoids[self.open]]
        words = [token for one in chosen for token in one.tokens]
        return [*self.repeat, *words[-self.kept.block :]]

    def restart(self) -> None:
        super().restart()
        self._begin()

    def facts(self) -> dict[str, Any]:
        count = 1 if self.episodes is None else len(self.episodes)
        found = {"episodes": count, "open": self.open, "switches": self.switches, "shelf_bytes": self.shelf.nbytes}
        return {**super().facts(), **found}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """The open episode is as it was; others are read again when they are opened."""
        super().load(arrays)
        self._begin()
        self._whole = not self.forgotten

    # Inside ---------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.shelf.clear()
        self.episodes: Episodes | None = None
        self.open = 0
        self._whole = True
        self._segments: list[Segment] = []
        self._built = 0  # tokens when all was clustered last
        self._read: dict[int, int] = {}  # by episode: how many tokens of the conversation it has read

    def _cluster(self) -> None:
        """Find what was spoken of. The cache that is open stays and becomes the episode that it knows most of."""
        self._segments = segmented(self.spoken(self.ids), self.segment)
        texts = [one.text for one in self._segments]
        if hasattr(self.embed, "learn"):
            self.embed.learn(texts)
        self.episodes = clustered(np.asarray(self.embed(texts)), self.count, self.medoids)
        self.shelf.clear()
        self._read = {}
        self._built = len(self.ids)
        self.open = -1  # the cache in memory was made for other episodes

    def _switch(self, asked: str) -> None:
        if self.episodes is None:
            return
        number = self.episodes.match(np.asarray(self.embed([asked]))[0])[0]
        if number == self.open:
            return
        if self.open >= 0:
            self._read[self.open] = len(self.ids)
            self.shelf.put(self.open, self.kept.save())
        told, self.open = self.ids, number
        if number in self._read:
            try:
                self.kept.load(self.shelf.take(number))
            except BadFile:  # a shelf in a folder that somebody cleaned up
                self._read.pop(number)
        if number not in self._read:
            self.kept.load(self._empty)
        done = self._read.get(number, 0)
        self.ids = told[:done]
        self._since = 0
        self.switches += 1
        self.read(told[done:])
