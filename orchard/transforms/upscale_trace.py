"""From a module of torch to a `ChannelNet`: tracing by torch.fx, then one step for each thing that is done.

Known are convolutions, linear maps, batch norms, sums, products, concatenation, slices of channels, pooling, activations,
dropout (which does nothing in inference) and flattening. Anything else is refused by name: a step that is not understood could
mix channels, and a net that was reordered around it would be wrong in silence.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from orchard.core.errors import UnsupportedPair
from orchard.transforms.upscale_net import OPS, ChannelNet, Step

ELEMENTWISE: dict[Any, str] = {
    "relu": "relu",
    "relu_": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    torch.relu: "relu",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    **{getattr(functional, name): name for name in OPS if hasattr(functional, name) and name not in ("linear", "mean")},
}
MODULES: dict[type, tuple[str, tuple[str, ...]]] = {
    nn.ReLU: ("relu", ()),
    nn.ReLU6: ("relu6", ()),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.ELU: ("elu", ("alpha",)),
    nn.GELU: ("gelu", ("approximate",)),
    nn.SiLU: ("silu", ()),
    nn.Sigmoid: ("sigmoid", ()),
    nn.Tanh: ("tanh", ()),
    nn.Hardswish: ("hardswish", ()),
    nn.Hardsigmoid: ("hardsigmoid", ()),
    nn.MaxPool2d: ("max_pool", ("kernel_size", "stride", "padding", "dilation", "ceil_mode")),
    nn.AvgPool2d: ("avg_pool", ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")),
    nn.AdaptiveAvgPool2d: ("adaptive_avg_pool", ("output_size",)),
    nn.BatchNorm1d: ("batch_norm", ("eps",)),
    nn.BatchNorm2d: ("batch_norm", ("eps",)),
    nn.Linear: ("linear", ()),
    nn.Conv2d: ("conv", ("stride", "padding", "dilation", "groups")),
}
POOLS: dict[Any, tuple[str, tuple[str, ...]]] = {
    functional.max_pool2d: ("max_pool", MODULES[nn.MaxPool2d][1]),
    torch.max_pool2d: ("max_pool", MODULES[nn.MaxPool2d][1]),
    functional.avg_pool2d: ("avg_pool", MODULES[nn.AvgPool2d][1]),
    functional.adaptive_avg_pool2d: ("adaptive_avg_pool", ("output_size",)),
}
NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)
PAIRS: dict[Any, str] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), "add"),
    **dict.fromkeys((operator.sub, torch.sub, "sub"), "sub"),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul"), "mul"),
}
PARTS = (torch.chunk, torch.split, "chunk", "split")


def trace(model: nn.Module, *examples: Tensor) -> ChannelNet:
    """The net that a module is, in inference. `examples` are inputs of the shape that matters (batches of any size)."""
    model = copy.deepcopy(model).eval()
    if isinstance(model, ChannelNet):
        return model
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # whatever a model's own code raises when it meets a value that is not there
        raise UnsupportedPair(
            f"{type(model).__name__} cannot be traced: {error}", hint="no branches on values"
        ) from error
    return _Tracing(model, examples).run(graph)


class _Tracing:
    """What is known while walking a graph: values as they come out for the examples, and names of steps."""

    def __init__(self, model: nn.Module, examples: Sequence[Tensor]) -> None:
        self.model, self.examples = model, list(examples)
        self.inputs: list[str] = []
        self.steps: list[Step] = []
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.values: dict[str, Tensor] = {}
        self.named: dict[fx.Node, Any] = {}
        """A node's value: the name of one, a list of names, or something that is not computed with (a size)."""
        self.owners: dict[str, str] = {}

    @torch.no_grad()
    def run(self, graph: fx.Graph) -> ChannelNet:
        output = ""
        for node in graph.nodes:
            if node.op == "placeholder":
                if len(self.inputs) == len(self.examples):
                    raise UnsupportedPair(f"the net also reads {node.target}", hint="give an example of each input")
                self.inputs.append(node.name)
                self.values[node.name] = self.examples[len(self.inputs) - 1]
                self.named[node] = node.name
            elif node.op == "output":
                output = self._one(node, node.args[0])
            elif node.op == "call_module":
                self.named[node] = self._module(node)
            elif node.op in ("call_function", "call_method"):
                self.named[node] = self._function(node)
            else:
                raise UnsupportedPair(f"{node.target} is read as it is", hint="only layers may hold tensors")
        return ChannelNet(self.inputs, self.steps, output, self.tensors)

    def step(self, node: fx.Node, op: str, inputs: Sequence[str], tensors: str = "", **settings: Any) -> str:
        name = node.name if node.name not in self.values else f"{node.name}_{len(self.steps)}"
        made = Step(name, op, tuple(inputs), {key: _plain(value) for key, value in settings.items()}, tensors)
        read = [self.values[value] for value in inputs]
        args = [read] if OPS[op].inputs == 0 else read
        self.values[name] = OPS[op].call(*args, **self.tensors.get(tensors, {}), **made.settings)
        if self.values[name].dim() not in (2, 4) or (op == "linear" and read[0].dim() != 2):
            raise self._unknown(node, f"a value of {self.values[name].dim()} dimensions")
        self.steps.append(made)
        return name

    def _module(self, node: fx.Node) -> str:
        module = self.model.get_submodule(str(node.target))
        x = self._one(node, node.args[0])
        if isinstance(module, NOTHING):
            return x
        if isinstance(module, nn.Flatten):
            return self._flatten(node, x, module.start_dim, module.end_dim)
        if type(module) not in MODULES:
            raise self._unknown(node, type(module).__name__)
        op, fields = MODULES[type(module)]
        if getattr(module, "padding_mode", "zeros") != "zeros" or isinstance(getattr(module, "padding", 0), str):
            raise self._unknown(node, "a convolution that pads with anything but so many zeros")
        tensors = ""
        if OPS[op].tensors:
            if op == "batch_norm" and module.running_mean is None:
                raise self._unknown(node, "a batch norm that keeps no statistics")
            tensors = self.owners.setdefault(str(node.target), node.name)
            parts = {name: getattr(module, name) for name in (*OPS[op].tensors, *OPS[op].optional)}
            self.tensors.setdefault(tensors, {name: part for name, part in parts.items() if part is not None})
        return self.step(node, op, [x], tensors, **{name: getattr(module, name) for name in fields})

    def _function(self, node: fx.Node) -> Any:
        target: Any = node.target
        args: list[Any] = list(node.args)
        given: dict[str, Any] = dict(node.kwargs)
        if target in ELEMENTWISE:
            inner = {key: value for key, value in given.items() if key != "inplace"}
            if len(args) > 1 or not inner.keys() <= {"negative_slope", "alpha", "approximate"}:
                raise self._unknown(node, f"{target} with more than its input")
            return self.step(node, ELEMENTWISE[target], [self._one(node, args[0])], **inner)
        if target in POOLS:
            op, fields = POOLS[target]
            settings = {**dict(zip(fields, args[1:], strict=False)), **{k: v for k, v in given.items() if k in fields}}
            return self.step(node, op, [self._one(node, args[0])], **settings)
        if target in PAIRS:
            return self._pair(node, PAIRS[target], args, given)
        if target in (torch.cat, torch.concat):
            return self._cat(node, args[0], given.get("dim", args[1] if len(args) > 1 else 0))
        if target in (torch.flatten, "flatten"):
            start = given.get("start_dim", args[1] if len(args) > 1 else 0)
            return self._flatten(node, self._one(node, args[0]), start, given.get("end_dim", *args[2:3] or (-1,)))
        if target in ("view", "reshape", torch.reshape) and len(args) == 3 and args[2] == -1:
            return self._flatten(node, self._one(node, args[0]), 1, -1)
        if target in (torch.mean, "mean"):
            return self._mean(node, args, given)
        if target in (torch.narrow, "narrow"):
            return self._slice(node, self._one(node, args[0]), *args[1:], **given)
        if target in PARTS:
            return self._parts(node, args, given)
        if target is operator.getitem:
            return self._item(node, args[0], args[1])
        if target in ("size", getattr):
            return None  # only asked for by `view`, which is known by its form
        if target in (functional.dropout, functional.dropout2d):
            return self._one(node, args[0])
        raise self._unknown(node, getattr(target, "__name__", str(target)))

    def _pair(self, node: fx.Node, op: str, args: list[Any], given: Mapping[str, Any]) -> str:
        if given or len(args) != 2:
            raise self._unknown(node, f"{op} with further arguments")
        numbers = [value for value in args if isinstance(value, int | float)]
        if not numbers:
            return self.step(node, op, [self._one(node, value) for value in args])
        if op == "sub" and isinstance(args[0], int | float):
            raise self._unknown(node, "a number minus a value")
        value = self._one(node, next(value for value in args if not isinstance(value, int | float)))
        number = -numbers[0] if op == "sub" else numbers[0]
        return self.step(node, "times" if op == "mul" else "plus", [value], other=number)

    def _cat(self, node: fx.Node, values: Any, dim: Any) -> str:
        names = [self._one(node, value) for value in values]
        if dim not in (1, 1 - self.values[names[0]].dim()):
            raise self._unknown(node, f"concatenation along dimension {dim}")
        return self.step(node, "cat", names, dim=1)

    def _flatten(self, node: fx.Node, x: str, start: Any, end: Any) -> str:
        dims = self.values[x].dim()
        if start not in (1, 1 - dims) or end not in (-1, dims - 1):
            raise self._unknown(node, "flattening that is not of everything but the batch")
        return x if dims == 2 else self.step(node, "flatten", [x], start_dim=1)

    def _mean(self, node: fx.Node, args: list[Any], given: Mapping[str, Any]) -> str:
        x = self._one(node, args[0])
        dims = given.get("dim", args[1] if len(args) > 1 else None)
        found = sorted(dim % 4 for dim in dims) if isinstance(dims, list | tuple) and self.values[x].dim() == 4 else []
        if found != [2, 3]:
            raise self._unknown(node, "a mean that is not over height and width")
        keep = bool(given.get("keepdim", args[2] if len(args) > 2 else False))
        return self.step(node, "mean", [x], dim=[2, 3], keepdim=keep)

    def _slice(self, node: fx.Node, x: str, dim: Any, start: Any, length: Any) -> str:
        if dim not in (1, 1 - self.values[x].dim()) or not isinstance(start, int) or not isinstance(length, int):
            raise self._unknown(node, "a slice that is not of channels")
        return self.step(node, "narrow", [x], dim=1, start=start, length=length)

    def _parts(self, node: fx.Node, args: list[Any], given: Mapping[str, Any]) -> list[str]:
        x = self._one(node, args[0])
        size, dim = [*args[1:], *given.values()][:2] if len(args) + len(given) > 2 else (args[1], 0)
        if "dim" in given:
            dim, size = given["dim"], args[1] if len(args) > 1 else next(v for k, v in given.items() if k != "dim")
        halves = "chunk" in str(node.target)
        tensor = self.values[x]
        if dim not in (1, 1 - tensor.dim()):
            raise self._unknown(node, "parts that are not of channels")
        lengths = [part.shape[1] for part in (tensor.chunk(size, 1) if halves else tensor.split(size, 1))]
        starts = [sum(lengths[:place]) for place in range(len(lengths))]
        return [self._slice(node, x, 1, start, length) for start, length in zip(starts, lengths, strict=True)]

    def _item(self, node: fx.Node, of: Any, at: Any) -> Any:
        held = self.named.get(of)
        if held is None:
            return None
        if isinstance(held, list):
            return held[at]
        places = at if isinstance(at, tuple) else (at,)
        channels = self.values[held].shape[1]
        whole = slice(None)
        if len(places) < 2 or any(place not in (whole, Ellipsis) for place in (places[0], *places[2:])):
            raise self._unknown(node, "a slice that is not of channels")
        if not isinstance(places[1], slice) or places[1].step not in (None, 1) or places[0] is Ellipsis:
            raise self._unknown(node, "a slice that is not a run of channels")
        start, stop, _ = places[1].indices(channels)
        return self._slice(node, held, 1, start, stop - start)

    def _one(self, node: fx.Node, value: Any) -> str:
        found = self.named.get(value) if isinstance(value, fx.Node) else None
        if not isinstance(found, str):
            raise self._unknown(node, f"{node.target} of something that is not one value")
        return found

    def _unknown(self, node: fx.Node, what: str) -> UnsupportedPair:
        return UnsupportedPair(f"{node.name}: {what} cannot be followed by channel", hint="leave it out of the net")


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return list(value) if isinstance(value, tuple) else value
