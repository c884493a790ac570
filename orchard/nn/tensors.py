"""The dense tensors that a model is made of, by Orchard's names, whatever formats keep them.

`tensor_names` of a built model, `tensor_shapes` of a config tree, `dense_tensor` to read one, `fill` to put one in its place.
`carried` puts a whole model into another tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.config import BaseConfig
from orchard.core.errors import BadFile, ConfigError
from orchard.nn.formats import Plain
from orchard.nn.layer_norm import LayerNorm
from orchard.nn.linear import Embedding, GroupedLinear, Linear, Weight
from orchard.nn.norm import HeadNorm, RMSNorm


def tensor_shapes(tree: BaseConfig) -> dict[str, tuple[int, ...]]:
    """The dense tensors of a completed tree, by Orchard's name, without building it: parts of a config tree lie where
    parts of the model do."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, node in tree.walk():
        name = path.replace("[", ".").replace("]", "")
        if isinstance(node, Linear.Config):
            shapes[f"{name}.weight"] = (node.out_dim, node.in_dim)
            if node.bias:
                shapes[f"{name}.bias"] = (node.out_dim,)
        elif isinstance(node, GroupedLinear.Config):
            shapes[f"{name}.weight"] = (node.count, node.out_dim, node.in_dim)
        elif isinstance(node, Embedding.Config):
            shapes[f"{name}.weight"] = (node.vocab, node.dim)
        elif isinstance(node, RMSNorm.Config | HeadNorm.Config):
            shapes[f"{name}.weight"] = (node.dim,)
        elif isinstance(node, LayerNorm.Config):
            shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (node.dim,)
    return shapes


def tensor_names(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Every dense tensor a model is made of, by Orchard's name, with the module and attribute that hold it."""
    names: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, Weight):
            names[f"{prefix}weight"] = (module, "weight")
            packed = module.packed()
        else:
            packed = {}
        for name, _ in module.named_parameters(recurse=False):
            if name not in packed:
                names[f"{prefix}{name}"] = (module, name)
    return names


def dense_tensor(module: nn.Module, attribute: str, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor behind a name from `tensor_names`, unpacked."""
    if isinstance(module, Weight) and attribute == "weight":
        if isinstance(
            module.format, Plain
        ):  # others compute with what they make of their tensors, whatever those are called
            tensor: Tensor = module.packed()["weight"]
            return tensor if dtype is None else tensor.to(dtype)
        return module.dense(dtype or torch.float32)
    tensor = getattr(module, attribute)
    return tensor if dtype is None else tensor.to(dtype)


def fill(
    module: nn.Module,
    attribute: str,
    ours: str,
    tensor: Tensor,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Put a dense tensor where a name from `tensor_names` belongs, packed as the module keeps it."""
    if isinstance(module, Weight) and attribute == "weight":
        check_shape(ours, tuple(tensor.shape), module.shape)
        # Formats with types of their own round for themselves: rounding to the model's type first would only lose.
        own = all(part.dtype is not None for part in module.format.layout(module.shape).values())
        module.assign(tensor.to(device=device, dtype=torch.float32 if own else dtype))
    else:
        check_shape(ours, tuple(tensor.shape), tuple(getattr(module, attribute).shape))
        setattr(module, attribute, nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False))


def check_shape(ours: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != tuple(expected):
        raise BadFile(f"{ours} has shape {found}, not {expected}", hint="config and weights disagree")


def carried(
    model: nn.Module,
    tree: BaseConfig,
    *,
    device: torch.device | str | None = None,
    begins: Mapping[str, Callable[[], Tensor]] | None = None,
) -> Any:
    """The model in another tree: what both have is carried over, packed as the new tree says (code for code where it says the
    same as before), and what the new tree lacks is dropped. Tensors that only the new tree has begin as their module says
    (`begin`), or as `begins` says by name, whatever the model has there; one of which nothing is said is refused. The model
    itself is not changed, and is not shared."""
    with torch.device("meta"):
        new: nn.Module = tree.complete().build()
    old = tensor_names(model)
    for ours, (module, attribute) in tensor_names(new).items():
        begin = getattr(module, "begin", {}).get(attribute)
        if begins is not None and ours in begins:
            given = begins[ours]()
            fill(module, attribute, ours, given, given.dtype, given.device if device is None else device)
        elif ours in old:
            _carry(module, attribute, ours, *old[ours], device)
        elif begin is not None:
            fresh = begin(getattr(module, attribute).shape)
            setattr(module, attribute, nn.Parameter(fresh if device is None else fresh.to(device)))
        else:
            raise ConfigError(f"the new tree has {ours}, which the model lacks", hint="say how it begins (`begin`)")
    return new.train(model.training)


def _carry(
    module: nn.Module, attribute: str, ours: str, old: nn.Module, name: str, device: torch.device | str | None
) -> None:
    if isinstance(module, Weight) and isinstance(old, Weight) and attribute == "weight" and _kept_alike(module, old):
        parts = {part: value.detach().clone() for part, value in old.packed().items()}
        module._place(parts if device is None else {part: value.to(device) for part, value in parts.items()})
        return
    tensor = dense_tensor(old, name).detach()
    dtype = tensor.dtype if tensor.is_floating_point() else torch.float32
    fill(module, attribute, ours, tensor.clone(), dtype, tensor.device if device is None else device)


def _kept_alike(one: Weight, other: Weight) -> bool:
    formats: tuple[Any, Any] = (one.format, other.format)
    return one.shape == other.shape and bool(formats[0].config == formats[1].config)
