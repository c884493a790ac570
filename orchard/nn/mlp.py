"""The gated feed-forward layer (SwiGLU and its kin, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from torch import Tensor, nn
from torch.nn import functional

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.linear import Linear
from orchard.nn.lowering import linear_of
from orchard.ops.plan.builder import Builder, Value

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise ConfigError(f"no activation called {name!r}", hint="one of " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


class GatedMLP(Configurable, nn.Module):
    """down(act(gate(x)) · up(x))."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        hidden_dim: int = REQUIRED
        activation: str = "silu"
        gate: Linear.Config = field(default_factory=Linear.Config)
        up: Linear.Config = field(default_factory=Linear.Config)
        down: Linear.Config = field(default_factory=Linear.Config)

        def wire(self) -> None:
            for wide in (self.gate, self.up):
                wide.in_dim, wide.out_dim = self.dim, self.hidden_dim
            self.down.in_dim, self.down.out_dim = self.hidden_dim, self.dim

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.act = activation(cfg.activation)
        self.gate: Linear = cfg.gate.build()
        self.up: Linear = cfg.up.build()
        self.down: Linear = cfg.down.build()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        hidden = self.config.hidden_dim
        gate = linear_of(builder, self.gate, x, f"{path}.gate", hidden)
        up = linear_of(builder, self.up, x, f"{path}.up", hidden)
        gated = builder.gate(gate, up, self.config.activation)
        return linear_of(builder, self.down, gated, f"{path}.down", self.config.dim)
