"""The first few tokens and the last many: fixed memory for any length (StreamingLLM, arXiv 2309.17453).

What differs from the paper: positions stay absolute (keys are not re-rotated as they age). With a window no smaller than a
layer's own attention window this is exact; in a layer that attends globally it is an approximation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.cache.policies.base import Placement, Policy, Slots
from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import ConfigError


class Window(Configurable, Policy):
    """`sinks` fixed slots, then a ring of `window` slots."""

    tells = True

    @config
    class Config(BaseConfig):
        window: int = REQUIRED
        sinks: int = 0

    def __init__(self, cfg: Config) -> None:
        if cfg.window < 1 or cfg.sinks < 0:
            raise ConfigError(f"a window of {cfg.window} with {cfg.sinks} sinks holds nothing", hint="use window ≥ 1")
        self.config = cfg
        self.window = cfg.window
        self.sinks = cfg.sinks
        self.can_rewind = False  # what fell out of the ring cannot come back

    def capacity(self, length: int) -> int:
        return min(length, self.config.window + self.config.sinks)

    def native_window(self) -> tuple[int, int] | None:
        return self.config.window, self.config.sinks

    def place(self, slots: Slots, positions: Tensor, upto: int) -> Placement:
        sinks, ring = self.config.sinks, max(slots.capacity - self.config.sinks, 1)
        slot = torch.where(positions < sinks, positions, sinks + (positions - sinks) % ring)
        newest = positions.amax(1, keepdim=True)
        stays = (positions >= 0) & ((positions < sinks) | (positions > newest - ring))
        index = torch.where(stays, slot, slots.capacity)[:, None, :]
        stored = torch.where(stays, positions, -1)[:, None, :]
        if positions.shape[1] == 1:
            # One token replaces exactly the one that no longer counts: write first, then look.
            old = slots.positions.gather(2, index)
            left = stays[:, None, :] & (old >= 0) & (old != stored)
            slots.positions.scatter_(2, index, stored)
            seen = slots.positions[:, :, :upto]
            return Placement(index=index[:, 0], positions=seen, valid=seen >= 0, upto=upto, left=left)
        # Several tokens: the first of them may still need slots that the last of them will take.
        new = positions[:, None, :]
        before = slots.positions[:, :, :upto]
        first = torch.where(new >= 0, new, torch.iinfo(torch.long).max).amin(2, keepdim=True)
        valid = torch.cat([(before >= 0) & (before < first), new >= 0], dim=2)
        seen = torch.cat([before, new], dim=2)
        left = valid & (seen >= sinks) & (seen <= newest[:, :, None] - ring)
        slots.positions.scatter_(2, index, stored)
        return Placement(index=index[:, 0], positions=seen, valid=valid, upto=upto, with_new=True, left=left)
