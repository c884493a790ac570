"""From a checkpoint to a decoder that runs: built without memory, then filled tensor by tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from orchard.core.errors import BadFile
from orchard.core.progress import progress
from orchard.models.language.decoder import Decoder
from orchard.nn.linear import Weight
from orchard.weights.checkpoint import IGNORED, Checkpoint


def load_decoder(
    checkpoint: Checkpoint,
    config: Decoder.Config | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Build the checkpoint's model (or a rewritten `config` of it) and read its weights.

    Weights are packed into whatever format the config asks for as they arrive, so that a compressed model never exists
    uncompressed as a whole.
    """
    source = checkpoint.config().complete()
    tree = (config or source).complete()
    with torch.device("meta"):
        model: Decoder = tree.build()
    names = tensor_names(model)
    with progress(f"reading {checkpoint.path.name}", total=len(names)) as advance:
        for ours, (module, attribute) in names.items():
            _fill(module, attribute, ours, checkpoint.read(ours, source), dtype, device)
            advance()
    _refuse_leftovers(checkpoint, source, list(names))
    return model.eval().requires_grad_(False)


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
        if "weight" in module.packed():
            tensor: Tensor = module.packed()["weight"]
            return tensor if dtype is None else tensor.to(dtype)
        return module.dense(dtype or torch.float32)
    tensor = getattr(module, attribute)
    return tensor if dtype is None else tensor.to(dtype)


def _fill(
    module: nn.Module,
    attribute: str,
    ours: str,
    tensor: Tensor,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    whole = isinstance(module, Weight) and attribute == "weight"
    expected = module.shape if whole else tuple(getattr(module, attribute).shape)
    if tuple(tensor.shape) != tuple(expected):  # type: ignore[arg-type]
        raise BadFile(f"{ours} has shape {tuple(tensor.shape)}, not {expected}", hint="config and weights disagree")
    tensor = tensor.to(device=device, dtype=dtype)
    if whole:
        module.assign(tensor)  # type: ignore[operator]
    else:
        setattr(module, attribute, nn.Parameter(tensor, requires_grad=False))


def _refuse_leftovers(checkpoint: Checkpoint, tree: Decoder.Config, ours: list[str]) -> None:
    """A tensor nobody read means that the model is not what we think it is."""
    used: set[str] = set()
    for name in ours:
        theirs = checkpoint.name(name, tree)
        if "{e}" in theirs:
            head, tail = theirs.split("{e}")
            used.update(n for n in checkpoint.tensors if n.startswith(head) and n.endswith(tail))
        else:
            used.add(theirs)
    left = [n for n in checkpoint.tensors if n not in used and not any(part in n for part in IGNORED)]
    if left:
        shown = ", ".join(left[:3]) + (" …" if len(left) > 3 else "")
        raise BadFile(
            f"{len(left)} tensors of {checkpoint.path.name} belong to no part of a {checkpoint.family.name} model: {shown}",
            hint="the config and the weights are of different models",
        )
