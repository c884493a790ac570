"""The mixture layer: takes the place of an MLP in any block.

Tokens are sorted by expert so that each expert reads one contiguous run; no token is ever dropped.
Shapes: N tokens, E experts, K chosen.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.nn.formats.base import NotLowered
from orchard.nn.linear import GroupedLinear
from orchard.nn.lowering import native_of, obstacle
from orchard.nn.mlp import activation
from orchard.nn.moe.dispatch import add_up
from orchard.nn.moe.experts import Experts, Own
from orchard.nn.moe.router import Routing, TopK
from orchard.ops.plan.builder import Builder, Value


class MoE(Configurable, nn.Module):
    """Experts are gated MLPs kept as three grouped weights."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        hidden_dim: int = REQUIRED
        experts: int = REQUIRED
        activation: str = "silu"
        router: TopK.Config = field(default_factory=TopK.Config)
        gate: GroupedLinear.Config = field(default_factory=GroupedLinear.Config)
        up: GroupedLinear.Config = field(default_factory=GroupedLinear.Config)
        down: GroupedLinear.Config = field(default_factory=GroupedLinear.Config)

        def wire(self) -> None:
            self.router.dim, self.router.experts = self.dim, self.experts
            for wide in (self.gate, self.up):
                wide.in_dim, wide.out_dim = self.dim, self.hidden_dim
            self.down.in_dim, self.down.out_dim = self.hidden_dim, self.dim
            for part in (self.gate, self.up, self.down):
                part.count = self.experts

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.act = activation(cfg.activation)
        self.router: TopK = cfg.router.build()
        self.gate: GroupedLinear = cfg.gate.build()
        self.up: GroupedLinear = cfg.up.build()
        self.down: GroupedLinear = cfg.down.build()
        self._elsewhere: Experts | None = None

    @property
    def experts(self) -> Experts:
        """Where the experts are computed: from this module's own weights, unless it was set to something else."""
        return Own(self.gate, self.up, self.down, self.act) if self._elsewhere is None else self._elsewhere

    @experts.setter
    def experts(self, experts: Experts | None) -> None:
        """None: from its own weights again."""
        self._elsewhere = experts

    def forward(self, x: Tensor, context: Context) -> Tensor:
        tokens = x.flatten(0, -2)
        if not len(tokens):
            return x
        experts = self.experts
        routing = experts.choose(self.router(x, context), context)
        context.collect("moe.balance", self._balance(routing, context.positions.flatten() >= 0))
        pairs = routing.pairs()
        results = experts.run(tokens[pairs.source], pairs.counts, context)
        return add_up(results, pairs, tokens).view_as(x)

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        """One step for router and experts together, so it is all native or none of it."""
        if self._elsewhere is not None:
            raise NotLowered(f"its experts are {type(self._elsewhere).__name__}, not weights of its own")
        if (reason := obstacle(self.router, says="native")) is not None:
            raise NotLowered(reason)
        router = self.router.native()
        return builder.experts(
            x,
            router=router.weight,
            router_bias=router.bias,
            k=router.k,
            renormalize=router.renormalize,
            gate=native_of(self.gate),
            up=native_of(self.up),
            down=native_of(self.down),
            activation=self.config.activation,
            router_path=f"{path}.router.gate",
            path=path,
        )

    def _balance(self, routing: Routing, real: Tensor) -> Tensor:
        """The load-balance loss of Switch Transformers (arXiv 2101.03961): 1 when all experts share equally."""
        experts, k = self.config.experts, self.config.router.k
        share = real[:, None].float()
        total = share.sum().clamp_min(1)
        chosen = torch.zeros_like(routing.logits, dtype=torch.float32).scatter_add_(
            1, routing.experts, share.expand(-1, k).contiguous()
        )
        load = chosen.sum(0) / (total * k)
        importance = (routing.logits.float().softmax(-1) * share).sum(0) / total
        return experts * (load * importance).sum()
