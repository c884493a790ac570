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
from orchard.train.clip import Clip, Norm, Others
from orchard.train.parallel import Mesh
from orchard.train.parallel_pipeline import Pipeline
from orchard.train.parallel_shards import exchange
from orchard.train.parallel_sums import OtherTracks, anywhere, total
from orchard.train.schedule import set_rate

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
VALUE, WEIGHT, TOKENS = "", " ", "  "
"""Sums that are no parts of a loss, under names that no part has."""
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Taken:
    """What one step was."""

    loss: float
    weight: float
    norm: Norm
    rate: float
    """The factor of the base learning rate."""
    parts: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    """Targets that counted, of all processes."""
    stop: bool = False
    """Whether any process was asked to stop."""

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
        mesh: Mesh | None = None,
        around: Around = nullcontext,
    ) -> None:
        """`around`: entered for every step's forward and backward passes together, and left before the weights change."""
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.schedule = schedule
        self.clip = clip
        self.micro = micro
        self.dtype = dtype
        self.seed = seed
        self.mesh = mesh
        self.around = around
        self.pipeline = Pipeline(model, mesh) if mesh is not None and mesh.stages > 1 else None
        self.others: Others | None = self.pipeline
        if mesh is not None and mesh.other == "track":
            self.others = OtherTracks(mesh)

    def __call__(self, batch: Any, number: int, *, tokens: int = 0, stop: bool = False) -> Taken:
        """`tokens` and `stop` are this process's own; what comes back is of all of them."""
        # Processes that compute one layer together have to draw the same numbers, those with other data have to draw others.
        torch.manual_seed(fold(self.seed, "step", number, 0 if self.mesh is None else self.mesh.data_rank))
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self.around():
            sums = self._gradients(batch)
        count = torch.tensor(float(tokens), dtype=torch.float64, device=sums[VALUE].device)
        totals = self.totals(sums | {TOKENS: count})
        value, weight = totals.pop(VALUE), totals.pop(WEIGHT)
        rate = self.schedule(number)
        asked = stop if self.mesh is None else anywhere(stop, self.mesh)
        common: dict[str, Any] = {"tokens": int(totals.pop(TOKENS)), "stop": asked, "parts": totals}
        if not weight:  # nothing to learn from: the weights stay as they are
            return Taken(0.0, 0.0, Norm(0.0), rate, **common)
        norm = self.clip(self._trained(), scale=1 / weight, others=self.others)
        taken = Taken(value / weight, weight, norm, rate, **common)
        if taken.sound:
            set_rate(self.optimizer, rate)
            self.optimizer.step()
        return taken

    def totals(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Sums of all processes together."""
        names = sorted(sums)
        together = torch.stack([sums[name].double() for name in names])
        together = together if self.mesh is None else total(together, self.mesh)
        return dict(zip(names, together.tolist(), strict=True))

    def _gradients(self, batch: Any) -> dict[str, Tensor]:
        """Add the gradients of all micro-batches up; the sums of their losses."""
        size = self.micro or len(batch)
        if self.pipeline is not None:
            parts = [batch.part(start, start + size) for start in range(0, len(batch), size)]
            return self.pipeline.gradients(parts, self.objective, lambda: self._cast(batch))
        sums: dict[str, Tensor] = {}
        whole = self.mesh is not None and not self.mesh.config.shard  # then gradients need to be sent only once a step
        for start in range(0, len(batch), size):
            if whole:
                exchange(self.model, start + size >= len(batch))
            loss = self.loss(batch.part(start, start + size))
            loss.value.backward()
            for name, sum_ in named_sums(loss).items():
                sums[name] = sum_ if name not in sums else sums[name] + sum_
            del loss  # its graph may hold gradients of the head
        return sums

    def loss(self, batch: Any) -> Loss:
        if self.pipeline is not None and not torch.is_grad_enabled():
            return self.pipeline.loss(batch, self.objective, lambda: self._cast(batch))
        with self._cast(batch):
            return self.objective(self.model, batch)

    def _cast(self, batch: Any) -> AbstractContextManager[Any]:
        dtype = DTYPES[self.dtype]
        device = next(self.model.parameters()).device.type
        return nullcontext() if dtype is None else torch.autocast(device, dtype)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad)


def named_sums(loss: Loss) -> dict[str, Tensor]:
    """All that a loss adds up, in float64."""
    named = {VALUE: loss.value, WEIGHT: loss.weight, **loss.parts}
    return {name: value.detach().double() for name, value in named.items()}
