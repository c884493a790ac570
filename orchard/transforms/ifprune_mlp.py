"""A gated MLP of which each sequence uses some hidden units.

Units come in two kinds: `shared` ones, always used, and `groups` of equally many that are chosen. What is used travels with the pass
(`Context.units`): for every layer how much each group counts, one row a sequence, or one a token where the choice changes on the way.
Without that the layer is the whole MLP. A mask in a batch is a product: rows of one batch use other units, so nothing can be
gathered; what runs one sequence gathers (`ifprune_gather`) or reads only what is chosen (`ifprune_resident`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchard.core.config import REQUIRED, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.mlp import GatedMLP


class SubnetMLP(GatedMLP):
    """down(act(gate(x)) · up(x) · m), with m of the sequence. Shared units come first."""

    @config
    class Config(GatedMLP.Config):
        place: int = REQUIRED
        """Which of the layers that choose this is, counted from 0."""
        groups: int = REQUIRED
        shared: int = 0

        def wire(self) -> None:
            GatedMLP.Config.wire(self)
            routed = self.hidden_dim - self.shared
            if self.groups < 1 or self.shared < 0 or routed < self.groups or routed % self.groups:
                raise ConfigError(
                    f"{self.hidden_dim} units less {self.shared} shared ones are not {self.groups} equal groups",
                    hint="use a number of groups that divides the rest",
                )

        @property
        def size(self) -> int:
            """Units of a group."""
            return int((self.hidden_dim - self.shared) // self.groups)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.config: Any = cfg

    def forward(self, x: Tensor, context: Context) -> Tensor:
        hidden = self.act(self.gate(x)) * self.up(x)
        weights = None if context.units is None else context.units.get(self.config.place)
        if weights is not None:
            hidden = hidden * self.spread(weights[:, -x.shape[1] :] if weights.shape[1] > 1 else weights).to(hidden.dtype)
        y: Tensor = self.down(hidden)
        return y

    def spread(self, weights: Tensor) -> Tensor:
        """Weights of groups [..., groups] as weights of units [..., hidden_dim]."""
        cfg = self.config
        wide = weights if cfg.size == 1 else weights.repeat_interleave(cfg.size, -1)
        if not cfg.shared:
            return wide
        return torch.cat([wide.new_ones(*wide.shape[:-1], cfg.shared), wide], -1)

    def units_of(self, groups: Tensor) -> Tensor:
        """The units of some groups, the shared ones before them."""
        cfg = self.config
        own = cfg.shared + (groups[:, None] * cfg.size + torch.arange(cfg.size, device=groups.device)).flatten()
        return torch.cat([torch.arange(cfg.shared, device=groups.device), own])
