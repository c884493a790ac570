"""Adapters beside linear maps that have a side path of their own, which belongs to the model: recovery after compression.

What a compressed model's side paths learnt stays with it (`LoraLinear` with `kept`). An adapter for a task is then a second side
path, independent of the first: it is trained, written, merged and taken out alone, and the first is frozen like the weight.

y = W x + kept_scale · kept_B (kept_A x) + scale · B (A x)

Inside an adapted model the kept pair is called `kept_a`, `kept_b`, so that `lora_a` and `lora_b` are the adapter's wherever
somebody looks for them; the tensors are the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.config import REQUIRED, config
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.formats import Plain
from orchard.nn.linear import Linear
from orchard.nn.lowering import floats
from orchard.ops.plan.builder import Builder, Value
from orchard.transforms.lora_linear import TRAINED, LoraLinear
from orchard.transforms.lora_twin import twin

KEPT = {"kept_a": "lora_a", "kept_b": "lora_b"}
"""What a kept pair is called beside an adapter, and what it is called in the model itself."""


class KeptLinear(Linear):
    """A linear map with a side path that belongs to the model and is not trained."""

    @config
    class Config(Linear.Config):
        kept_r: int = REQUIRED
        kept_alpha: float = REQUIRED
        kept_rslora: bool = False

    kept_a: nn.Parameter
    kept_b: nn.Parameter

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.config: Any = cfg
        self.kept_a = nn.Parameter(torch.zeros(cfg.kept_r, cfg.in_dim), requires_grad=False)
        self.kept_b = nn.Parameter(torch.zeros(cfg.out_dim, cfg.kept_r), requires_grad=False)

    @classmethod
    def of(cls, linear: LoraLinear) -> KeptLinear:
        """The same map, whose side path is the model's own from now on. The tensors are the same."""
        made: KeptLinear = cls.__new__(cls)
        made.__dict__.update(twin(linear).__dict__)
        made.config = kept_config(linear.config)
        for name, before in KEPT.items():
            pair = made._parameters.pop(before)
            assert pair is not None
            made._parameters[name] = nn.Parameter(pair.detach(), requires_grad=False)
        return made

    @property
    def kept_scale(self) -> float:
        r = int(self.config.kept_r)
        return float(self.config.kept_alpha) / (math.sqrt(r) if self.config.kept_rslora else r)

    def forward(self, x: Tensor) -> Tensor:
        narrow = functional.linear(x, self.kept_a.to(x.dtype))
        return super().forward(x) + self.kept_scale * functional.linear(narrow, self.kept_b.to(x.dtype))

    def merge(self) -> Linear:
        """One plain linear map that does the same. A weight that is packed would be rounded again by that, and is refused."""
        if not isinstance(self.format, Plain):
            raise UnsupportedPair(
                f"a side path cannot be merged into a weight of format {type(self.format).__name__}",
                hint="load the model with dense weights (dtype='float32') to merge side paths into it",
            )
        made: Linear = Linear.__new__(Linear)
        made.__dict__.update(twin(self).__dict__)
        made.config = self.config.derive(Linear)
        for name in KEPT:
            made._parameters.pop(name)
        with torch.no_grad():
            weight = self.dense(torch.float32) + self.kept_scale * (self.kept_b.float() @ self.kept_a.float())
        made.assign(weight.to(self._first().dtype))
        return made

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        y = builder.linear(x, self.native(), floats(self.bias), path=path)
        a, b = floats(self.kept_a), floats(self.kept_b)
        assert a is not None and b is not None
        return builder.low_rank(x, a, b, self.kept_scale, y, path=f"{path}.lora")


class LoraOver(LoraLinear, KeptLinear):
    """A side path to train beside one that belongs to the model."""

    @config
    class Config(LoraLinear.Config):
        kept_r: int = REQUIRED
        kept_alpha: float = REQUIRED
        kept_rslora: bool = False

    def __init__(self, cfg: Any) -> None:
        if cfg.dora:
            refuse_dora(self)
        super().__init__(cfg)

    @classmethod
    def over(cls, linear: KeptLinear, **fields: Any) -> LoraOver:
        """Around a map that is there already; `fields` as in `LoraLinear.around`. All tensors are the same."""
        if fields.get("dora", False):
            refuse_dora(linear)
        plain: Linear = Linear.__new__(Linear)
        plain.__dict__.update(twin(linear).__dict__)
        plain.config = linear.config.derive(Linear)
        made: LoraOver = cls.__new__(cls)
        made.__dict__.update(LoraLinear.around(plain, **fields).__dict__)
        made.config = linear.config.derive(cls, **fields)
        return made

    def without(self) -> Linear:
        """The map with the side path that belongs to it, on the same tensors."""
        made: KeptLinear = KeptLinear.__new__(KeptLinear)
        made.__dict__.update(twin(self).__dict__)
        made.config = self.config.derive(KeptLinear)
        for name in TRAINED:
            made._parameters.pop(name, None)
        return made

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        y = KeptLinear.lower(self, builder, x, path)
        if self.switched_in:
            return y
        a, b = floats(self.lora_a), floats(self.lora_b)
        assert a is not None and b is not None
        return builder.low_rank(x, a, b, self.scale, y, path=f"{path}.lora0")


def beside(linear: Linear, **fields: Any) -> LoraLinear:
    """A linear map of a built model with a fresh side path to train, beside the one it may have as its own."""
    if isinstance(linear, LoraLinear) and linear.config.kept:
        linear = KeptLinear.of(linear)
    if isinstance(linear, KeptLinear) and not isinstance(linear, LoraLinear):
        return LoraOver.over(linear, **fields)
    return LoraLinear.around(linear, **fields)


def beside_config(node: Any, **fields: Any) -> Any:
    """The same of its config."""
    if isinstance(node, LoraLinear.Config) and node.kept:
        node = kept_config(node)
    return node.derive(LoraOver if isinstance(node, KeptLinear.Config) else LoraLinear, **fields)


def kept_config(node: Any) -> Any:
    """A side path's config as that of one which belongs to the model."""
    if node.dora:
        raise UnsupportedPair("a side path with DoRA's lengths cannot be kept", hint="recover without dora")
    return node.derive(KeptLinear, kept_r=node.r, kept_alpha=node.alpha, kept_rslora=node.rslora)


def keep(module: LoraLinear, change: Callable[[Tensor], Tensor]) -> LoraLinear:
    """A trained side path that belongs to the model from now on, its matrices as `change` makes them. The weight is shared."""
    made = twin(module)
    made.config = module.config.clone(kept=True, dropout=0.0)
    for name in KEPT.values():
        made._parameters[name] = nn.Parameter(change(getattr(module, name).detach()), requires_grad=False)
    return made


def refuse_dora(linear: Linear) -> None:
    """DoRA beside a map that has a side path of its own, in whichever form."""
    if isinstance(linear, KeptLinear) or (isinstance(linear, LoraLinear) and linear.config.kept):
        raise UnsupportedPair(
            "DoRA measures the rows of a weight, and this one has a side path of its own beside it",
            hint="use a plain or rank-stabilised adapter (method lora or rslora)",
        )


def refuse_twice(path: str, node: Any) -> None:
    """One side path of the model's own, and one adapter: not more."""
    if isinstance(node, LoraLinear.Config) and not node.kept:
        raise ConfigError(f"{path} has a side path already", hint="merge it first, or adapt other linear maps")
