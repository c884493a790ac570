"""Policies that keep the tokens with the best scores: at most `budget` per key/value head, and a block of new ones.

A sequence is read in blocks. When the next one would not fit, every kept token of a layer gets a score, the best `budget` stay,
and what stays is numbered anew so that it ends where it ended before: a token's place says how many kept ones are after it, and
not how long ago it was. Keys are therefore kept unrotated, whatever the codec, and turned to their places when they are read;
nothing is rounded twice however often it moves. The first tokens (`sinks`) always stay: models lean on them (arXiv 2309.17453).

`heads` says among whom tokens compete: "uniform", where each head keeps as many, or "flat", where the heads of a layer share
budget × heads slots and one may keep more than another (as in Ada-KV, arXiv 2407.11550).

Shapes: B sequences, H key/value heads, S slots, D head width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from orchard.cache.policies.base import Placement, Policy, Slots
from orchard.cache.policies.head_slots import FlatSlots, HeadSlots
from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Watch
from orchard.core.errors import ConfigError, UsageError


@config
class ScoredConfig(BaseConfig):
    """What all of them are told."""

    budget: int = REQUIRED
    """Tokens per key/value head that stay (on average over the heads of a layer where they are "flat")."""
    block: int = REQUIRED
    """Tokens that can be read before some have to go."""
    sinks: int = 4
    newest: int | None = None
    """The last so many tokens also stay, whatever their scores; None: as the policy thinks best, mostly none."""
    heads: Literal["uniform", "flat"] = "uniform"


class Scored(Configurable, Policy):
    """Subclasses say what a token is worth."""

    per_layer = True
    unrotated = True
    by_itself: bool = True
    """Whether scores are at hand whenever room is needed."""

    def __init__(self, cfg: ScoredConfig) -> None:
        self.config = cfg
        self.budget, self.block, self.sinks = cfg.budget, cfg.block, cfg.sinks
        self.can_rewind = False  # what was forgotten cannot come back
        if cfg.sinks < 0 or (cfg.newest or 0) < 0 or cfg.block < 1:
            raise ConfigError(
                f"{cfg.sinks} sinks, {cfg.newest} newest and blocks of {cfg.block}", hint="use none or more, blocks ≥ 1"
            )
        if cfg.heads not in ("uniform", "flat"):
            raise ConfigError(f"heads cannot be {cfg.heads!r}", hint="use 'uniform' or 'flat'")
        self.check_budget(cfg.budget)

    def newest(self, budget: int) -> int:
        """How many of the last tokens always stay."""
        return self.config.newest or 0

    def check_budget(self, budget: int) -> None:
        always = self.sinks + self.newest(budget)
        if budget <= always:
            name = type(self).__name__
            raise ConfigError(
                f"{name} with a budget of {budget} tokens has no room beside the {always} that always stay",
                hint=f"use a budget above {always}, or fewer sinks",
            )

    def capacity(self, length: int) -> int:
        return min(length, self.budget + self.block)

    def slots(self, batch: int, heads: int, length: int, device: torch.device | None) -> HeadSlots:
        kind = FlatSlots if self.config.heads == "flat" else HeadSlots
        return kind(self, batch, heads, length, device)

    def place(self, slots: Slots, positions: Tensor, upto: int) -> Placement:
        return slots.place(positions, upto)

    def watch(self, slots: HeadSlots, placement: Placement, positions: Tensor, keys: Tensor) -> Watch | None:
        """Who wants to see the queries of this step. `positions` [B, 1, T] are theirs, `keys` [B, H, S, D] what they look at."""
        return None

    @abstractmethod
    def scores(self, slots: HeadSlots, keys: Callable[[], Tensor]) -> Tensor:
        """What each token is worth: [B, H, S] for the rotated keys [B, H, S, D]."""

    def choose(self, slots: HeadSlots, keys: Callable[[], Tensor], budget: int) -> Tensor:
        """Which slots stay: bool [B, H, S]."""
        self.check_budget(budget)
        held = slots.positions[:, :, : slots.reach(None)] >= 0
        scores = self.scores(slots, keys).float()
        if scores.shape != held.shape:
            raise UsageError(f"scores {tuple(scores.shape)} for slots {tuple(held.shape)}", hint="score what is held")
        place, count = torch.arange(held.shape[2], device=held.device), held.sum(-1, keepdim=True)
        always = (place < self.sinks) | (place >= count - self.newest(budget))
        scores = scores.nan_to_num(0.0).masked_fill(always, float("inf")).masked_fill(~held, float("-inf"))
        return best(scores, budget, flat=self.config.heads == "flat") & held


def best(scores: Tensor, budget: int, *, flat: bool) -> Tensor:
    """The highest `budget` of each head, or budget × heads of all heads of a layer; of equal ones the newest. Bool [B, H, S]."""
    batch, heads, slots = scores.shape
    # Newest first, and heads side by side: a stable sort then settles ties in favour of the newest, fairly among heads.
    lined = scores.flip(2).transpose(1, 2)
    lined = lined.reshape(batch, slots * heads, 1) if flat else lined
    budget = budget * heads if flat else budget
    order = lined.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    chosen = torch.zeros_like(lined, dtype=torch.bool).scatter_(1, order, True)
    return chosen.reshape(batch, slots, heads).transpose(1, 2).flip(2)
