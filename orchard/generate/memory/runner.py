"""A runner whose sequences are conversations in fixed memory, for the engine: however long a prompt gets, it fits.

The engine asks what is known of the beginning of a prompt (`beginnings`), opens a slot with it and reads the rest. Here that
beginning is a whole conversation under a budget, which goes on from turn to turn. There are as many conversations as slots; a
prompt that goes on from none of them takes the place of the one that was used longest ago.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchard.core.errors import BadFile, UsageError
from orchard.core.files import atomic_write
from orchard.generate.memory.conversation import Conversation
from orchard.generate.protocol import Held, Use, Work
from orchard.generate.request import MOST_TOKENS


@dataclass(frozen=True)
class Endless:
    """What the engine needs to know of the model; a prompt may be as long as any."""

    vocab: int
    context: int = MOST_TOKENS


class MemoryRunner:
    """`make` gives an empty conversation; it is called when one more is needed, up to `most`."""

    def __init__(self, make: Callable[[], Conversation], vocab: int, most: int = 1) -> None:
        if most < 1:
            raise UsageError(f"{most} conversations", hint="use one or more")
        self.config = Endless(vocab)
        self.most = most
        self.lock = threading.RLock()
        self.beginnings = Beginnings(self)
        self._make = make
        self._all: list[Conversation] = []  # the one used last stands last
        self._busy: set[int] = set()

    def slots(self, count: int) -> MemorySlots:
        return MemorySlots(self, min(count, self.most))

    @property
    def conversations(self) -> list[Conversation]:
        return list(self._all)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._all)

    def take(self, conversation: Conversation | None = None) -> Conversation:
        """A conversation for somebody alone: this one, or another that begins anew."""
        with self.lock:
            if conversation is None or id(conversation) in self._busy or conversation not in self._all:
                conversation = self._another()
            else:
                self._all.remove(conversation)
                self._all.append(conversation)
            self._busy.add(id(conversation))
            return conversation

    def give_back(self, conversation: Conversation) -> None:
        with self.lock:
            self._busy.discard(id(conversation))

    def nearest(self, ids: Sequence[int]) -> tuple[Conversation | None, int]:
        """The conversation that these tokens go on from, and how many it has in common with them."""
        with self.lock:
            free = [one for one in self._all if id(one) not in self._busy and one.ids]
            tokens, found = max(((one.goes_on(ids), place) for place, one in enumerate(free)), default=(0, 0))
            return (free[found], tokens) if tokens else (None, 0)

    def clear(self) -> None:
        """Forget all conversations that nobody is using."""
        with self.lock:
            self._all = [one for one in self._all if id(one) in self._busy]

    def _another(self) -> Conversation:
        if len(self._all) < self.most:
            made = self._make()
            self._all.append(made)
            return made
        free = [one for one in self._all if id(one) not in self._busy]
        if not free:
            raise UsageError("no memory for another conversation", hint="wait for one of the others to be answered")
        free[0].restart()
        self._all.remove(free[0])
        self._all.append(free[0])
        return free[0]


class MemorySlots:
    """See `protocol.Slots`."""

    goes_back = False
    copies = False

    def __init__(self, runner: MemoryRunner, count: int) -> None:
        self.count = count
        self.lengths = [0] * count
        self._runner = runner
        self._conversations: list[Conversation | None] = [None] * count

    def open(self, slot: int, length: int, use: Use | None = None, variant: str | None = None) -> int:
        found = use.held.data if use is not None else None
        mine = found.conversation if isinstance(found, _Known) else None
        taken = self._runner.take(mine)
        if taken is not mine or use is None:
            taken.restart()
            tokens = 0
        else:
            try:
                tokens = taken.resume(use.held.ids)
            except BaseException:
                taken.restart()
                self._runner.give_back(taken)
                raise
        self._conversations[slot], self.lengths[slot] = taken, tokens
        return tokens

    def copy(self, source: int, target: int, tokens: int) -> bool:
        return False

    def run(self, work: Sequence[Work]) -> list[np.ndarray]:
        return [self._one(one) for one in work]

    def back(self, slot: int, tokens: int) -> None:
        raise UsageError("a conversation in fixed memory cannot go back", hint="answer without guesses")

    def hold(self, slot: int, tokens: int) -> Held | None:
        return None

    def hidden(self, slot: int) -> np.ndarray | None:
        return None

    def close(self, slot: int) -> None:
        conversation, self._conversations[slot] = self._conversations[slot], None
        self.lengths[slot] = 0
        if conversation is not None:
            self._runner.give_back(conversation)

    def nbytes(self, length: int) -> int:
        """Not of the length: that is what all of this is for."""
        return 0

    @property
    def used(self) -> int:
        return self._runner.nbytes

    def _one(self, one: Work) -> np.ndarray:
        conversation = self._conversations[one.slot]
        if conversation is None:
            raise ValueError(f"slot {one.slot} is free")
        try:
            scores = conversation.read(list(one.tokens), one.wanted)
        except BaseException:
            conversation.restart()  # half of a step may be in it: the next turn reads it again
            raise
        finally:
            self.lengths[one.slot] = len(conversation.ids)
        return scores


class _Known(np.ndarray):
    """An empty row of bytes that says which conversation it stands for."""

    conversation: Conversation | None = None


class Beginnings:
    """What `prefix.Prefixes` is to other runners: what is known of the beginning of a prompt."""

    limit = 0

    def __init__(self, runner: MemoryRunner) -> None:
        self._runner = runner

    @property
    def nbytes(self) -> int:
        return self._runner.nbytes

    def __len__(self) -> int:
        return len(self._runner.conversations)

    def find(self, ids: Sequence[int], variant: str | None = None) -> Use | None:
        """The conversation that goes on with these tokens. How many of them it need not read is known when it is opened."""
        found, tokens = self._runner.nearest(ids)
        if found is None or not tokens:
            return None
        data = np.empty(0, np.uint8).view(_Known)
        data.conversation = found
        return Use(Held(tuple(ids), data, whole=True), tokens)

    def worth(self, ids: Sequence[int], found: Use | None, variant: str | None = None) -> int:
        return 0  # everything is kept already

    def add(self, held: Held, variant: str | None = None) -> None:
        pass

    def drop(self, variant: str | None) -> None:
        pass

    def clear(self) -> None:
        self._runner.clear()

    # Files ------------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, ids: Sequence[int], variant: str | None = None) -> int:
        """Write the conversation that these tokens go on from, whole or not at all; answers how many of its tokens they have."""
        from safetensors.numpy import save

        found, tokens = self._runner.nearest(ids)
        if found is None or not tokens:
            return 0
        with atomic_write(Path(path)) as file:
            file.write(save({name: np.ascontiguousarray(array) for name, array in found.save().items()}))
        return tokens

    def load(self, path: str | Path) -> int:
        """Take up what `save` wrote; answers how many tokens the conversation has. `BadFile` where it is another model's, or
        another budget's."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            arrays: dict[str, Any] = dict(load(Path(path).read_bytes()))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise BadFile(f"{path} is no saved conversation: {error}", hint="read the conversation again") from error
        conversation = self._runner.take()
        try:
            conversation.load(arrays)
        finally:
            self._runner.give_back(conversation)
        return len(conversation.ids)
