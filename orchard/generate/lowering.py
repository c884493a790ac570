"""A built model becomes a plan: its modules say what they do, steps are fused, every number is checked.

The model is only asked to `lower` itself, so nothing here knows what modules there are.
"""

from __future__ import annotations

from typing import Protocol

from orchard.generate.protocol import Shape
from orchard.ops.plan.builder import Builder
from orchard.ops.plan.check import check
from orchard.ops.plan.fuse import fuse
from orchard.ops.plan.steps import Plan


class Lowers(Protocol):
    """A model that can say itself to a builder; `orchard.models.language.decoder.Decoder` is one."""

    @property
    def config(self) -> Shape: ...

    def lower(self, builder: Builder) -> None: ...


def lower(model: Lowers, *, stores: str = "bf16", fused: bool = True) -> Plan:
    """The model's plan. `stores` ("bf16" or "f32"): how slots are kept that the model keeps as they come.

    Modules without a native form become steps in torch, with the reason. Where not even that is possible (the table of
    embeddings or the head has no native form) the model's own error says why. `fused=False` gives the plain twin.
    """
    builder = Builder(context=model.config.context, stores=stores)
    model.lower(builder)
    plan = fuse(builder, fused=fused)
    check(plan)
    return plan
