"""Rotary positions as a part of attention: a base, the share of channels turned, and an optional stretch."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.nn.attention.scaling import Scaling
from orchard.ops import rope
from orchard.ops.plan.builder import Rotation


class Rotary(Configurable):
    """Turns queries and keys by their positions. Layers with equal configs share one step's tables."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        theta: float = 10_000.0
        fraction: float = 1.0
        scaling: BaseConfig | None = None

    def __init__(self, cfg: Config) -> None:
        self.config = cfg
        self.key = (Rotary, repr(cfg), type(cfg.scaling))
        self.scaling: Scaling | None = cfg.scaling.build() if cfg.scaling is not None else None
        with torch.device("cpu"):  # also while a model is built on the meta device
            rotated = int(cfg.dim * cfg.fraction) // 2 * 2
            plain = rope.frequencies(cfg.theta, rotated)
            scaled = plain if self.scaling is None else self.scaling.scale(plain, cfg.theta)
        self._frequencies: dict[torch.device, Tensor] = {scaled.device: scaled}

    def frequencies(self, device: torch.device) -> Tensor:
        """Float32, copied once to each device: never part of a checkpoint, never cast with the model."""
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        return self._frequencies[device]

    def native(self) -> Rotation:
        """The same as a table for a plan."""
        gain = 1.0 if self.scaling is None else self.scaling.gain
        return Rotation(self.frequencies(torch.device("cpu")).numpy(), gain)

    def __call__(self, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        """Rotate x [B, H, T, D] at positions [B, 1|H, T]. Tables for the step's own positions are made once."""

        def tables() -> tuple[Tensor, Tensor]:
            gain = 1.0 if self.scaling is None else self.scaling.gain
            return rope.tables(positions, self.frequencies(x.device), gain)

        cos, sin = context.once(self.key, tables) if positions is context.places else tables()
        return rope.rotate(x, cos, sin)
