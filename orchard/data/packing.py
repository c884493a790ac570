"""Samples become rows of a fixed length: several documents a row, one a row, or long texts cut into consecutive pieces.

A sample of n tokens takes n - 1 places: its last token is only ever a target, and would teach nothing as an input.

Packing is first fit over a few open rows: a sample goes into the first of them that has room. Where none has, the fullest row is
closed as it is and a new one opened. So rows leave in about the order in which samples came, memory is bounded, and little is
padding, because short samples fill what long ones leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import ConfigError
from orchard.data.errors import BadSample, SampleTooLong, Tally, at_least, check_choice
from orchard.data.source import Pair, Sample, Stage, State, from_json, to_json
from orchard.text.tokenizer import Tokenizer

Filled = tuple[Sample, ...]
"""The documents of one row."""


class Pack(Stage[Any]):
    """Gives the documents of one row after the other; `Batches` lays them out. Pairs are one a row."""

    @config
    class Config(BaseConfig):
        source: BaseConfig = REQUIRED
        length: int = REQUIRED
        """Tokens of a row."""
        mode: str = "packed"
        """`packed`: several documents a row; `padded`: one a row; `cut`: as packed, long documents cut into pieces."""
        too_long: str = "stop"
        """A sample longer than a row: `stop`, `skip` it, or `cut` off its end. Under mode `cut` there is no such thing."""
        open_rows: int = 16
        """Rows that are filled at a time."""

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        check_choice("mode", cfg.mode, ("packed", "padded", "cut"))
        check_choice("too_long", cfg.too_long, ("stop", "skip", "cut"))
        at_least("length", cfg.length, 1)
        at_least("open_rows", cfg.open_rows, 1)
        tally = Tally("stop" if cfg.too_long == "stop" else "skip")
        settings = {name: getattr(cfg, name) for name in ("length", "mode", "too_long", "open_rows")}
        super().__init__([cfg.source.build(tokenizer=tokenizer)], tally, **settings)
        self.cfg = cfg
        self._open: list[list[Sample]] = []
        self._used: list[int] = []
        self._ready: list[list[Sample]] = []
        self.numbers = dict.fromkeys(("rows", "placed", "padding", "cut"), 0)

    def __next__(self) -> Filled | Pair:
        while not self._ready:
            try:
                item = next(self.sources[0])
            except StopIteration:
                if not self._open:
                    raise
                self._close(0)
                continue
            if isinstance(item, Pair):
                pair = self._fitting_pair(item)
                if pair is not None:
                    return pair
            else:
                for sample in self._fitting(item):
                    self._place(sample)
        return self._count(tuple(self._ready.pop(0)))

    def _place(self, sample: Sample) -> None:
        if self.cfg.mode == "padded":
            self._ready.append([sample])
            return
        size, length = len(sample), self.cfg.length
        for number, used in enumerate(self._used):
            if used + size <= length:
                self._open[number].append(sample)
                self._used[number] += size
                if used + size == length:
                    self._close(number)
                return
        if len(self._open) >= self.cfg.open_rows:
            self._close(self._used.index(max(self._used)))
        self._open.append([sample])
        self._used.append(size)
        if size == length:
            self._close(len(self._open) - 1)

    def _close(self, number: int) -> None:
        self._ready.append(self._open.pop(number))
        del self._used[number]

    def _fitting(self, sample: Sample) -> list[Sample]:
        """What of a sample can be placed: all, its beginning, its pieces, or nothing."""
        length = self.cfg.length
        if len(sample) > length and self.cfg.mode == "cut":
            self.numbers["cut"] += 1
            pieces = [sample.cut(start, min(start + length, len(sample))) for start in range(0, len(sample), length)]
        else:
            pieces = [self._shortened(sample)] if self._may_stay(sample) else []
        kept = [piece for piece in pieces if piece.learnt.any()]
        if not kept and pieces:
            self._leave_out(BadSample("no token of it is learnt", reason="nothing-to-learn", place=sample.place))
        return kept

    def _fitting_pair(self, pair: Pair) -> Pair | None:
        if self.cfg.mode == "cut":
            raise ConfigError("preferences cannot be cut into pieces", hint="use mode='padded'")
        if not all(self._may_stay(side) for side in (pair.chosen, pair.rejected)):
            return None
        short = Pair(self._shortened(pair.chosen), self._shortened(pair.rejected))
        if not (short.chosen.learnt.any() and short.rejected.learnt.any()):
            self._leave_out(BadSample("no token of it is learnt", reason="nothing-to-learn", place=pair.place))
            return None
        self.numbers["rows"] += 1
        return short

    def _may_stay(self, sample: Sample) -> bool:
        if len(sample) <= self.cfg.length or self.cfg.too_long == "cut":
            return True
        message = f"{len(sample.ids):,} tokens, and a row holds {self.cfg.length + 1:,}"
        hint = "use longer rows, or too_long='skip' or 'cut'"
        self._leave_out(SampleTooLong(message, reason="too-long", place=sample.place, hint=hint))
        return False

    def _shortened(self, sample: Sample) -> Sample:
        if len(sample) <= self.cfg.length:
            return sample
        self.numbers["cut"] += 1
        return sample.cut(0, self.cfg.length)

    def _leave_out(self, error: BadSample) -> None:
        assert self.tally is not None
        self.tally.add(error, harmless=not isinstance(error, SampleTooLong))

    def _count(self, row: Filled) -> Filled:
        used = sum(map(len, row))
        self.numbers["rows"] += 1
        self.numbers["placed"] += used
        self.numbers["padding"] += self.cfg.length - used
        return row

    def counts(self) -> dict[str, int]:
        return super().counts() | self.numbers

    def _own(self) -> State:
        own = {name: [[to_json(sample) for sample in row] for row in rows] for name, rows in self._rows().items()}
        return {"numbers": dict(self.numbers), **own}

    def _take(self, state: Mapping[str, Any]) -> None:
        self.numbers = {name: int(number) for name, number in state["numbers"].items()}
        for name, rows in self._rows().items():
            rows[:] = [[from_json(item) for item in row] for row in state[name]]
        self._used = [sum(map(len, row)) for row in self._open]

    def _rows(self) -> dict[str, list[list[Sample]]]:
        return {"open": self._open, "ready": self._ready}

    def _reset(self, epoch: int) -> None:
        self._open, self._ready, self._used = [], [], []
