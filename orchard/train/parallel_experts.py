"""Expert parallelism (arXiv 2006.16668) without sending tokens: each process of the dimension computes its own experts.

The processes read the same data. Each routes all tokens, runs those that go to the experts it holds, and the results are added
up. Nothing is dropped and no expert can overflow. What it divides is the memory and the work of experts; everything else is
computed on every process of the dimension. (Exchanging tokens instead, all to all, would divide that too, and is not built.)

A mixture is known by its parts: a router, and gate, up and down with weights [experts, out, in].
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.ops.grouped import grouped_linear
from orchard.train.parallel_tensor import holds, place, refuse_shared, whole

EXPERTS = ("gate", "up", "down")


def split_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each process its share of the experts of every mixture, in place."""
    mixtures = {path: module for path, module in model.named_modules() if _is_mixture(module)}
    if not mixtures:
        raise ConfigError(
            f"mesh.expert is {mesh.size()}, and the model has no mixture of experts",
            hint="use mesh.data or mesh.tensor",
        )
    cut = set()
    for path, module in mixtures.items():
        for name in EXPERTS:
            _refuse(f"{path}.{name}", getattr(module, name), mesh.size())
            cut.add(f"{path}.{name}")
    refuse_shared(model)
    for path, module in list(model.named_modules()):
        if path in cut:
            for name, parameter in list(module.named_parameters(recurse=False)):
                place(module, name, parameter, mesh, Shard(0))
        elif holds(module):
            whole(module, mesh)
    for module in mixtures.values():
        module.expert_mesh = mesh
        module.routed = MethodType(_routed, module)


def _is_mixture(module: nn.Module) -> bool:
    return hasattr(module, "router") and all(hasattr(module, name) for name in EXPERTS)


def _refuse(path: str, experts: Any, size: int) -> None:
    weight = getattr(experts, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 3 or len(list(experts.parameters())) != 1:
        raise UnsupportedPair(f"{path} is packed, and experts are cut as dense weights only", hint="load it dense")
    if weight.shape[0] % size:
        raise ConfigError(
            f"{path} holds {weight.shape[0]} experts, which mesh.expert {size} does not divide", hint="use a divisor"
        )


def _routed(self: Any, x: Tensor, context: Any) -> Tensor:
    """The mixture's own `routed` for the experts that are here. What it reads is the same on every process; gradients of that
    are added up on the way back, results on the way out."""
    tokens = x.flatten(0, -2)
    if not len(tokens):
        return x
    group, here = self.expert_mesh.get_group(), self.expert_mesh.get_local_rank()
    routing = self.router(x, context)
    self.leave(routing, context)
    pairs = routing.pairs()
    weights = [getattr(self, name).weight.to_local() for name in EXPERTS]
    first = here * len(weights[0])
    counts = pairs.counts[first : first + len(weights[0])]
    start, many = int(pairs.counts[:first].sum()), int(counts.sum())
    source = pairs.source[start : start + many]
    read, shares = _AddBack.apply(tokens, group), _AddBack.apply(pairs.weights, group)[start : start + many]
    rows = read[source]
    gate, up, down = (_each(weight, counts) for weight in weights)
    weighted = down(self.act(gate(rows)) * up(rows)) * shares[:, None]
    out = torch.zeros_like(tokens).index_add(0, source, weighted.to(tokens.dtype))
    added: Tensor = _AddUp.apply(out, group)
    return added.view_as(x)


def _each(weight: Tensor, counts: Tensor) -> Callable[[Tensor], Tensor]:
    """The map of each row's expert. One without tokens still takes part, so that its gradient is zero and not missing."""
    return lambda rows: grouped_linear(rows, weight.to(rows.dtype), counts)


class _AddUp(torch.autograd.Function):
    """The sum over processes; each one's share of the gradient is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _AddBack(torch.autograd.Function):
    """The same value on every process, each of which uses it for something else: gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        slope = gradients[0].contiguous().clone()
        dist.all_reduce(slope, group=ctx.group)
        return slope, None
