"""The mixture layer: takes the place of an MLP in any block.

Tokens are sorted by expert so that each expert reads one contiguous run; no token is ever dropped.
Shapes: N tokens, E experts, K chosen.
"""

from __future__ import annotations

from dataclasses import field

from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.nn.formats.base import NotLowered
from orchard.nn.linear import GroupedLinear
from orchard.nn.lowering import native_of, obstacle, part_of
from orchard.nn.mlp import activation
from orchard.nn.moe.dispatch import add_up
from orchard.nn.moe.experts import Experts, Own
from orchard.nn.moe.losses import balance, z_loss
from orchard.nn.moe.router import NativeRouter, Routed, Router, Routing, TopK
from orchard.ops.plan.builder import Builder, Value


class MoE(Configurable, nn.Module):
    """Experts are gated MLPs kept as three grouped weights."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        hidden_dim: int = REQUIRED
        experts: int = REQUIRED
        activation: str = "silu"
        router: BaseConfig = field(default_factory=TopK.Config)
        """TopK, ExpertChoice or ImageLevel."""
        gate: GroupedLinear.Config = field(default_factory=GroupedLinear.Config)
        up: GroupedLinear.Config = field(default_factory=GroupedLinear.Config)
        down: GroupedLinear.Config = field(default_factory=GroupedLinear.Config)
        shared: BaseConfig | None = None
        """What every token meets beside the experts it chooses: a GatedMLP or a SharedMLP, or any other MLP."""

        def wire(self) -> None:
            self.router.dim, self.router.experts = self.dim, self.experts  # type: ignore[attr-defined]
            for wide in (self.gate, self.up):
                wide.in_dim, wide.out_dim = self.dim, self.hidden_dim
            self.down.in_dim, self.down.out_dim = self.hidden_dim, self.dim
            for part in (self.gate, self.up, self.down):
                part.count = self.experts
            if self.shared is not None:
                self.shared.dim = self.dim  # type: ignore[attr-defined]

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.act = activation(cfg.activation)
        self.router: Router = cfg.router.build()
        self.gate: GroupedLinear = cfg.gate.build()
        self.up: GroupedLinear = cfg.up.build()
        self.down: GroupedLinear = cfg.down.build()
        self.shared: nn.Module | None = None if cfg.shared is None else cfg.shared.build()
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
        y = self.routed(x, context)
        return y if self.shared is None else y + self.shared(x, context)

    def routed(self, x: Tensor, context: Context) -> Tensor:
        """What the chosen experts say."""
        tokens = x.flatten(0, -2)
        if not len(tokens):
            return x
        experts = self.experts
        routing = experts.choose(self.router(x, context), context)
        self.leave(routing, context)
        pairs = routing.pairs()
        results = experts.run(tokens[pairs.source], pairs.counts, context)
        return add_up(results, pairs, tokens).view_as(x)

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        """One step for router and experts together, so these are all native or none of them; what is shared is a part of its
        own."""
        if self._elsewhere is not None:
            raise NotLowered(f"its experts are {type(self._elsewhere).__name__}, not weights of its own")
        if (reason := obstacle(self.router, says="native")) is not None:
            raise NotLowered(reason)
        router: NativeRouter = self.router.native()  # type: ignore[operator]
        routed = builder.experts(
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
        return (
            routed if self.shared is None else builder.add(routed, part_of(builder, self.shared, x, f"{path}.shared"))
        )

    def leave(self, routing: Routed, context: Context) -> None:
        """Leave what routers are trained with: `moe.balance` (where tokens choose: experts that choose are even) and `moe.z`."""
        real = context.positions.flatten() >= 0
        if isinstance(routing, Routing):
            context.collect("moe.balance", balance(routing, real))
        context.collect("moe.z", z_loss(routing.logits, real))
