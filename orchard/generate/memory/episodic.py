"""Episodic memory (EpiCache, arXiv 2509.17396): one small cache for each thing that was spoken of, and the right one open.

The whole history is read once for each episode, block by block under a hard budget. After each block the episode's own words
(its medoids) look at what is kept, and what they do not look at goes. A question is answered from the episode that is nearest
to it. New utterances go to the open episode; when a topic comes that nothing is near to, an episode is begun for it; and when
an episode has no more room, all that was said is clustered and read again.

One cache is in memory at a time, whoever runs it (`protocol.Kept` with scoring "probe"); the others lie on a `Shelf`.

What differs from the paper: positions are packed, so a history may be longer than the model's context; a new episode begins
without history, because none of it was near.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from orchard.core.errors import UsageError
from orchard.generate.memory.episodes import Embed, Episodes, Segment, Utterance, clustered, segmented
from orchard.generate.memory.protocol import Kept
from orchard.generate.memory.shelf import Shelf

Prompt = Callable[[Sequence[int]], Sequence[int]]
"""What is to look at the cache after a block of tokens."""


def prefill(kept: Kept, tokens: Sequence[int], prompt: Prompt, budgets: Sequence[int] | None = None) -> int:
    """Read block by block; where a block brings a layer over its budget let the prompt look and keep the best. How many tokens
    have looked."""
    looked = 0
    for at in range(0, len(tokens), kept.block):
        block = tokens[at : at + kept.block]
        kept.read(block)
        if kept.room < kept.block:
            asked = prompt(block)
            kept.probe(asked)
            kept.evict(budgets)
            looked += len(asked)
    return looked


class EpisodicMemory:
    """`add` or `tell` utterances, `select` by a question, then read through it. One caller at a time."""

    def __init__(
        self,
        kept: Kept,
        embed: Embed,
        *,
        begin: Sequence[int] = (),
        instruction: Sequence[int] = (),
        episodes: int = 4,
        medoids: int = 4,
        segment: int = 4,
        tau: float = -1.0,
        budgets: Sequence[int] | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        """`kept` is empty. `begin`: what every cache begins with. `instruction`: stands before the medoids when they look.
        `tau`: a question less near than this to everything opens an episode of its own (-1: never)."""
        self.kept, self.embed = kept, embed
        self.begin, self.instruction = list(begin), list(instruction)
        self.count, self.medoids, self.segment, self.tau = episodes, medoids, segment, tau
        self.budgets = None if budgets is None else list(budgets)
        self.shelf = Shelf() if shelf is None else shelf
        self.history: list[Utterance] = []
        self.segments: list[Segment] = []
        self.episodes: Episodes | None = None
        self.open: int | None = None
        self.stale = False
        """Whether something was said that only the open episode knows, and more than it can hold: it is time to build again."""
        self.builds = self.tokens_read = self.tokens_looked = 0
        self.peak = 0
        self._empty = kept.save()

    def add(self, utterances: Sequence[Utterance]) -> None:
        """Let these be part of the history. They are read when the memory is built, which is due then."""
        self.history += utterances
        self.stale = True

    def build(self) -> None:
        """Cluster all that was said and read it once for each episode: E times the cost of reading it."""
        if not self.history:
            raise UsageError("nothing was said yet", hint="add utterances first")
        self.stale = True  # until it is done: whatever breaks off in between, the history is there to build from
        segments = segmented(self.history, self.segment)
        if hasattr(self.embed, "learn"):
            self.embed.learn([one.text for one in segments])
        found = clustered(self._vectors([one.text for one in segments]), self.count, self.medoids)
        tokens = [*self.begin, *(token for one in self.history for token in one.tokens)]
        self.shelf.clear()
        self.segments, self.episodes, self.open = segments, found, None
        for number in range(len(found)):
            words = self.prompt(number)
            self.kept.load(self._empty)
            self.tokens_looked += prefill(self.kept, tokens, lambda _, words=words: words, self.budgets)  # type: ignore[misc]
            self.tokens_read += len(tokens)
            self._put(number)
        self.builds += 1
        self.stale = False

    def prompt(self, number: int) -> list[int]:
        """What looks for an episode: the instruction and its medoids, in the order of the talk."""
        assert self.episodes is not None
        chosen = [self.segments[place] for place in self.episodes.medoids[number]]
        return [*self.instruction, *(token for one in chosen for token in one.tokens)]

    def select(self, question: str) -> int:
        """Open the episode that is nearest to a question, or a new one; builds before where that is due."""
        if self.history and (self.episodes is None or self.stale):
            self.build()
        vector = self._vectors([question])[0]
        number, near = self.episodes.match(vector) if self.episodes is not None else (0, -np.inf)
        if near < self.tau or self.episodes is None:
            return self._begin(vector)
        if number != self.open:
            self._close()
            self.kept.load(self.shelf.take(number))
            self.open = number
        return number

    def tell(self, utterance: Utterance, wanted: int = 0) -> np.ndarray:
        """Something new is said: it is read into the episode that it belongs to; scores [wanted, V] after its last tokens."""
        self.select(utterance.text)
        found = self.read(utterance.tokens, wanted)
        self.history.append(utterance)
        return found

    def said(self, utterance: Utterance) -> None:
        """What has been read already, token by token: an answer, say. It is part of the history from now on."""
        self.history.append(utterance)

    def read(self, tokens: Sequence[int], wanted: int = 0) -> np.ndarray:
        """Read into the open episode, which makes room by its own words where it must; all is built again at the next turn."""
        if self.open is None:
            raise UsageError("no episode is open", hint="select one by a question first")
        found = []
        for at in range(0, len(tokens), self.kept.block):
            part = tokens[at : at + self.kept.block]
            if len(part) > self.kept.room:
                self.kept.probe(self.prompt(self.open) or list(part))
                self.kept.evict(self.budgets)
                self.stale = True
            asked = max(0, min(len(part), at + len(part) - (len(tokens) - wanted)))
            found.append(self.kept.read(part, wanted=asked))
            self.peak = max(self.peak, self.kept.peak)
        return np.concatenate(found)

    @property
    def nbytes(self) -> int:
        """Of the cache in memory; what lies elsewhere is `shelf.nbytes`."""
        return self.kept.nbytes

    # Inside -----------------------------------------------------------------------------------------------------------

    def _begin(self, vector: np.ndarray) -> int:
        """Open an episode about something new."""
        self._close()
        self.open = None
        self.kept.load(self._empty)
        if self.begin:
            self.kept.read(self.begin)
        fresh = Episodes(np.empty((0, len(vector))), (), ()) if self.episodes is None else self.episodes
        self.episodes = fresh.plus(vector)
        self.open = len(fresh)
        return self.open

    def _vectors(self, texts: Sequence[str]) -> np.ndarray:
        found = np.asarray(self.embed(list(texts)))
        if found.ndim != 2 or len(found) != len(texts):
            raise UsageError(
                f"the embedder gave {found.shape} for {len(texts)} texts", hint="it must give one vector a text"
            )
        return found

    def _put(self, number: int) -> None:
        self.peak = max(self.peak, self.kept.peak)
        self.shelf.put(number, self.kept.save())

    def _close(self) -> None:
        """Write back the open episode."""
        if self.open is not None:
            self._put(self.open)
