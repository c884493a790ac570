"""Shards of a model over the processes that read different data (FSDP2), and when they are whole.

Layers are put together when they are run. What is outside of them (embedding, last norm, head) stays whole from `hidden` to the
end of the backward pass, because the head reads it in between, perhaps many times. A pass without gradients has no such end:
there everything is shards again as soon as `hidden` or `scores` return, so that whoever then reads or writes parameters (an
average of weights, a checkpoint) meets the ones that are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from orchard.core.blocks import layers_of
from orchard.core.context import Context


def shard(model: nn.Module, over: DeviceMesh, policy: MixedPrecisionPolicy, *, keep: bool) -> None:
    """Cut a model, in place. `keep`: layers stay whole between their forward and their backward pass."""
    for layer in layers_of(model):
        if next(layer.parameters(), None) is None:
            continue  # it is on another stage of a pipeline
        fully_shard(layer, mesh=over, mp_policy=policy, reshard_after_forward=not keep)
        _hide_context(layer)
    fully_shard(model, mesh=over, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    whole = _Whole(model)
    whole.watch_forward()
    if not hasattr(model, "hidden"):
        return
    _reach_head(model)
    register_fsdp_forward_method(model, "hidden")
    own: Any = model
    own.hidden = whole.only_for(own.hidden)
    if hasattr(model, "scores"):
        own.scores = whole.only_for(own.scores, gather=True)


class _Hidden:
    """A context that torch does not look into."""

    def __init__(self, context: Context) -> None:
        self.context = context


def _hide_context(layer: nn.Module) -> None:
    """Torch looks for tensors with gradients in what a layer is called with, dataclasses too, and gives it copies of those that
    hold any. What a layer leaves for others in its context (keys and values, collected losses) would be lost with the copy."""

    def hide(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(_hidden, args)), {name: _hidden(one) for name, one in kwargs.items()}

    def show(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(_shown, args)), {name: _shown(one) for name, one in kwargs.items()}

    layer.register_forward_pre_hook(hide, prepend=True, with_kwargs=True)  # before torch's own, and after it
    layer.register_forward_pre_hook(show, with_kwargs=True)


def _hidden(value: Any) -> Any:
    return _Hidden(value) if isinstance(value, Context) else value


def _shown(value: Any) -> Any:
    return value.context if isinstance(value, _Hidden) else value


def exchange(model: nn.Module, on: bool) -> None:
    """Whether backward passes exchange gradients. Off for all but the last micro-batch of a step, less is sent and each process
    holds whole gradients meanwhile; the sums are the same."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def put_back(model: nn.Module) -> None:
    """Make everything shards again, where a forward pass with gradients had no backward pass (a batch that was given up)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _Whole:
    """Whether a model is in shards at the moment, told by one parameter of its outermost part: whole, it is another object."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        inside = {id(p) for layer in layers_of(model) for p in layer.parameters()}
        outside = [(path, p) for path, p in model.named_parameters() if id(p) not in inside]
        path = outside[0][0] if outside else ""
        self.shard: nn.Parameter | None = outside[0][1] if outside else None
        above, _, self.name = path.rpartition(".")
        self.module = model.get_submodule(above)

    def __call__(self) -> bool:
        return self.shard is not None and getattr(self.module, self.name) is not self.shard

    def watch_forward(self) -> None:
        """The same as `only_for`, for the forward pass itself, around torch's own hooks."""
        before: list[bool] = []

        def after(*_: Any) -> None:
            if not before.pop() and not torch.is_grad_enabled():
                put_back(self.model)

        self.model.register_forward_pre_hook(lambda *_: before.append(self()), prepend=True)
        self.model.register_forward_hook(after, always_call=True)

    def only_for(self, call: Callable[..., Any], *, gather: bool = False) -> Callable[..., Any]:
        """The same function, after which a model that was in shards is in shards again if there are no gradients to come."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() or self():
                return call(*args, **kwargs)
            if gather:
                self.model.unshard()
            try:
                return call(*args, **kwargs)
            finally:
                put_back(self.model)

        return called


def _reach_head(model: nn.Module) -> None:
    """Gradients are exchanged when the backward pass comes through what `hidden` gave. Where only the head is trained it would
    never come there, so that it is asked to."""
    plain: Any = model.hidden

    def hidden(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = plain(*args, **kwargs)
        if torch.is_grad_enabled() and not out.requires_grad:
            return out.clone().requires_grad_()
        return out.clone() if out._is_view() else out  # writing into a view would lose the hook that watches it

    own: Any = model
    own.hidden = hidden
