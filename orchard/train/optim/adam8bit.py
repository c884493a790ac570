"""AdamW with both moments in 8 bits: 2 bytes and two scales per 256 parameters instead of 8 bytes (arXiv 2110.02861).

What differs from the paper: of the second moment its root is kept. A root spans half the decades, so small entries of a block
are kept where the square would be lost, and an update is never divided by a zero that rounding made. Small tensors stay in
float32: they weigh nothing and are the most sensitive.

Blocks run over a parameter as it lies in memory. A sharded (DTensor) parameter's blocks are those of the local shard, so such a
state cannot be resharded: use AdamW or Adafactor where a run will go on with another number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.train.optim.adamw import adamw_update
from orchard.train.optim.base import Optimizer, State, count
from orchard.train.optim.blockwise import decode, encode
from orchard.train.optim.groups import Named, Rules


class AdamW8bit(Configurable, Optimizer):
    """The same update as AdamW's, from moments that were rounded after the step before."""

    @config
    class Config(BaseConfig):
        lr: float = 3e-4
        betas: tuple[float, float] = (0.9, 0.95)
        eps: float = 1e-8
        decay: float = 0.1
        smallest: int = 4096
        """Parameters with fewer numbers keep their moments in float32."""
        narrow: str = "float32"
        rules: Rules.Config = field(default_factory=Rules.Config)

    def __init__(self, cfg: Config, *, named_parameters: Named) -> None:
        super().__init__(cfg, named_parameters)

    def update(self, group: dict[str, Any], items: Sequence[tuple[Tensor, Tensor, State]]) -> None:
        cfg = self.config
        small = [item for item in items if item[0].numel() < cfg.smallest]
        adamw_update(group, small, betas=cfg.betas, eps=cfg.eps, fused=False)
        for value, gradient, state in items:
            if value.numel() >= cfg.smallest:
                self._one(group, local(value), local(gradient), state)

    def _one(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: State) -> None:
        (first, second), steps = self.config.betas, count(state)
        if "m" in state:
            m = decode(state["m"], state["m_scale"], signed=True)
            v = decode(state["root"], state["root_scale"], signed=False).square_()
        else:
            m, v = (torch.zeros_like(value, dtype=torch.float32) for _ in range(2))
        m.lerp_(gradient.float(), 1 - first)
        v.mul_(second).addcmul_(gradient.float(), gradient.float(), value=1 - second)
        value.mul_(1 - group["lr"] * group["decay"])
        root = v.sqrt_()
        spread = (root / (1 - second**steps) ** 0.5).add_(self.config.eps)
        value.addcdiv_(m, spread, value=-group["lr"] / (1 - first**steps))
        state["m"], state["m_scale"] = encode(m, signed=True)
        state["root"], state["root_scale"] = encode(root, signed=False)


def local(x: Tensor) -> Tensor:
    """A DTensor's own shard; any other tensor as it is. Writing into it writes into the parameter."""
    return x.to_local() if hasattr(x, "to_local") else x
