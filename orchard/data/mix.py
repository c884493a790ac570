"""Several sources in one stream, by weight, without dice.

Dice would give each source its share only on the average, off by about the square root of the number of samples. Here the next
source is the one that is due: Tijdeman's rule for the chairman assignment problem (Discrete Mathematics 32, 1980) keeps every
source within one sample of its share at every moment, and reckons in whole numbers, so that nothing drifts. By tokens, the
source furthest behind its share of them comes next, and shares are off by a few samples' length. The seed says who goes first
where several are due alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Any, TypeVar

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import ConfigError, UsageError
from orchard.core.seeds import fold
from orchard.data.errors import check_choice
from orchard.data.order import nothing
from orchard.data.source import Pair, Sample, Stage, State
from orchard.text.tokenizer import Tokenizer

T = TypeVar("T")


class Mix(Stage[T]):
    """A stream of items of several sources."""

    @config
    class Config(BaseConfig):
        sources: list[BaseConfig] = REQUIRED
        weights: list[float] = REQUIRED
        """Shares, of any sum."""
        by: str = "samples"
        """What is shared: `samples`, or `tokens` (over sources that are encoded)."""
        at_end: str = "repeat"
        """A source that ends: `repeat` it, `drop` it and go on with the others, or `stop` the whole stream."""
        seed: int = 0

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        check_choice("by", cfg.by, ("samples", "tokens"))
        check_choice("at_end", cfg.at_end, ("repeat", "drop", "stop"))
        self.shares = whole_weights(cfg.weights, len(cfg.sources))
        built = [source.build(tokenizer=tokenizer) for source in cfg.sources]
        super().__init__(built, shares=self.shares, by=cfg.by, at_end=cfg.at_end, seed=cfg.seed)
        self.cfg = cfg
        ranks = sorted(range(len(self.shares)), key=lambda number: fold(cfg.seed, "mix", number))
        self._ranks = {number: rank for rank, number in enumerate(ranks)}
        self._used, self._left, self._epochs, self.given = self._fresh(0)

    def __next__(self) -> T:
        while self._left:
            number = self._due()
            item = self._from(number)
            if item is None:
                if self.cfg.at_end == "stop":
                    self._left = []
                else:  # what is left shares what is to come, from here on
                    self._left.remove(number)
                    self._used = [0] * len(self.shares)
                continue
            self._used[number] += self._size(item)
            self.given[number] += 1
            return item
        raise StopIteration

    def _due(self) -> int:
        choose = due_by_samples if self.cfg.by == "samples" else due_by_tokens
        return choose(self.shares, self._used, self._left, self._ranks)

    def _from(self, number: int) -> Any:
        source = self.sources[number]
        item = next(source, None)
        if item is None and self.cfg.at_end == "repeat":
            self._epochs[number] += 1
            source.begin(self._epochs[number])
            item = next(source, None)
            if item is None:
                raise UsageError(*nothing(source), hint="look at its files and at on_bad")
        return item

    def _size(self, item: Any) -> int:
        if self.cfg.by == "samples":
            return 1
        if isinstance(item, Pair):
            return len(item.chosen.ids) + len(item.rejected.ids)
        if not isinstance(item, Sample):
            raise ConfigError("Mix counts tokens, but its sources give rows", hint="put Encode below it")
        return len(item.ids)

    def _own(self) -> State:
        return {
            "used": list(self._used),
            "left": list(self._left),
            "epochs": list(self._epochs),
            "given": list(self.given),
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        self._used, self._left = list(state["used"]), list(state["left"])
        self._epochs, self.given = list(state["epochs"]), list(state["given"])

    def _reset(self, epoch: int) -> None:
        self._used, self._left, self._epochs, self.given = self._fresh(epoch)

    def _fresh(self, epoch: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """What each source gave of what is shared, which ones are left, their epochs, and the samples each gave."""
        none = [0] * len(self.shares)
        left = [number for number, share in enumerate(self.shares) if share]
        return list(none), left, [epoch] * len(none), list(none)


def whole_weights(weights: Sequence[float], count: int) -> list[int]:
    """The weights as whole numbers in the same proportion."""
    if len(weights) != count or not count:
        raise ConfigError(f"{len(weights)} weights for {count} sources", hint="give each source one weight")
    try:
        exact = [Fraction(str(weight)).limit_denominator(1_000_000) for weight in weights]
    except ValueError:
        exact = [Fraction(-1)]
    if min(exact) < 0 or not sum(exact):
        raise ConfigError(f"weights {list(weights)}", hint="use numbers from 0, not all of them 0")
    common = lcm(*(weight.denominator for weight in exact))
    return [int(weight * common) for weight in exact]


def due_by_samples(shares: Sequence[int], used: Sequence[int], left: Sequence[int], ranks: Mapping[int, int]) -> int:
    """Of those that are owed enough, the one whose time runs out first."""
    total = sum(shares[number] for number in left)
    step = sum(used[number] for number in left) + 1
    parts = max(2 * len(left) - 2, 1)
    owed = {number: (step * shares[number] - used[number] * total) * parts for number in left}
    allowed = [number for number in left if owed[number] >= total] or list(left)
    return min(allowed, key=lambda n: (Fraction((parts - 1) * total - owed[n], shares[n]), ranks[n]))


def due_by_tokens(shares: Sequence[int], used: Sequence[int], left: Sequence[int], ranks: Mapping[int, int]) -> int:
    """The one furthest behind its share."""
    total = sum(shares[number] for number in left)
    all_used = sum(used[number] for number in left)
    return max(left, key=lambda n: (shares[n] * all_used - used[n] * total, -ranks[n]))
