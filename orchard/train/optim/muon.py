"""Muon: hidden matrices take steps in which all directions are equally long; everything else is AdamW's.

A matrix's momentum is replaced by the nearest orthogonal matrix (orthogonal.py), so directions that gradients rarely take are
learnt as fast as frequent ones. Keller Jordan 2024; at scale arXiv 2502.16982. Embeddings, heads, norms and biases go to
AdamW, by the rules of groups.py; a stack of experts' matrices [experts, n, m] is as many matrices.

`scale` says how long a step is: "adam" is 0.2·√max(n, m), the size of AdamW's steps, so that its lr and decay fit both
(arXiv 2502.16982); "shape" is √max(1, n/m), for an lr of its own (`matrix_lr`, 0.02 is usual).

On DTensor parameters each process gathers the whole momentum, orthogonalises it and keeps its own shard: right, and
simple, at the price of doing the same work on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError
from orchard.train.optim.adamw import adamw_update
from orchard.train.optim.base import Optimizer, State
from orchard.train.optim.groups import Group, Named, Rules
from orchard.train.optim.orthogonal import orthogonalize

Item = tuple[Tensor, Tensor, State]
TOGETHER = 1 << 26
"""So many numbers are orthogonalised at once."""


class Muon(Configurable, Optimizer):
    """One momentum in float32 per hidden matrix, AdamW's two moments for the rest."""

    @config
    class Config(BaseConfig):
        lr: float = 3e-4
        matrix_lr: float | None = None
        """The lr of hidden matrices; None: `lr`."""
        momentum: float = 0.95
        nesterov: bool = True
        steps: int = 5
        scale: str = "adam"
        betas: tuple[float, float] = (0.9, 0.95)
        eps: float = 1e-8
        decay: float = 0.1
        fused: bool | None = None
        """For AdamW's share; see there."""
        narrow: str = "float32"
        rules: Rules.Config = field(default_factory=Rules.Config)

        def wire(self) -> None:
            if self.scale not in ("adam", "shape"):
                raise ConfigError(f"scale is {self.scale!r}", hint="use adam or shape")

    def __init__(self, cfg: Config, *, named_parameters: Named) -> None:
        super().__init__(cfg, named_parameters)

    def settings(self, group: Group) -> dict[str, Any]:
        lr = self.config.matrix_lr if group.matrix and self.config.matrix_lr is not None else self.config.lr
        return {"lr": lr, "initial_lr": lr}

    def update(self, group: dict[str, Any], items: Sequence[Item]) -> None:
        cfg = self.config
        if not group["matrix"]:
            adamw_update(group, items, betas=cfg.betas, eps=cfg.eps, fused=cfg.fused)
            return
        for some in _alike(items):
            steps = self._directions([self._way(value, gradient, state) for value, gradient, state in some])
            for (value, _, _), step in zip(some, steps):
                value.mul_(1 - group["lr"] * group["decay"])
                value.sub_(step, alpha=group["lr"] * self._length(value.shape))

    def _way(self, value: Tensor, gradient: Tensor, state: State) -> Tensor:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(value)
        momentum: Tensor = state["momentum"]
        momentum.lerp_(gradient, 1 - self.config.momentum)
        return gradient.lerp(momentum, self.config.momentum) if self.config.nesterov else momentum

    def _length(self, shape: torch.Size) -> float:
        rows, columns = shape[-2:]
        if self.config.scale == "adam":
            return float(0.2 * max(rows, columns) ** 0.5)
        return float(max(1.0, rows / columns) ** 0.5)

    def _directions(self, ways: list[Tensor]) -> Sequence[Tensor]:
        first: Any = ways[0]
        if not hasattr(first, "full_tensor"):
            return orthogonalize(torch.stack(ways), steps=self.config.steps).unbind()
        from torch.distributed.tensor import distribute_tensor

        whole: list[Any] = ways
        found = orthogonalize(torch.stack([way.full_tensor() for way in whole]), steps=self.config.steps)
        return [
            distribute_tensor(one, way.device_mesh, way.placements, src_data_rank=None)
            for one, way in zip(found, whole)
        ]


def _alike(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Parameters of one shape together, up to `TOGETHER` numbers: a GPU then gets a few large products, not many small ones."""
    kinds: dict[Any, list[Item]] = {}
    for item in items:
        kinds.setdefault((item[0].shape, item[0].dtype, item[0].device, type(item[0])), []).append(item)
    for (shape, *_), members in kinds.items():
        size = max(1, TOGETHER // shape.numel())
        for start in range(0, len(members), size):
            yield members[start : start + size]
