"""What the engine asks of others: a runner that scores tokens, and rules that bend the scores. No torch here.

Scores are float32 numpy arrays on the CPU, whatever made them. Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, overload, runtime_checkable

import numpy as np


class Shape(Protocol):
    """The two numbers of a model's config that the engine needs."""

    @property
    def context(self) -> int: ...

    @property
    def vocab(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Keys and values of some tokens, made by reading them as a prompt: the same bytes however that was cut into calls."""

    ids: tuple[int, ...]
    data: np.ndarray | tuple[np.ndarray, ...]
    """Bytes that only the runner understands: one array per 64 tokens (`prefix.GRAIN`), which other sequences with the same
    beginning may share; or a single one, of use only for all of these tokens."""
    whole: bool = False
    """Whether they can only be used for all of these tokens, and not for the first few of them."""

    @property
    def nbytes(self) -> int:
        arrays = (self.data,) if isinstance(self.data, np.ndarray) else self.data
        return sum(array.nbytes for array in arrays) + 8 * len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """The first `tokens` of what is held."""

    held: Held
    tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one sequence is given in one call."""

    slot: int
    tokens: Sequence[int]
    """At least one."""
    wanted: int = 0
    """Scores after each of the last so many of them."""
    prompt: bool = False
    """Whether they belong to a prompt or to an answer: the two are read in different ways, also when they are read again."""


class Slots(Protocol):
    """Stores for some sequences that come and go. What a sequence is given depends on its own tokens alone: not on its
    company, nor on how its tokens were cut into calls.

    One caller at a time. A slot is free until `open` and again after `close`.
    """

    count: int
    lengths: list[int]
    """Tokens in each slot."""
    goes_back: bool
    """Whether `back` can be asked for."""
    copies: bool
    """Whether there is any use in asking for `copy`."""

    def open(self, slot: int, length: int, use: Use | None = None, variant: str | None = None) -> int:
        """Take a free slot for a sequence of up to `length` tokens; answers how many tokens of `use` it holds now. `variant`:
        the name of another set of weights over the same base. `UsageError` ("no memory …") where it cannot be had."""
        ...

    def copy(self, source: int, target: int, tokens: int) -> bool:
        """Fill an open slot that holds less with the first tokens of another's prompt, of the same variant; False where that
        cannot be done, and nothing has happened."""
        ...

    def run(self, work: Sequence[Work]) -> list[np.ndarray]:
        """Scores, float32 [wanted, V] each, which belong to the caller until the next call. All of the work is of prompts or
        none of it is, and no slot comes twice. Where this raises, the slots in question can only be closed."""
        ...

    def back(self, slot: int, tokens: int) -> None:
        """Forget what comes after the first `tokens`."""

    def hold(self, slot: int, tokens: int) -> Held | None:
        """A copy of the keys and values of a prompt's first tokens; None where a runner cannot."""
        ...

    def hidden(self, slot: int) -> np.ndarray | None:
        """What the head read for the last wanted token of a slot in the last run: float32 [dim]; None where it is not known."""
        ...

    def close(self, slot: int) -> None: ...

    def nbytes(self, length: int) -> int:
        """Memory of a sequence of so many tokens; 0 where it is not known."""
        ...


class Pass(Protocol):
    """One run over a batch of prompts, for programs that need no engine: `read` chunk after chunk, `first` once, then `step`;
    `keep` drops sequences. `orchard.generate.passes` makes one of any runner's slots.

    Scores belong to the caller only until the next call: a runner may write the next ones into the same memory. Dropping
    the last reference to a pass frees its stores.
    """

    lengths: list[int]
    """Tokens of each sequence so far, counting those of its prompt that are still to be read."""
    longest: int
    """Tokens of the longest prompt."""
    starts: list[int]
    """Tokens at the beginning of each prompt that need not be read: their keys and values were handed in."""

    def read(self, start: int, stop: int) -> None:
        """Read tokens start … stop - 1 of every prompt that has them, and has not got them yet."""

    def first(self) -> np.ndarray:
        """Scores [B, V] after the prompts, all of which have been read."""
        ...

    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Scores [B, V] after one more token of each sequence."""
        ...

    def extend(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Scores [B, V] after some more tokens of each sequence, at least one: what as many steps would have given."""
        ...

    def hold(self, row: int, tokens: int) -> Held | None:
        """A copy of the keys and values of a prompt's first tokens, all of which have been read; None where a runner cannot."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""


@runtime_checkable
class Runner(Protocol):
    """A causal model over token ids, ready to run: in torch (`torch_forward.TorchRunner`) or natively.

    One that has other sets of weights over the same base offers `variants`, a mapping from their names.
    """

    @property
    def config(self) -> Shape: ...

    def slots(self, count: int) -> Slots:
        """Stores for up to `count` sequences at a time."""
        ...


class Tokens(Sequence[int]):
    """Token ids that can be added to without copying, and still a value: nobody's tokens ever change.

    The tokens of one sequence at different times share one list that only grows, and each knows how much of it is its
    own. Two different continuations of the same tokens part ways by a copy. Equal to a tuple of the same ids.
    """

    __slots__ = ("_ids", "_length", "_lock")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = list(ids)
        self._length = len(self._ids)
        self._lock = threading.Lock()

    def plus(self, token_id: int) -> Tokens:
        longer = Tokens.__new__(Tokens)
        longer._length = self._length + 1
        with self._lock:  # two threads may go on from the same tokens
            if len(self._ids) == self._length:
                self._ids.append(token_id)
                longer._ids, longer._lock = self._ids, self._lock
                return longer
        longer._ids, longer._lock = [*self._ids[: self._length], token_id], threading.Lock()
        return longer

    def goes_on_from(self, other: Tokens) -> bool:
        """Whether these are the other tokens and perhaps more, as far as that is known without comparing them."""
        return self._ids is other._ids and self._length >= other._length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...

    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        if isinstance(place, slice):
            start, stop, step = place.indices(self._length)
            return tuple(self._ids[start:stop] if step == 1 else [self._ids[i] for i in range(start, stop, step)])
        inside = place + self._length if place < 0 else place
        if not 0 <= inside < self._length:
            raise IndexError(f"no token {place} among {self._length}")
        return self._ids[inside]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids[: self._length])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tokens):
            same = self._ids is other._ids and self._length == other._length
            return same or self._ids[: self._length] == other._ids[: other._length]
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True, init=False)
class State:
    """All that the choice of the next token may depend on, besides the scores: the tokens so far.

    A value, not an object that changes: going back (speculation, preemption) is keeping an older one.
    """

    prompt: tuple[int, ...]
    output: Tokens

    def __init__(self, prompt: tuple[int, ...], output: Iterable[int] = ()) -> None:
        object.__setattr__(self, "prompt", prompt)
        object.__setattr__(self, "output", output if isinstance(output, Tokens) else Tokens(output))

    def plus(self, token_id: int) -> State:
        return State(self.prompt, self.output.plus(token_id))


class Rule(Protocol):
    """Bends the scores [V] (float32) of one sequence before a token is chosen; -inf rules a token out.

    The answer depends on the arguments only. The scores handed in are left as they are, and are not kept after the
    call: their memory will hold other scores. A rule that follows the output with a machine of its own (a grammar)
    brings it to where `state.output` stands, forwards or back.
    """

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray: ...
