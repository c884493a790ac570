"""Adafactor (arXiv 1804.04235): the second moment of a matrix as the product of its rows' and its columns' means.

A matrix of n × m keeps n + m numbers instead of n·m; a stack of matrices keeps them for each. Vectors keep their whole second
moment. There is no first moment unless `momentum` asks for one. Rows and columns are taken over the last two axes, which also
works on DTensor parameters (torch adds up the means over shards); nothing else here needs to know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.train.optim.base import Optimizer, State, count
from orchard.train.optim.groups import Named, Rules


class Adafactor(Configurable, Optimizer):
    """x -= lr · u / max(1, rms(u) / clip), with u the gradient over the root of the second moment. Decay is decoupled."""

    @config
    class Config(BaseConfig):
        lr: float = 1e-2
        """A share of each parameter's own size where `relative`, otherwise a step in its own units."""
        relative: bool = True
        power: float = 0.8
        """After t steps, a share 1 - t^-power of the second moment is kept."""
        clip: float = 1.0
        eps: float = 1e-30
        smallest_scale: float = 1e-3
        """What a parameter's own size counts as, at least."""
        momentum: float | None = None
        decay: float = 0.0
        narrow: str = "float32"
        rules: Rules.Config = field(default_factory=Rules.Config)

    def __init__(self, cfg: Config, *, named_parameters: Named) -> None:
        super().__init__(cfg, named_parameters)

    def update(self, group: dict[str, Any], items: Sequence[tuple[Tensor, Tensor, State]]) -> None:
        cfg = self.config
        for value, gradient, state in items:
            new = count(state) ** -cfg.power
            step = gradient / self._root(gradient.square() + cfg.eps, state, new)
            step = step / (rms(step) / cfg.clip).clamp_min(1)
            if cfg.momentum is not None:
                step = _averaged(state, "m", step, 1 - cfg.momentum)
            scale = rms(value).clamp_min(cfg.smallest_scale) if cfg.relative else 1.0
            value.mul_(1 - group["lr"] * group["decay"])
            value.sub_(step * (group["lr"] * scale))

    def _root(self, square: Tensor, state: State, new: float) -> Tensor:
        if square.ndim < 2:
            return _averaged(state, "v", square, new).sqrt()
        rows = _averaged(state, "rows", square.mean(-1), new)  # [..., n]
        columns = _averaged(state, "columns", square.mean(-2), new)  # [..., m]
        return (rows / rows.mean(-1, keepdim=True))[..., None].sqrt() * columns[..., None, :].sqrt()


def rms(x: Tensor) -> Tensor:
    """Root of the mean square of all numbers."""
    return x.square().mean().sqrt()


def _averaged(state: State, name: str, value: Tensor, new: float) -> Tensor:
    """A running average of which `new` is the share of the newest."""
    if name not in state:
        state[name] = torch.zeros_like(value)
    average: Tensor = state[name]
    return average.lerp_(value, new)
