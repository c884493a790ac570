"""The contract of a source, and the values that go through sources.

A source is an iterator that can say where it is (`state`, plain JSON) and go there again (`restore`): the rest of the stream
is then the same, bit for bit, in another process and on another day. Sources wrap sources:

    files → Row → Sample (tokens, and which are learnt) → rows of a fixed length → Batch

Each is built from its config, with the tokenizer as the one thing that comes from outside: `cfg.build(tokenizer=…)`.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from orchard.core.config import Configurable
from orchard.core.errors import ConfigError
from orchard.data.errors import StateError, Tally
from orchard.text.tokenizer import Tokenizer

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
State = dict[str, Any]


@runtime_checkable
class Source(Protocol[T_co]):
    """A resumable iterator."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __next__(self) -> T_co: ...

    def state(self) -> State:
        """Where it is: what was given out is before it, the rest comes after `restore`."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def begin(self, epoch: int) -> None:
        """From the beginning. Whoever shuffles takes another order for every epoch."""
        ...

    def counts(self) -> dict[str, int]:
        """What was left out, padded and so on, so far, of this source and of those below it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file, checked: `data` has the fields of one of the forms of `orchard.data.rows`."""

    data: dict[str, Any]
    place: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A tokenised example. `learnt[i]` says whether `ids[i]` is a target; the first token never is, nothing comes before it."""

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    place: str = ""

    @classmethod
    def of(cls, ids: Sequence[int], learnt: Sequence[bool] | None = None, place: str = "") -> Sample:
        mask = np.ones(len(ids), np.bool_) if learnt is None else np.array(learnt, np.bool_)
        if len(mask) != len(ids):
            raise ValueError(f"{len(ids)} ids with {len(mask)} marks")
        mask[:1] = False
        return cls(np.array(ids, np.int32), mask, place)

    def __len__(self) -> int:
        """Tokens a model reads: the last one is only ever a target."""
        return max(len(self.ids) - 1, 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        same = np.array_equal(self.ids, other.ids) and np.array_equal(self.learnt, other.learnt)
        return same and self.place == other.place

    def cut(self, start: int, stop: int) -> Sample:
        """Reads the tokens from `start` to `stop`, and learns what follows each of them."""
        learnt = self.learnt[start : stop + 1].copy()
        learnt[:1] = False
        return Sample(self.ids[start : stop + 1], learnt, self.place)

    def targets(self) -> NDArray[np.int64]:
        """What comes after each token that is read; the one place where targets are shifted."""
        from orchard.core.batch import IGNORED

        return np.where(self.learnt[1:], self.ids[1:].astype(np.int64), IGNORED)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, the first preferred."""

    chosen: Sample
    rejected: Sample

    @property
    def place(self) -> str:
        return self.chosen.place

    def __len__(self) -> int:
        return max(len(self.chosen), len(self.rejected))


class Stage(Configurable, ABC, Generic[T]):
    """What sources share: states by name, and the sources below them.

    A stage says what its own state is (`_own`, `_take`, `_reset`); those of the sources below go along by themselves.
    """

    def __init__(self, sources: Sequence[Any] = (), tally: Tally | None = None, **settings: Any) -> None:
        """`settings`: what else the stream depends on; a state taken with others is refused."""
        self.sources: tuple[Any, ...] = tuple(sources)
        self.tally = tally
        self._settings = settings

    def __iter__(self) -> Iterator[T]:
        return self

    @abstractmethod
    def __next__(self) -> T: ...

    def state(self) -> State:
        state: State = {"kind": type(self).__name__, **self._settings, **self._own()}
        if self.tally is not None:
            state["tally"] = self.tally.state()
        return state | {"sources": [source.state() for source in self.sources]} if self.sources else state

    def restore(self, state: Mapping[str, Any]) -> None:
        kind = state.get("kind") if isinstance(state, Mapping) else None
        below = state.get("sources", []) if kind else []
        if kind != type(self).__name__ or len(below) != len(self.sources):
            raise StateError(
                f"this is the state of {kind or 'something else'} over {len(below)} sources, "
                f"not of {type(self).__name__} over {len(self.sources)}",
                hint="restore with the config that the state was taken with",
            )
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise StateError(
                    f"the state of {kind} was taken with {name}={state.get(name)!r}, and this has {value!r}",
                    hint="restore with the config that the state was taken with",
                )
        for source, item in zip(self.sources, below):
            source.restore(item)
        try:
            self._take(state)
            if self.tally is not None:
                self.tally.restore(state["tally"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise StateError(f"a damaged state of {kind}: {error!r}", hint="take an older checkpoint") from error

    def begin(self, epoch: int) -> None:
        for source in self.sources:
            source.begin(epoch)
        self._reset(epoch)

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for source in self.sources:
            for name, number in source.counts().items():
                counts[name] = counts.get(name, 0) + number
        if self.tally is not None:
            counts["bad"] = counts.get("bad", 0) + self.tally.bad
        return counts

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def summary(self) -> str:
        """What was left out and why, in a line a person can read; empty where nothing was."""
        reasons: dict[str, int] = {}
        shown: list[str] = []
        for tally in _tallies(self):
            shown += tally.shown
            for reason, number in tally.reasons.items():
                reasons[reason] = reasons.get(reason, 0) + number
        if not reasons:
            return ""
        why = ", ".join(f"{reason} ({number:,})" for reason, number in sorted(reasons.items()))
        return f"{sum(reasons.values()):,} rows were left out: {why}; the first: {shown[0]}"

    def _own(self) -> State:
        return {}

    def _take(self, state: Mapping[str, Any]) -> None:
        return None

    def _reset(self, epoch: int) -> None:
        return None


def _tallies(stage: Any) -> Iterator[Tally]:
    for source in getattr(stage, "sources", ()):
        yield from _tallies(source)
    if getattr(stage, "tally", None) is not None:
        yield stage.tally


def needed(tokenizer: Tokenizer | None, stage: str) -> Tokenizer:
    if tokenizer is None:
        raise ConfigError(f"{stage} needs a tokenizer", hint="build(tokenizer=…)")
    return tokenizer


# Items that a state holds (what a shuffle keeps back, rows that are still open) -------------------------------------------


def to_json(item: Any) -> dict[str, Any]:
    if isinstance(item, Row):
        return {"row": item.data, "place": item.place}
    if isinstance(item, Sample):
        ids = base64.b64encode(item.ids.astype("<i4").tobytes()).decode()
        learnt = base64.b64encode(np.packbits(item.learnt).tobytes()).decode()
        return {"ids": ids, "learnt": learnt, "place": item.place}
    if isinstance(item, Pair):
        return {"chosen": to_json(item.chosen), "rejected": to_json(item.rejected)}
    raise ConfigError(f"a {type(item).__name__} cannot be held back", hint="shuffle and mix rows, samples or pairs")


def from_json(data: Mapping[str, Any]) -> Any:
    if "row" in data:
        return Row(dict(data["row"]), data["place"])
    if "chosen" in data:
        return Pair(from_json(data["chosen"]), from_json(data["rejected"]))
    ids = np.frombuffer(base64.b64decode(data["ids"]), "<i4").astype(np.int32)
    marks = np.unpackbits(np.frombuffer(base64.b64decode(data["learnt"]), np.uint8), count=len(ids))
    return Sample(ids, marks.astype(np.bool_), data["place"])
