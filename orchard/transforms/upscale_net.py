"""A convolutional net as a list of steps: what tracing gives, what pruning changes, what is exported and stored.

Values are [B, channels, height, width], or [B, channels] after flattening. Every step is one function of torch, with settings by
name and tensors by name, so a net is data: it runs here, it becomes a module of plain torch (`plain_torch`), and `parts` are a
description for JSON and tensors for a safetensors file. Batch norms use what they have learnt: nets are for inference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from orchard.core.errors import BadFile, ConfigError

VERSION = 1
SAME = "same"
"""Channels go through one by one, each by itself."""


@dataclass(frozen=True)
class Op:
    """How a step is done: a function of torch, the tensors it has, and what it means for channels."""

    call: Callable[..., Any]
    tensors: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    channels: str = ""
    inputs: int = 1
    """How many values it reads; 0: a list of them."""


OPS: dict[str, Op] = {
    "conv": Op(functional.conv2d, ("weight",), ("bias",)),
    "linear": Op(functional.linear, ("weight",), ("bias",)),
    "batch_norm": Op(functional.batch_norm, ("running_mean", "running_var"), ("weight", "bias"), SAME),
    "add": Op(torch.add, inputs=2),
    "sub": Op(torch.sub, inputs=2),
    "mul": Op(torch.mul, inputs=2),
    "plus": Op(torch.add, channels=SAME),
    "times": Op(torch.mul, channels=SAME),
    "cat": Op(torch.cat, inputs=0),
    "narrow": Op(torch.narrow),
    "gather": Op(torch.index_select, ("index",)),
    "flatten": Op(torch.flatten, channels=SAME),
    "mean": Op(torch.mean, channels=SAME),
    "max_pool": Op(functional.max_pool2d, channels=SAME),
    "avg_pool": Op(functional.avg_pool2d, channels=SAME),
    "adaptive_avg_pool": Op(functional.adaptive_avg_pool2d, channels=SAME),
    "relu": Op(functional.relu, channels=SAME),
    "relu6": Op(functional.relu6, channels=SAME),
    "leaky_relu": Op(functional.leaky_relu, channels=SAME),
    "elu": Op(functional.elu, channels=SAME),
    "gelu": Op(functional.gelu, channels=SAME),
    "silu": Op(functional.silu, channels=SAME),
    "sigmoid": Op(torch.sigmoid, channels=SAME),
    "tanh": Op(torch.tanh, channels=SAME),
    "hardswish": Op(functional.hardswish, channels=SAME),
    "hardsigmoid": Op(functional.hardsigmoid, channels=SAME),
}


@dataclass(frozen=True)
class Step:
    """One value, named like its step. `tensors` names the step whose tensors it reads: itself, or an earlier one where a module
    is used twice."""

    name: str
    op: str
    inputs: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tensors: str = ""


class _Tensors(nn.Module):
    """The tensors of one step, or of all."""


class ChannelNet(nn.Module):
    """Steps with their tensors. `inputs` are names of what is given, `output` that of what is returned."""

    def __init__(
        self, inputs: Iterable[str], steps: Iterable[Step], output: str, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        super().__init__()
        self.inputs, self.steps, self.output = tuple(inputs), tuple(steps), output
        self.held = _Tensors()
        for step, parts in tensors.items():
            holder = _Tensors()
            for name, tensor in parts.items():
                if tensor.is_floating_point() and not name.startswith("running_"):
                    holder.register_parameter(name, nn.Parameter(tensor.detach().clone()))
                else:
                    holder.register_buffer(name, tensor.detach().clone())
            self.held.add_module(step, holder)
        self._check()
        read = [name for step in self.steps for name in step.inputs]
        self._last = {name: place for place, step in enumerate(self.steps) for name in step.inputs}
        self.readers = {name: read.count(name) + (name == output) for name in (*self.inputs, *self._names)}

    @property
    def _names(self) -> list[str]:
        return [step.name for step in self.steps]

    def tensors_of(self, step: Step) -> dict[str, Tensor]:
        """A step's tensors by name; optional ones it lacks are not there."""
        op = OPS[step.op]
        if not op.tensors:
            return {}
        holder = self.held.get_submodule(step.tensors)
        return {
            name: found for name in (*op.tensors, *op.optional) if (found := getattr(holder, name, None)) is not None
        }

    def forward(self, *given: Tensor, watch: Callable[[str, Tensor], None] | None = None) -> Tensor:
        """`watch` is told every value as it is made."""
        values = dict(zip(self.inputs, given, strict=True))
        for place, step in enumerate(self.steps):
            read = [values[name] for name in step.inputs]
            args = [read] if OPS[step.op].inputs == 0 else read
            values[step.name] = OPS[step.op].call(*args, **self.tensors_of(step), **step.settings)
            if watch is not None:
                watch(step.name, values[step.name])
            for name in set(step.inputs):
                if self._last[name] == place and name != self.output:
                    del values[name]
        return values[self.output]

    # Storing ----------------------------------------------------------------------------------------------------------

    def parts(self) -> tuple[str, dict[str, Tensor]]:
        """A description as JSON, and all tensors by name: what a safetensors file takes as metadata and tensors."""
        said = {"version": VERSION, "inputs": self.inputs, "output": self.output}
        return json.dumps({**said, "steps": [asdict(step) for step in self.steps]}), dict(self.held.state_dict())

    @classmethod
    def from_parts(cls, description: str, tensors: Mapping[str, Tensor]) -> ChannelNet:
        """The inverse. Nothing of a description is trusted: only known steps with their own tensors are taken."""
        try:
            said = json.loads(description)
            if said["version"] != VERSION:
                raise BadFile(f"a net of version {said['version']}", hint="it was written by another Orchard")
            steps = [Step(**{**step, "inputs": tuple(step["inputs"])}) for step in said["steps"]]
            inputs, output = tuple(said["inputs"]), said["output"]
        except (ValueError, KeyError, TypeError) as error:
            raise BadFile("the description of a net is damaged", hint="export it again") from error
        by_step: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            step, _, part = name.rpartition(".")
            by_step.setdefault(step, {})[part] = tensor
        names = [*inputs, output, *(step.name for step in steps), *(step.tensors for step in steps if step.tensors)]
        if not all(isinstance(name, str) and name.isidentifier() for name in (*names, *by_step)):
            raise BadFile("a step of the net has no usable name", hint="export it again")
        try:
            return cls(inputs, steps, output, by_step)
        except (ConfigError, KeyError) as error:
            raise BadFile(f"the description of a net is wrong: {error}", hint="export it again") from error

    def _check(self) -> None:
        known = set(self.inputs)
        for step in self.steps:
            if step.op not in OPS:
                raise ConfigError(f"{step.name}: no step is called {step.op!r}", hint="one of " + ", ".join(OPS))
            if step.name in known or not set(step.inputs) <= known:
                raise ConfigError(f"{step.name} reads what is not there yet, or is there twice", hint="order the steps")
            op = OPS[step.op]
            if not step.inputs or op.inputs not in (0, len(step.inputs)):
                raise ConfigError(
                    f"{step.name}: {step.op} cannot read {len(step.inputs)} values", hint="trace it again"
                )
            holder = dict(self.held.named_children()).get(step.tensors)
            if op.tensors and any(getattr(holder, name, None) is None for name in op.tensors):
                raise ConfigError(f"{step.name} lacks a tensor", hint="it needs " + ", ".join(op.tensors))
            known.add(step.name)
        if self.output not in known:
            raise ConfigError(f"the net returns {self.output!r}, which is not there", hint="name a step")


def plain_torch(net: ChannelNet) -> fx.GraphModule:
    """The same net as a module of torch alone: nothing of Orchard is needed to run it."""
    graph, root = fx.Graph(), nn.Module()
    nodes = {name: graph.placeholder(name) for name in net.inputs}
    for step in net.steps:
        read = [nodes[name] for name in step.inputs]
        named: dict[str, Any] = dict(step.settings)
        for part, tensor in net.tensors_of(step).items():
            place = f"{step.tensors}_{part}"
            if not hasattr(root, place):
                if isinstance(tensor, nn.Parameter):
                    root.register_parameter(place, tensor)
                else:
                    root.register_buffer(place, tensor)
            named[part] = graph.get_attr(place)
        args = (read,) if OPS[step.op].inputs == 0 else tuple(read)
        nodes[step.name] = graph.call_function(OPS[step.op].call, args, named)
    graph.output(nodes[net.output])
    return fx.GraphModule(root, graph)
