"""A budgeted sequence on the native engine: what `protocol.Kept` asks for, over a `NativeRunner`.

Scores that need queries come from running tokens once more: those of a probe, which look and are not kept, or, for "snap", the
last ones read. Keys are kept rotated, as the engine's kernels want them, and are turned when they get other places. Each turn
rounds once more in what the store keeps; kernels/native/kept.h says how that is held small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from orchard.core.errors import BadFile, ConfigError, UsageError
from orchard.generate.memory.choose import check_budget, choose
from orchard.generate.memory.protocol import Scoring
from orchard.ops.kernels.native.kept import KeptSequence
from orchard.ops.kernels.native.program import Stores

if TYPE_CHECKING:
    from orchard.generate.native import NativeRunner

LAST = 64
"""Tokens read last whose attention is what "snap" scores by."""
POOL = 5
"""Neighbours over which those scores are averaged."""


class NativeKept:
    """See `protocol.Kept`. One caller at a time."""

    def __init__(
        self,
        runner: NativeRunner,
        *,
        budget: int,
        block: int,
        sinks: int = 4,
        scoring: Scoring = "recent",
        heads: Literal["uniform", "flat"] = "uniform",
        newest: int | None = None,
        budgets: Sequence[int] | None = None,
        stores: Stores | None = None,
        sequence: int = 0,
    ) -> None:
        """`newest`: so many of the last tokens always stay (None: as the scoring says). `budgets`: by layer that has a store,
        from the beginning on. `stores`: where this is one `sequence` among others; its own otherwise."""
        if block < 1 or sinks < 0 or (newest or 0) < 0:
            raise ConfigError(
                f"{sinks} sinks, {newest} newest and blocks of {block}", hint="use none or more, blocks ≥ 1"
            )
        if scoring not in get_args(Scoring) or heads not in ("uniform", "flat"):
            raise ConfigError(
                f"no scoring {scoring!r} with {heads!r} heads",
                hint=f"use one of {', '.join(get_args(Scoring))}, and 'uniform' or 'flat'",
            )
        self.budget, self.block, self.sinks, self.scoring, self.heads = budget, block, sinks, scoring, heads
        self.runner = runner
        self._newest = newest
        given = [budget] * len(runner.plan.stores) if budgets is None else list(budgets)
        check_budget(budget, sinks, self._stay(budget))
        self._check(given)
        self._stores = runner.program.stores(1, 0) if stores is None else stores
        self._kept = KeptSequence(runner.program, self._stores, sequence, given, block)
        self._seen: list[np.ndarray] | None = None
        """What a probe found, by head, for the tokens that were there."""
        self._last: list[int] = []
        """The newest tokens, of those read since some were forgotten."""
        self.peak = 0

    # What there is ----------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        return max(self._kept.used)

    @property
    def budgets(self) -> list[int]:
        """By layer that has a store."""
        return list(self._kept.budgets)

    @property
    def room(self) -> int:
        """Tokens that can be read before some must go."""
        return self._kept.room

    @property
    def nbytes(self) -> int:
        """Rows that look and are not kept have their place in this too."""
        return self._kept.memory

    def keys(self, layer: int) -> np.ndarray:
        """Heads that hold fewer tokens than others begin with zeros."""
        found = self._kept.read(self._store_of(layer))
        longest = max(len(head) for head in found)
        return np.stack([np.pad(head, ((longest - len(head), 0), (0, 0))) for head in found])

    # Reading, looking, forgetting -----------------------------------------------------------------------------------------

    def read(self, tokens: Sequence[int], wanted: int = 0) -> np.ndarray:
        ids = self._ids(tokens)
        if not 0 <= wanted <= len(ids):
            raise UsageError(f"{wanted} scores of {len(ids)} tokens", hint="ask for as many as are read, or fewer")
        scores = np.empty((wanted, self.runner.plan.vocab), np.float32)
        for at in range(0, len(ids), self.block):
            part = ids[at : at + self.block]
            if len(part) > self._kept.room:
                self._make_room(len(part))
            start = max(0, at - (len(ids) - wanted))
            count = max(0, at + len(part) - (len(ids) - wanted)) - start
            self._kept.run(part, count, scores[start : start + count], prompt=len(ids) > 1)
            self._last = [*self._last, *part.tolist()][-LAST:]
            self.peak = max(self.peak, self.used)
        return scores

    def probe(self, tokens: Sequence[int]) -> None:
        found = self._kept.watch(self._ids(tokens))
        if self._seen is not None:
            for before, now in zip(self._seen, found, strict=True):
                np.maximum(now[: len(before)], before, out=now[: len(before)])
        self._seen = found

    def evict(self, budgets: Sequence[int] | None = None) -> None:
        kept, used = self._kept, list(budgets) if budgets is not None else self._kept.budgets
        self._check(used)
        scores, first = self._scores(), 0
        slots: list[np.ndarray] = []
        for budget, heads in zip(used, kept.heads, strict=True):
            share = scores[first : first + heads]
            first += heads
            slots += choose(share, budget, sinks=self.sinks, newest=self._stay(budget), flat=self.heads == "flat")
        kept.compact(slots, used)
        self._seen, self._last = None, []

    def back(self, tokens: int) -> None:
        """Forget the newest tokens, which must have been read since some were last forgotten to make room."""
        self._kept.back(tokens)
        self._last = self._last[: max(0, len(self._last) - tokens)]
        if self._seen is not None:
            self._seen = [seen[:count] for seen, count in zip(self._seen, self._kept.counts, strict=True)]

    def clear(self) -> None:
        """Forget everything."""
        self._kept.compact([np.empty(0, np.int32)] * len(self._kept.counts))
        self._seen, self._last = None, []

    # Out and in again ---------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, np.ndarray]:
        kept = self._kept
        return {
            "held": kept.take(),
            "counts": kept.counts,
            "budgets": np.array([self.budget, self.block, self.sinks, *kept.budgets], np.int64),
            "last": np.array(self._last, np.int64),
            "peak": np.array([self.peak], np.int64),
            "model": np.frombuffer(bytes.fromhex(self.runner.signature), np.uint8).copy(),
        }

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        hint = "read the conversation again"
        try:
            held, counts, last = arrays["held"], arrays["counts"], [int(token) for token in arrays["last"]]
            budget, block, sinks, *budgets = (int(number) for number in arrays["budgets"])
            peak, model = int(arrays["peak"][0]), arrays["model"].tobytes().hex()
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise BadFile(f"this is no saved conversation: {error}", hint=hint) from None
        if model != self.runner.signature:
            raise BadFile("this conversation was kept for another model", hint=hint)
        if (budget, block, sinks) != (self.budget, self.block, self.sinks):
            raise BadFile(
                f"this conversation was kept in {budget} + {block} tokens with {sinks} sinks, and this is for"
                f" {self.budget} + {self.block} with {self.sinks}",
                hint=hint,
            )
        try:
            if last and (self._ids(last).size > min(LAST, int(np.min(counts)))):
                raise ValueError("more last tokens than are kept")
            self._kept.restore(counts, held, budgets)
        except (ValueError, UsageError) as error:
            raise BadFile(f"this saved conversation is damaged: {error}", hint=hint) from None
        self._seen, self._last, self.peak = None, last, peak

    # Inside -----------------------------------------------------------------------------------------------------------

    def _make_room(self, tokens: int) -> None:
        if self.scoring == "probe":
            raise UsageError(
                f"{tokens} tokens do not fit beside {self.used} with a budget of {self.budget} + {self.block}",
                hint="probe and evict before reading more",
            )
        self.evict()

    def _scores(self) -> list[np.ndarray]:
        """What each token is worth, by head."""
        counts = self._kept.counts
        if self.scoring == "recent":
            return [np.arange(count, dtype=np.float32) for count in counts]
        if self.scoring == "keydiff":
            return [unlike(keys) for store in range(len(self._kept.heads)) for keys in self._kept.read(store)]
        if self.scoring == "snap":
            if not self._last:
                return [np.zeros(count, np.float32) for count in counts]
            found = self._kept.watch(np.array(self._last, np.int32), again=True)
            return [smoothed(score, POOL) for score in found]
        if self._seen is None:
            raise UsageError("nothing has looked at what is kept", hint="probe before evicting")
        # What came after the probe has not been looked at, and stays before all others.
        unseen = np.float32(np.finfo(np.float32).max)
        return [
            np.pad(seen, (0, count - len(seen)), constant_values=unseen)
            for seen, count in zip(self._seen, counts, strict=True)
        ]

    def _stay(self, budget: int) -> int:
        """How many of the newest tokens always stay."""
        if self._newest is not None:
            return self._newest
        return max(0, min(LAST, (budget - self.sinks) // 2)) if self.scoring == "snap" else 0

    def _check(self, budgets: Sequence[int]) -> None:
        stores = len(self.runner.plan.stores)
        if len(budgets) != stores:
            raise UsageError(
                f"{len(budgets)} budgets for {stores} layers that have a store", hint="give one budget for each"
            )
        if sum(budgets) > self.budget * stores:
            raise UsageError(
                f"budgets of {sum(budgets) / stores:.0f} tokens on average are above {self.budget}",
                hint="share out what there is: budgets add up to budget × layers at most",
            )
        for budget in set(budgets):
            check_budget(budget, self.sinks, self._stay(budget))

    def _ids(self, tokens: Sequence[int]) -> np.ndarray:
        ids = np.asarray(tokens, np.int64)
        if ids.ndim != 1 or not len(ids):
            raise UsageError("no tokens to read", hint="give at least one token id")
        if ids.min() < 0 or ids.max() >= self.runner.plan.vocab:
            raise UsageError(
                "a token id is outside the vocabulary", hint="encode the text with this model's own tokenizer"
            )
        return ids.astype(np.int32)

    def _store_of(self, layer: int) -> int:
        for store, spec in enumerate(self.runner.plan.stores):
            if spec.layer == layer:
                return store
        raise UsageError(f"layer {layer} has no store of its own", hint="ask for a layer that keeps keys and values")


def unlike(keys: np.ndarray) -> np.ndarray:
    """Minus the cosine of each key [tokens, D] with the mean of all normalised ones (KeyDiff)."""
    whole = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12)
    anchor = whole.mean(0)
    worth: np.ndarray = -(whole @ anchor) / max(float(np.linalg.norm(anchor)), 1e-8)
    return worth


def smoothed(scores: np.ndarray, pool: int) -> np.ndarray:
    """The mean over neighbours, of which there are fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(scores, dtype=np.float64)])
    first = np.maximum(np.arange(len(scores)) - pool // 2, 0)
    last = np.minimum(np.arange(len(scores)) + pool // 2 + 1, len(scores))
    return ((sums[last] - sums[first]) / (last - first)).astype(np.float32)
