"""Different formats for different weights: the least total cost that fits into a budget.

`allocate` chooses one option for each weight of a `Sensitivity`: a knapsack with one item from each class. It is solved exactly
by dynamic programming over bytes, in steps of their greatest common divisor; where that would be more steps than `STEPS`, bytes
beyond each weight's smallest option are rounded up to coarser ones, which leaves at most one such step a weight unused. More
budget never costs more.

`Mixed` puts formats into a tree and rounds to nearest. `Gptq(formats=…, targets=())` and `Awq(formats=…, targets=())` do better
with the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.errors import UsageError
from orchard.transforms.base import M, Tell, Transform, silent
from orchard.transforms.rtn import Rtn
from orchard.transforms.sensitivity_record import Option, Sensitivity

STEPS = 1 << 16
"""Steps of bytes that are told apart."""


class BudgetImpossible(UsageError):
    """Nothing that was to be chosen from fits. `smallest_bytes` and `smallest_bits` are the least that can be reached."""

    code = "budget-impossible"

    def __init__(self, message: str, *, hint: str = "", smallest_bytes: int = 0, smallest_bits: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.smallest_bytes = smallest_bytes
        self.smallest_bits = smallest_bits


def allocate(
    sensitivity: Sensitivity,
    *,
    budget_bits_per_weight: float | None = None,
    budget_bytes: int | None = None,
    fixed: int | None = None,
    weights: int | None = None,
) -> dict[str, BaseConfig]:
    """A format for each path. The budget is for everything: `fixed` bytes are what else there is (None: the other tensors as the
    model kept them), and bits per weight are counted over `weights` values (None: those of the model that was measured), which
    should be the original's."""
    if (budget_bits_per_weight is None) == (budget_bytes is None):
        raise UsageError("a budget is either bits per weight or bytes", hint="give one of the two")
    values = sensitivity.weights if weights is None else weights
    if values < 1 or not sensitivity.options:
        raise UsageError("there are no weights to share a budget", hint="measure sensitivity of some weights first")
    beside = sensitivity.rest if fixed is None else fixed
    wanted = float(budget_bits_per_weight * values / 8 if budget_bits_per_weight is not None else budget_bytes or 0)
    if not math.isfinite(wanted) or wanted < 0:
        raise UsageError(f"a budget of {wanted} bytes", hint="use a number above zero")
    paths = list(sensitivity.options)
    options = [_useful(sensitivity.options[path]) for path in paths]
    smallest = beside + sum(found[0].nbytes for found in options)
    if wanted < smallest:
        bits = 8 * smallest / values
        raise BudgetImpossible(
            f"{_size(wanted, values)} cannot be reached: the smallest is {_size(smallest, values)}",
            hint=f"ask for at least {math.ceil(bits * 1000) / 1000:.3f} bits per weight ({smallest:,} bytes), "
            "or offer smaller formats",
            smallest_bytes=smallest,
            smallest_bits=bits,
        )
    picked = _knapsack(options, math.floor(wanted) - smallest)
    return {path: found[at].format for path, found, at in zip(paths, options, picked, strict=True)}


def _size(nbytes: float, values: int) -> str:
    return f"{8 * nbytes / values:.3f} bits per weight ({math.ceil(nbytes):,} bytes)"


def _useful(options: tuple[Option, ...]) -> list[Option]:
    """By size, without those that cost no less than a smaller one."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda one: (one.nbytes, one.cost)):
        if not kept or option.cost < kept[-1].cost:
            kept.append(option)
    return kept


def _knapsack(options: list[list[Option]], room: int) -> list[int]:
    """The place of the chosen option in each list, sorted by size; `room` is what may be added to all the smallest."""
    more = [[option.nbytes - found[0].nbytes for option in found] for found in options]
    largest = sum(sizes[-1] for sizes in more)
    unit = max(1, math.gcd(*(size for sizes in more for size in sizes)))
    if largest // unit > STEPS:  # never depends on the budget: a larger one could then cost more
        unit = -(-largest // STEPS)
    steps = [[-(-size // unit) for size in sizes] for sizes in more]
    held = min(room // unit, sum(sizes[-1] for sizes in steps))
    best = np.zeros(held + 1)
    choices: list[np.ndarray] = []
    for found, sizes in zip(options, steps, strict=True):
        tried = np.full((len(found), held + 1), np.inf)
        for at, (option, size) in enumerate(zip(found, sizes, strict=True)):
            if size <= held:
                tried[at, size:] = best[: held + 1 - size] + option.cost
        choices.append(tried.argmin(0).astype(np.uint8 if len(found) < 256 else np.int64))
        best = tried.min(0)
    picked, left = [], int(np.flatnonzero(best == best[held])[0])  # of equal costs the smallest
    for at in range(len(options) - 1, -1, -1):
        choice = int(choices[at][left])
        picked.append(choice)
        left -= steps[at][choice]
    return picked[::-1]


@dataclass(frozen=True)
class Mixed(Transform):
    """The transform: `Mixed(allocate(…)).apply(model)` changes these weights and no others, rounded to nearest."""

    formats: Mapping[str, BaseConfig]
    notes: list[str] = field(default_factory=list, init=False, compare=False, repr=False)
    """What the last `apply` did otherwise than it was asked, and why."""

    def __call__(self, tree: Any) -> Any:
        return self._rounding()(tree)

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        rounding = self._rounding()
        made = rounding.apply(model, texts, tell)
        self.notes[:] = rounding.notes
        return made

    def _rounding(self) -> Rtn:
        return Rtn(targets=(), formats=self.formats)
