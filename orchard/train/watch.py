"""How a run is going: losses, tokens a second, the share of the machine's arithmetic, the time that is left."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from orchard.core.progress import lasting
from orchard.core.report import Value
from orchard.train.step import Taken
from orchard.train.watch_costs import costs_of
from orchard.train.watch_peak import Peak, peak_of

WINDOW = 20
"""Steps that speeds are taken over."""
LONG_WINDOW = 100
"""Steps that the time left is taken from: saving and measuring now and then belong to it."""


class Watch:
    """Told of every step; knows the curves and what to show."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        dtype: str = "float32",
        steps: int | None = None,
        processes: int = 1,
        measure: bool = True,
        curves: dict[str, list[Any]] | None = None,
    ) -> None:
        """`model` as a whole, before it is split over `processes`; `measure`: whether the peak of an unknown device may be."""
        self.curves: dict[str, list[Any]] = curves or {}
        self.costs = costs_of(model)
        self.device = device
        self.dtype = dtype
        self.steps = steps
        self.processes = processes
        self.measure = measure
        self._tokens = self._operations = 0.0
        self._marks: deque[tuple[float, float, float]] = deque(maxlen=WINDOW + 1)
        self._times: deque[float] = deque(maxlen=LONG_WINDOW + 1)
        self.begin()

    @cached_property
    def peak(self) -> Peak | None:
        """Of one device; found when it is first asked for."""
        return peak_of(self.device, self.dtype, measure=self.measure)

    def begin(self) -> None:
        """The first step begins now: what was before it (loading, going back to a checkpoint) is not part of its time."""
        now = time.perf_counter()
        self._marks.clear()
        self._times.clear()
        self._marks.append((now, self._tokens, self._operations))
        self._times.append(now)

    def note(
        self, number: int, taken: Taken, tokens: int, means: Mapping[str, float], batch: Any = None
    ) -> dict[str, float]:
        """Add step `number` (from 0) to the curves; answers what it adds.

        `tokens` are those of all processes that something was learnt from; `batch` is what this process read, from which its
        arithmetic is counted (without it, from the tokens alone).
        """
        now = time.perf_counter()
        self._tokens += tokens
        self._operations += self._cost(tokens, batch)
        self._marks.append((now, self._tokens, self._operations))
        self._times.append(now)
        point = {"loss": taken.loss, **means, "norm": taken.norm.value, "rate": taken.rate, "tokens/s": self.speed}
        if self.peak is not None:
            point["mfu"] = self.mfu
        for name, value in {"step": number + 1, **point}.items():
            self.curves.setdefault(name, []).append(value if math.isfinite(value) else None)
        return point

    @property
    def speed(self) -> float:
        """Tokens a second over the last steps, of all processes together."""
        return self._rate(1)

    @property
    def mfu(self) -> float:
        """The share of the devices' arithmetic that learning needs (arXiv 2204.02311; see `watch_costs`)."""
        return self._rate(2) / (self.peak.flops * self.processes) if self.peak is not None else math.nan

    def left(self, done: int) -> float | None:
        """Seconds until the last step, as the last steps went; None before there was one, or without a known end."""
        taken = len(self._times) - 1
        if self.steps is None or taken < 1:
            return None
        return max(0, self.steps - done) * (self._times[-1] - self._times[0]) / taken

    def words(self, number: int, point: Mapping[str, float]) -> str:
        """One line for a person. A `~` says that the peak was measured."""
        return in_words(point, measured=self.peak is not None and self.peak.measured)

    def values(self) -> dict[str, Value]:
        """What a Report says of the speed: the median of all steps, with quartiles."""
        found = [share for share in self.curves.get("mfu", []) if share is not None]
        if self.peak is None or not found:
            return {}
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        note = f"median of the steps, with quartiles; of {self.peak.words}"
        return {"MFU": Value(100 * middle, "%", 100 * low, 100 * high, note)}

    def _cost(self, tokens: int, batch: Any) -> float:
        own = getattr(batch, "tokens", 0)
        if not own:
            return self.costs.weights * tokens
        return self.costs.of(batch) * (tokens / own)

    def _rate(self, which: int) -> float:
        first, last = self._marks[0], self._marks[-1]
        return (last[which] - first[which]) / (last[0] - first[0]) if last[0] > first[0] else 0.0


class Lines:
    """Told of every step; says a plain line now and then, for logs: where there is no terminal, there is no bar.

    trainer.run(told=[Lines(say, steps=1000)])
    """

    def __init__(
        self,
        say: Callable[[str], object],
        *,
        steps: int | None = None,
        every: float = 30.0,
        measured: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`every`: seconds between two lines; the first step and the last are always told."""
        self._say, self._clock = say, clock
        self.steps, self.every, self.measured = steps, every, measured
        self._said: float | None = None
        self._times: deque[tuple[int, float]] = deque(maxlen=LONG_WINDOW + 1)

    def __call__(self, step: int, point: Mapping[str, float]) -> None:
        now = self._clock()
        self._times.append((step, now))
        if self._said is not None and now - self._said < self.every and step != self.steps:
            return
        self._said = now
        of = "" if self.steps is None else f" of {self.steps:,}"
        self._say(f"step {step:,}{of}: {in_words(point, measured=self.measured)}{self._left(step)}")

    def _left(self, step: int) -> str:
        (first, begun), (last, now) = self._times[0], self._times[-1]
        if self.steps is None or last <= first or step >= self.steps:
            return ""
        return f", {lasting((self.steps - step) * (now - begun) / (last - first))} left"


def in_words(point: Mapping[str, float], *, measured: bool = False) -> str:
    """`loss 2.3412, 12,345 tokens/s, 31 % MFU`, of what a step added to the curves."""
    parts = [f"loss {point['loss']:.4f}"] if "loss" in point else []
    if "tokens/s" in point:
        parts.append(f"{point['tokens/s']:,.0f} tokens/s")
    if "mfu" in point and math.isfinite(point["mfu"]):
        share = 100 * point["mfu"]
        parts.append(f"{'~' if measured else ''}{f'{share:.0f}' if share >= 10 else f'{share:.2g}'} % MFU")
    return ", ".join(parts)
