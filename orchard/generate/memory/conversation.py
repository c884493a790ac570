"""One conversation in fixed memory: which of its tokens have been read, and how what comes next is read.

A caller hands in the whole conversation every time, as token ids. What has been read of it already is not read again; where the
new one differs from the old (an answer that was cancelled, an edited message), what differs is forgotten, or, where something
has been forgotten since, all is read again. Blocks that do not fit make room first, in one of four ways: the newest stay, keys
unlike the others stay (KeyDiff), what the newest tokens look at stays (SnapKV), or what is needed to repeat the newest block
stays (KVzip, arXiv 2505.23416). Episodes are kept by `episodic_conversation.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from orchard.core.errors import BadFile
from orchard.generate.memory.protocol import Kept

ANSWER = 256
"""Room that a turn begins with, for its answer: an answer that forgets nothing can be taken back."""


class Conversation:
    """One caller at a time. `ids`: all tokens that have been read, in their order."""

    def __init__(self, kept: Kept, repeat: Sequence[int] = ()) -> None:
        """`kept` is empty. `repeat`: the instruction before a block that is to be repeated, where the scoring is "probe"."""
        self.kept = kept
        self.repeat = list(repeat)
        self.ids: list[int] = []
        self._empty = kept.save()
        self._since = 0  # tokens read since some were forgotten
        self.forgotten = 0
        """How often something had to be forgotten."""
        self.restarts = 0
        """How often all was read again."""

    # A turn -------------------------------------------------------------------------------------------------------------

    def resume(self, ids: Sequence[int]) -> int:
        """Make ready for a conversation of these tokens: how many of them need not be read. At least one is left to read."""
        same = common(self.ids, ids[: len(ids) - 1])
        if same < len(self.ids):
            same = self._take_back(same)
        self.ready(ids)
        return same

    def ready(self, ids: Sequence[int]) -> None:
        """A turn begins. One that would have to forget in the middle of its answer rather forgets before it."""
        needed = len(ids) - len(self.ids) + min(ANSWER, self.kept.block // 2)
        if self.kept.room < needed <= self.kept.block:
            self.make_room()

    def goes_on(self, ids: Sequence[int]) -> int:
        """How many tokens a prompt has in common with this conversation; 0 where it is another one: what differs is more than
        half of it, or can no longer be taken back."""
        same = common(self.ids, ids)
        more = len(self.ids) - same
        return same if more <= self._since and 2 * same >= len(self.ids) else 0

    def read(self, tokens: Sequence[int], wanted: int = 0) -> np.ndarray:
        """Scores [wanted, V] after the last tokens."""
        found = []
        for at in range(0, len(tokens), self.kept.block):
            part = tokens[at : at + self.kept.block]
            if len(part) > self.kept.room:
                self.make_room()
            asked = max(0, min(len(part), at + len(part) - (len(tokens) - wanted)))
            found.append(self.kept.read(part, wanted=asked))
            self.ids += part
            self._since += len(part)
        return np.concatenate(found)

    def make_room(self) -> None:
        """Forget what matters least."""
        if getattr(self.kept, "scoring", "") == "probe":
            self.kept.probe(self.looks())
        self.kept.evict()
        self._since = 0
        self.forgotten += 1

    def looks(self) -> list[int]:
        """What looks at everything that is kept before some of it goes."""
        return [*self.repeat, *self.ids[-self.kept.block :]]

    def restart(self) -> None:
        """Forget everything."""
        self.kept.load(self._empty)
        self.ids, self._since = [], 0

    # What it takes, and keeping it ----------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes

    def facts(self) -> dict[str, Any]:
        kept = self.kept
        return {
            "tokens": len(self.ids),
            "kept_tokens": kept.used,
            "peak_tokens": kept.peak,
            "budget_tokens": kept.budget,
            "block_tokens": kept.block,
            "bytes": self.nbytes,
            "forgotten": self.forgotten,
            "restarts": self.restarts,
        }

    def save(self) -> dict[str, np.ndarray]:
        """Everything, as arrays that a file can hold."""
        state = np.array([self._since, self.forgotten, self.restarts], np.int64)
        return {"ids": np.array(self.ids, np.int64), "state": state, **_under("kept", self.kept.save())}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `save` gave; `BadFile` where it is of another model or budget, and nothing has changed."""
        try:
            ids = [int(token) for token in arrays["ids"]]
            since, forgotten, restarts = (int(number) for number in arrays["state"])
        except (KeyError, ValueError, TypeError) as error:
            raise BadFile(f"this is no saved conversation: {error}", hint="read the conversation again") from None
        self.kept.load(_below("kept", arrays))
        self.ids, self._since, self.forgotten, self.restarts = ids, since, forgotten, restarts

    # Inside ---------------------------------------------------------------------------------------------------------------

    def _take_back(self, same: int) -> int:
        """Forget what comes after the first tokens, or everything where that cannot be done; how many are left."""
        more = len(self.ids) - same
        back = getattr(self.kept, "back", None)
        if back is not None and more <= self._since and back(more):
            del self.ids[same:]
            self._since -= more
            return same
        self.restarts += bool(self.ids)
        self.restart()
        return 0


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two conversations begin with alike."""
    most = min(len(one), len(other))
    first, second = np.asarray(one[:most]), np.asarray(other[:most])
    differs = np.flatnonzero(first != second)
    return int(differs[0]) if len(differs) else most


def _under(name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}.{key}": array for key, array in arrays.items()}


def _below(name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}
