"""Prompt lookup: what followed the last tokens when they stood in the text before is likely to follow again.

Copies, edits, code and records repeat themselves, and such guesses cost nothing (the idea: Saxena 2023, "Prompt lookup decoding";
Yang et al., arXiv 2304.04487). Of the last `PLACES` places where the last two tokens stood, the one with the longest common past
is taken (up to `PAST` tokens), the most recent among equals. Adding a token and asking cost the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchard.generate.protocol import State
from orchard.generate.speculative.drafting import NOTHING, Ask, Draft

PAST = 8
"""Tokens: a common past that is longer is no better."""
PLACES = 32
LEAST = 2
"""Tokens of the shortest common past."""
BELIEVED = {2: 0.5, 3: 0.7, 5: 0.85}
"""Sorts of guesses, by the least tokens of common past, and how often they come true before anything was seen."""


class Index:
    """The tokens of one text, and where each pair of neighbours stood."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, int], int] = {}  # a pair of neighbours → where its second token stood last
        self._before: list[int] = []  # for each place: where the pair that ends there stood before, or -1
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        known, last, before = self._tokens, self._last, self._before
        for token in tokens:
            place = len(known)
            if place:
                pair = (known[-1], token)
                before.append(last.get(pair, -1))
                last[pair] = place
            else:
                before.append(-1)
            known.append(token)

    def find(self) -> tuple[int, int] | None:
        """The place of the token that followed, and the tokens of common past before it; None where there is none."""
        tokens = self._tokens
        end = len(tokens) - 1
        if end < LEAST:
            return None
        place, best, found = self._before[end], 0, -1
        for _ in range(PLACES):
            if place < 0:
                break
            past = LEAST
            while past < PAST and past <= place and tokens[place - past] == tokens[end - past]:
                past += 1
            if past > best:
                best, found = past, place
                if past == PAST:
                    break
            place = self._before[place]
        return (found + 1, best) if best else None

    def guess(self, most: int) -> Draft:
        """At most so many tokens. Where the copy reaches the end of the text, it goes on with itself."""
        found = self.find()
        if found is None or most < 1:
            return NOTHING
        start, past = found
        tokens, period = self._tokens, len(self._tokens) - start
        ids = tuple(tokens[start : start + most])
        if len(ids) < most:
            ids = (ids * (most // period + 1))[:most]
        return Draft(ids, sort=max(sort for sort in BELIEVED if sort <= past))


class LookupDrafter:
    """An index for each sequence."""

    seconds = 0.0

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, ...], Index]] = {}

    def propose(self, wanted: Sequence[Ask]) -> list[Draft]:
        return [self._index(ask.key, ask.state).guess(ask.most) for ask in wanted]

    def forget(self, key: int) -> None:
        self._known.pop(key, None)

    def _index(self, key: int, state: State) -> Index:
        prompt, index = self._known.get(key, (None, None))
        if index is None or prompt is not state.prompt or len(index) > len(state.prompt) + len(state.output):
            index = Index(state.prompt)
            self._known[key] = (state.prompt, index)
        index.extend(state.output[len(index) - len(state.prompt) :])
        return index
