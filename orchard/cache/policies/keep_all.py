"""Every token keeps its slot."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.cache.policies.base import Placement, Policy, Slots
from orchard.core.config import BaseConfig, Configurable, config


class KeepAll(Configurable, Policy):
    """Slot number = position, so writing a position again replaces it."""

    tells = True  # nothing ever leaves

    @config
    class Config(BaseConfig):
        pass

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def capacity(self, length: int) -> int:
        return length

    def native_window(self) -> tuple[int, int] | None:
        return 0, 0

    def place(self, slots: Slots, positions: Tensor, upto: int) -> Placement:
        index = torch.where(positions >= 0, positions, slots.capacity)
        slots.positions.scatter_(2, index[:, None, :], positions[:, None, :])
        seen = slots.positions[:, :, :upto]
        return Placement(index=index, positions=seen, valid=seen >= 0, upto=upto)
