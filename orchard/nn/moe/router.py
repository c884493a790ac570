"""What a router is, and token-choice routing: each token takes its k best experts.

Shapes: N tokens, E experts, K chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.formats.base import NativeWeight
from orchard.nn.linear import Linear
from orchard.nn.lowering import floats, native_of
from orchard.nn.moe.dispatch import Pairs, sort_by_expert


class Routed(Protocol):
    """What a router decided: scores [N, E], and which token meets which expert."""

    @property
    def logits(self) -> Tensor: ...

    def pairs(self) -> Pairs: ...


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to [N, K], with what weights [N, K], and the scores behind it [N, E]."""

    experts: Tensor
    weights: Tensor
    logits: Tensor

    def pairs(self) -> Pairs:
        """Tokens and experts, sorted by expert."""
        return sort_by_expert(self.experts, self.weights, self.logits.shape[-1])


@dataclass(frozen=True)
class NativeRouter:
    """What the native experts step asks of a router: softmax over the scores, the k best."""

    weight: NativeWeight
    bias: np.ndarray | None
    k: int
    renormalize: bool


class Router(nn.Module, ABC):
    """What a mixture asks of a router."""

    whole_rows: ClassVar[bool] = False
    """Whether a token's routing depends on tokens after it, so that text cannot be written with it token by token."""

    @abstractmethod
    def forward(self, x: Tensor, context: Context | None = None) -> Routed:
        """The routing of tokens [..., dim], in the order in which they lie."""


class TopK(Configurable, Router):
    """Softmax over all experts, then the k largest; `renormalize` makes the chosen weights sum to one."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        experts: int = REQUIRED
        k: int = 2
        renormalize: bool = True
        gate: Linear.Config = field(default_factory=Linear.Config)

        def wire(self) -> None:
            if not 1 <= self.k <= self.experts:
                raise ConfigError(f"{self.k} of {self.experts} experts cannot be chosen", hint="use 1 ≤ k ≤ experts")
            self.gate.in_dim, self.gate.out_dim = self.dim, self.experts

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.gate: Linear = cfg.gate.build()

    def forward(self, x: Tensor, context: Context | None = None) -> Routing:
        logits = self.gate(x.flatten(0, -2))
        weights, experts = torch.topk(logits.float().softmax(-1), self.config.k, dim=-1)
        if self.config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts=experts, weights=weights.to(x.dtype), logits=logits)

    def native(self) -> NativeRouter:
        return NativeRouter(native_of(self.gate), floats(self.gate.bias), self.config.k, self.config.renormalize)
