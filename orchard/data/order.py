"""The order of things: a permutation that needs no memory, a shuffle for streams, and epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import UsageError
from orchard.core.seeds import fold
from orchard.data.errors import at_least
from orchard.data.source import Stage, State, from_json, to_json
from orchard.text.tokenizer import Tokenizer

T = TypeVar("T")
_MASK = (1 << 64) - 1
_ROUNDS = 6


class Permutation:
    """The numbers below `size` in an order that depends on the seed and names alone; any place of it is worked out at once.

    A Feistel network over the next power of four, walked until it lands below `size` (Black and Rogaway, CT-RSA 2002). No
    list is kept and no library's random numbers are used, so the order is the same on every machine and in every version.
    """

    def __init__(self, size: int, seed: int, *names: str | int) -> None:
        self.size = size
        self._half = max((max(size - 1, 1).bit_length() + 1) // 2, 1)
        self._low = (1 << self._half) - 1
        self._keys = [fold(seed, "permutation", *names, number) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.size:
            raise IndexError(place)
        while True:
            left, right = place >> self._half, place & self._low
            for key in self._keys:
                left, right = right, left ^ (_scrambled(right ^ key) & self._low)
            place = (left << self._half) | right
            if place < self.size:
                return place


def _scrambled(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class Shuffle(Stage[T]):
    """A shuffle for streams: of the next `buffer` items, any one comes next. The state holds what is kept back, so it is as
    large as the buffer; where the files allow it, `order="shuffled"` of a reader costs nothing and mixes better."""

    @config
    class Config(BaseConfig):
        source: BaseConfig = REQUIRED
        buffer: int = 1024
        seed: int = 0

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        at_least("buffer", cfg.buffer, 1)
        super().__init__([cfg.source.build(tokenizer=tokenizer)], buffer=cfg.buffer, seed=cfg.seed)
        self.cfg = cfg
        self._held: list[T] = []
        self._epoch, self._given, self._ended = 0, 0, False

    def __next__(self) -> T:
        while not self._ended and len(self._held) < self.cfg.buffer:
            try:
                self._held.append(next(self.sources[0]))
            except StopIteration:
                self._ended = True
        if not self._held:
            raise StopIteration
        chosen = fold(self.cfg.seed, "shuffle", self._epoch, self._given) % len(self._held)
        self._given += 1
        self._held[chosen], self._held[-1] = self._held[-1], self._held[chosen]
        return self._held.pop()

    def _own(self) -> State:
        held = [to_json(item) for item in self._held]
        return {"epoch": self._epoch, "given": self._given, "ended": self._ended, "held": held}

    def _take(self, state: Mapping[str, Any]) -> None:
        self._held = [from_json(item) for item in state["held"]]
        self._epoch, self._given, self._ended = int(state["epoch"]), int(state["given"]), bool(state["ended"])

    def _reset(self, epoch: int) -> None:
        self._held = []
        self._epoch, self._given, self._ended = epoch, 0, False


class Repeat(Stage[T]):
    """A source several times over, or without end. Whoever shuffles below it takes a new order each time."""

    @config
    class Config(BaseConfig):
        source: BaseConfig = REQUIRED
        epochs: int | None = None
        """None: without end."""

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        if cfg.epochs is not None:
            at_least("epochs", cfg.epochs, 1)
        super().__init__([cfg.source.build(tokenizer=tokenizer)])
        self.cfg = cfg
        self.epoch, self._first, self._any = 0, 0, False

    def __next__(self) -> T:
        while True:
            try:
                item = next(self.sources[0])
            except StopIteration:
                if not self._any:
                    raise UsageError(*nothing(self.sources[0])) from None  # or this would turn for ever
                if self.cfg.epochs is not None and self.epoch + 1 >= self.cfg.epochs:
                    raise
                self.epoch, self._any = self.epoch + 1, False
                self.sources[0].begin(self._first + self.epoch)
                continue
            self._any = True
            return item

    def _own(self) -> State:
        return {"epoch": self.epoch, "first": self._first, "any": self._any}

    def _take(self, state: Mapping[str, Any]) -> None:
        self.epoch, self._first, self._any = int(state["epoch"]), int(state["first"]), bool(state["any"])

    def _reset(self, epoch: int) -> None:
        self.epoch, self._first, self._any = 0, epoch * (self.cfg.epochs or 1), False


def nothing(source: Any) -> tuple[str]:
    """What to say of a source that gave nothing."""
    why = source.summary() if isinstance(source, Stage) else ""
    return (f"there is nothing to learn from: {type(source).__name__} gave no items{'; ' + why if why else ''}",)
