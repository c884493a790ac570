"""Rows become batches: arrays of token ids, targets, positions and document numbers; each process gets its part.

All processes of a run walk the same stream and take their own rows of every batch. So together they see what one process would
see, in its order, and a state is the same whoever took it: a run may go on with another number of processes. The price is
that each process encodes everything; with a prefetcher that is hidden as long as encoding is faster than training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from orchard.core.batch import IGNORED, Batch, Origins, PairBatch
from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import UsageError
from orchard.data.errors import at_least, check_choice
from orchard.data.order import nothing
from orchard.data.shares import Shares
from orchard.data.source import Pair, Sample
from orchard.text.tokenizer import Tokenizer


class Batches(Shares[Any]):
    """`rows` rows a step, over all processes: `Batch`, or `PairBatch` where there are preferences."""

    @config
    class Config(BaseConfig):
        source: BaseConfig = REQUIRED
        rows: int = REQUIRED
        """Rows of a step, of all processes together."""
        length: int = REQUIRED
        """The width of a row at most; taken from a `Pack` below where there is one."""
        multiple: int = 0
        """0: rows have the full width. Else they are as wide as the longest of the step, rounded up to a multiple of this."""
        last: str = "pad"
        """The last rows of a stream that ends: `pad` with empty rows to a whole batch, or `drop` them."""

        def wire(self) -> None:
            if self.length is REQUIRED and hasattr(self.source, "length"):
                self.length = self.source.length

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        check_choice("last", cfg.last, ("pad", "drop"))
        at_least("rows", cfg.rows, 1)
        at_least("multiple", cfg.multiple, 0)
        super().__init__(cfg.rows, [cfg.source.build(tokenizer=tokenizer)])
        self.cfg = cfg

    def __next__(self) -> Batch | PairBatch:
        taken: list[Any] = []
        while len(taken) < self.cfg.rows:
            try:
                taken.append(next(self.sources[0]))
            except StopIteration:
                break
        if not taken and not self.given:
            raise UsageError(*nothing(self.sources[0]), hint="look at on_bad and too_long, and at the files")
        if not taken or (len(taken) < self.cfg.rows and self.cfg.last == "drop"):
            raise StopIteration
        self.given += 1
        if isinstance(taken[0], Pair):
            chosen, rejected = ([(getattr(pair, side),) for pair in taken] for side in ("chosen", "rejected"))
            width = self._width([*chosen, *rejected])
            return PairBatch(self._batch(chosen, width), self._batch(rejected, width))
        return self._batch(taken, self._width(taken))

    def _width(self, rows: Sequence[Sequence[Sample]]) -> int:
        """The same for all processes."""
        if not self.cfg.multiple:
            return self.cfg.length
        longest = max(sum(map(len, row)) for row in rows)
        return min(-(-longest // self.cfg.multiple) * self.cfg.multiple, self.cfg.length)

    def _batch(self, rows: Sequence[Sequence[Sample]], width: int) -> Batch:
        return laid_out(rows[self.mine], self.rows // self.world, width)


def laid_out(rows: Sequence[Sequence[Sample]], count: int, width: int) -> Batch:
    """Documents side by side in `count` rows; positions start at 0 in each."""
    ids = np.zeros((count, width), np.int64)
    targets = np.full((count, width), IGNORED, np.int64)
    positions = np.full((count, width), -1, np.int64)
    documents = np.full((count, width), -1, np.int64)
    for number, row in enumerate(rows):
        at = 0
        for document, sample in enumerate(row):
            end = at + len(sample)
            ids[number, at:end] = sample.ids[:-1]
            targets[number, at:end] = sample.targets()
            positions[number, at:end] = np.arange(len(sample))
            documents[number, at:end] = document
            at = end
    plain = len(rows) == count and all(len(row) == 1 and len(row[0]) == width for row in rows)
    full = bool((targets != IGNORED).all())
    origins = Origins(_origin(row) for row in rows)
    return Batch(ids, targets, positions, documents, plain=plain, full=full, origins=origins)


def _origin(row: Sequence[Sample]) -> str:
    """The files and lines a row comes from, the first few."""
    named = list(dict.fromkeys(sample.place for sample in row if sample.place))
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
