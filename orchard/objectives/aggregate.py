"""From rewards to advantages: how much better an answer was than others to the same prompt.

`aggregate(rewards [B] or [B, objectives], groups [B]) → advantages [B]`. Rows of one group have to come in one batch: a group
cut in two is two groups. Where that cannot be promised (very small micro-batches), work the advantages out beforehand, hand
them over as rewards and use `Baseline`, which takes them as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import UsageError


class Aggregate(ABC):
    """The contract. Several objectives are added up with the weights of the config, before or after each is compared."""

    config: Any

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        table = rewards[:, None] if rewards.ndim == 1 else rewards
        weights = self.config.objectives
        if weights is not None and len(weights) != table.shape[1]:
            raise UsageError(
                f"{len(weights)} weights for {table.shape[1]} objectives", hint="give each objective one weight"
            )
        table = table if table.dtype == torch.float64 else table.float()
        factors = table.new_tensor(weights if weights is not None else [1.0] * table.shape[1])
        _, members = groups.unique(return_inverse=True)
        if self.config.each:
            return self.compare(table, members) @ factors
        return self.compare((table @ factors)[:, None], members)[:, 0]

    @abstractmethod
    def compare(self, rewards: Tensor, members: Tensor) -> Tensor:
        """Advantages [B, O] of rewards [B, O]; `members` [B] numbers the groups from 0."""


class GroupNormal(Configurable, Aggregate):
    """Reward less the group's mean, over the group's standard deviation: GRPO (arXiv 2402.03300). With `std=False` it is Dr. GRPO
    (arXiv 2503.20783), which does not favour prompts on which answers happen to agree. The deviation is the population's."""

    @config
    class Config(BaseConfig):
        objectives: list[float] | None = None
        """A weight for each objective; None: 1."""
        each: bool = False
        """Compare each objective by itself and add up what comes out, rather than add up rewards and compare."""
        std: bool = True
        eps: float = 1e-4

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def compare(self, rewards: Tensor, members: Tensor) -> Tensor:
        centred = rewards - group_mean(rewards, members)
        if not self.config.std:
            return centred
        return centred / (group_mean(centred.square(), members).sqrt() + self.config.eps)


class LeaveOneOut(Configurable, Aggregate):
    """Reward less the mean of the others in the group: RLOO (arXiv 2402.14740), whose baseline is independent of the answer it
    is for. An answer without others has nothing to be compared with: 0."""

    @config
    class Config(BaseConfig):
        objectives: list[float] | None = None
        each: bool = False

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def compare(self, rewards: Tensor, members: Tensor) -> Tensor:
        count = group_sum(torch.ones_like(rewards), members)
        others = (group_sum(rewards, members) - rewards) / (count - 1).clamp_min(1)
        return torch.where(count > 1, rewards - others, 0)


class Baseline(Configurable, Aggregate):
    """Reward less a number that is the same for all: plain REINFORCE, and with 0 the rewards as they are."""

    @config
    class Config(BaseConfig):
        objectives: list[float] | None = None
        each: bool = False
        value: float = 0.0

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def compare(self, rewards: Tensor, members: Tensor) -> Tensor:
        return rewards - self.config.value


def group_sum(values: Tensor, members: Tensor) -> Tensor:
    """Each row's sum over its group: [B, O]."""
    groups = int(members.max()) + 1 if len(members) else 0
    return values.new_zeros(groups, values.shape[1]).index_add(0, members, values)[members]


def group_mean(values: Tensor, members: Tensor) -> Tensor:
    """Each row's mean over its group: [B, O]."""
    return group_sum(values, members) / group_sum(torch.ones_like(values), members)
