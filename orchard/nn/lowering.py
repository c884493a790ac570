"""How modules speak to a plan's builder: lower what says how, run in torch what does not.

A class has to say itself how it lowers: what it inherited describes its parent, and a subclass may compute something else.
The same holds for linear maps and embeddings, which lower by the weight's format.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from orchard.nn.formats.base import NativeWeight, NotLowered
from orchard.nn.linear import Embedding, GroupedLinear, Linear
from orchard.ops.plan.builder import Builder, NoStep, Value


def obstacle(module: object, says: str = "lower") -> str | None:
    """Why a module cannot be lowered, as far as can be told without trying."""
    name = type(module).__name__
    if says not in vars(type(module)):
        return f"{name} does not say how it lowers"
    return hooked(module)


def part_of(builder: Builder, module: nn.Module, x: Value, path: str) -> Value:
    """A module that maps rows to rows of the same width: its own steps, or one step in torch."""
    if type(module) is nn.Identity and hooked(module) is None:
        return x
    mark = builder.mark()
    try:
        if (reason := obstacle(module)) is not None:
            raise NotLowered(reason)
        value: Value = module.lower(builder, x, path)  # type: ignore[operator]
    except (NotLowered, NoStep) as error:
        builder.rewind(mark)
        return builder.torch(path, x, error.message)
    return value


def linear_of(builder: Builder, module: nn.Module, x: Value, path: str, width: int) -> Value:
    """A linear map, or whatever stands in its place (an adapter), alone in torch where its format is not native."""
    mark = builder.mark()
    try:
        if type(module) is Linear:
            return builder.linear(x, native_of(module), floats(module.bias), path=path)
        if (reason := obstacle(module)) is not None:
            raise NotLowered(reason)
        value: Value = module.lower(builder, x, path)  # type: ignore[operator]
    except (NotLowered, NoStep) as error:
        builder.rewind(mark)
        return builder.torch(path, x, error.message, width)
    return value


def native_of(module: nn.Module) -> NativeWeight:
    """A module's weight in the native layout, or `NotLowered`."""
    if type(module) not in (Linear, GroupedLinear, Embedding):
        raise NotLowered(f"{type(module).__name__} does not say how it lowers")
    if (reason := hooked(module)) is not None:
        raise NotLowered(reason)
    weight: NativeWeight = module.native()  # type: ignore[operator]
    return weight


def floats(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().float().cpu().numpy()


def hooked(module: object) -> str | None:
    """Why a module has to be called as it is: somebody looks on, or it was given another forward."""
    if isinstance(module, nn.Module) and (module._forward_hooks or module._forward_pre_hooks):
        return f"{type(module).__name__} has hooks, which only torch calls"
    if "forward" in vars(module):
        return f"this {type(module).__name__} has a forward of its own"
    return None
