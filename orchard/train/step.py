"""One step of learning: micro-batches one after another, their sums, one update.

Gradients of sums add up exactly whatever the cut, and are divided once by everything that counted, so a step does not depend on
how it was cut into micro-batches beyond the rounding of additions. Every step seeds its own random numbers from the run's seed
and its number: a run that goes on from a checkpoint draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.batch import Loss
from orchard.core.seeds import fold
from orchard.objectives.base import Objective
from orchard.train.clip import Clip, Norm
from orchard.train.schedule import set_rate

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
Summed = Callable[[Tensor], Tensor]
"""The sum of a value over all processes."""


@dataclass(frozen=True)
class Taken:
    """What one step was."""

    loss: float
    weight: float
    norm: Norm
    rate: float
    """The factor of the base learning rate."""
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether the weights were changed: not where the loss or a gradient is not finite."""
        return not self.norm.bad and self.loss == self.loss and abs(self.loss) != float("inf")


class Step:
    """`step(batch, number)` learns from a batch that is on the right device."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float],
        clip: Clip,
        *,
        micro: int | None,
        dtype: str,
        seed: int,
        summed: Summed | None = None,
        rank: int = 0,
    ) -> None:
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.schedule = schedule
        self.clip = clip
        self.micro = micro
        self.dtype = dtype
        self.seed = seed
        self.summed: Summed = summed or (lambda value: value)
        self.rank = rank

    def __call__(self, batch: Any, number: int) -> Taken:
        torch.manual_seed(fold(self.seed, "step", number, self.rank))
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        value, weight, parts = self._gradients(batch)
        rate = self.schedule(number)
        if not weight:  # nothing to learn from: the weights stay as they are
            return Taken(0.0, 0.0, Norm(0.0), rate, parts)
        norm = self.clip(self._trained(), scale=1 / weight)
        taken = Taken(value / weight, weight, norm, rate, parts)
        if taken.sound:
            set_rate(self.optimizer, rate)
            self.optimizer.step()
        return taken

    def _gradients(self, batch: Any) -> tuple[float, float, dict[str, float]]:
        size = self.micro or len(batch)
        sums: dict[str, Tensor] = {}
        for start in range(0, len(batch), size):
            loss = self.loss(batch.part(start, start + size))
            loss.value.backward()
            for name, sum_ in (("", loss.value), (" ", loss.weight), *loss.parts.items()):
                found = sum_.detach().double()
                sums[name] = found if name not in sums else sums[name] + found
            del loss  # its graph may hold gradients of the head
        names = sorted(sums)
        together = self.summed(torch.stack([sums[name] for name in names])).tolist()
        totals = dict(zip(names, together, strict=True))
        return totals.pop(""), totals.pop(" "), totals

    def loss(self, batch: Any) -> Loss:
        with self._cast(batch):
            return self.objective(self.model, batch)

    def _cast(self, batch: Any) -> AbstractContextManager[Any]:
        dtype = DTYPES[self.dtype]
        device = next(self.model.parameters()).device.type
        return nullcontext() if dtype is None else torch.autocast(device, dtype)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad)
