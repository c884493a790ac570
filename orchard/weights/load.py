"""From a checkpoint to a decoder that runs: checked against its config, built without memory, filled tensor by tensor."""

from __future__ import annotations

import torch
from torch import nn

from orchard.core.errors import BadFile
from orchard.core.progress import progress
from orchard.models.language.decoder import Decoder
from orchard.models.zoo.fields import shown
from orchard.nn.formats import GroupedFormat, Packed, Plain
from orchard.nn.linear import Weight
from orchard.nn.tensors import check_shape, fill, tensor_shapes
from orchard.nn.tensors import dense_tensor as dense_tensor
from orchard.nn.tensors import tensor_names as tensor_names
from orchard.weights.checkpoint import DISAGREE, Checkpoint
from orchard.weights.compressed_read import CompressedCheckpoint


def load_decoder(
    checkpoint: Checkpoint,
    config: Decoder.Config | None = None,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Build the checkpoint's model (or a rewritten `config` of it) and read its weights.

    Weights are packed into whatever format the config asks for as they arrive, so that a compressed model never exists
    uncompressed as a whole; where the file already holds what the format keeps (`as_stored`), it is taken over as it is. A
    checkpoint whose tensors are not those of its own config is refused before anything is built or read. Tensors that a module
    says how to `begin` (name → shape → tensor) are its own, such as a side path's, and begin so where the file has none.

    `dtype` None: float32, but for dense weights that a compressed file keeps in bfloat16, which stay so: they take half the room.
    """
    source = checkpoint.config().complete()
    refuse_misfits(checkpoint, source)
    tree = source if config is None else config.complete()
    with torch.device("meta"):
        model: Decoder = tree.build()
    names = tensor_names(model)
    with progress(f"reading {checkpoint.path.name}", total=len(names)) as advance:
        for ours, (module, attribute) in names.items():
            begin = getattr(module, "begin", {}).get(attribute)
            stored, wide = _stored_name(ours, module, attribute, checkpoint), dtype or torch.float32
            if begin is not None and not checkpoint.holds(stored):  # a transform added it
                fresh = begin(getattr(module, attribute).shape)  # a vector says how long rows are: it stays exact
                setattr(module, attribute, nn.Parameter(fresh.to(device, wide if fresh.dim() > 1 else None)))
            elif begin is not None:
                found = checkpoint.read(stored, source)
                fill(module, attribute, ours, found, wide if found.dim() > 1 else torch.float32, device)
            elif not _take_over(module, attribute, ours, checkpoint, source, device, dtype):
                fill(module, attribute, ours, checkpoint.read(stored, source), wide, device)
            advance()
    return model.eval().requires_grad_(False)


def refuse_misfits(checkpoint: Checkpoint, tree: Decoder.Config) -> None:
    """Hold the tensors of a checkpoint against the completed tree of its config: none missing, none of another shape or
    kind, and none left over, for a tensor that nobody reads means that the model is not what we think it is."""
    used: set[str] = set()
    for ours, shape in tensor_shapes(tree).items():
        used.update(checkpoint.check(ours, shape, tree))
    spare = checkpoint.spare(tree)
    left = [name for name in checkpoint.tensors if name not in used and name not in spare]
    if left:
        names = ", ".join(map(shown, left[:3])) + (" …" if len(left) > 3 else "")
        raise BadFile(
            f"{len(left)} tensors of {checkpoint.path.name} belong to no part of a {checkpoint.family.name} model: {names}",
            hint=DISAGREE,
        )


def _stored_name(ours: str, module: nn.Module, attribute: str, checkpoint: Checkpoint) -> str:
    """What a file calls a tensor. Where an adapter goes beside a side path that belongs to the model (`kept_a`), the file's side
    path (`lora_a`) is the model's own, and the adapter's is in no file: it has no name."""
    if not hasattr(module, "kept_a") or checkpoint.holds(f"{ours.removesuffix(attribute)}kept_a"):
        return ours
    if attribute.startswith("kept_"):
        return f"{ours.removesuffix(attribute)}lora_{attribute.removeprefix('kept_')}"
    return "" if attribute.startswith("lora_") else ours


def _take_over(
    module: nn.Module,
    attribute: str,
    ours: str,
    checkpoint: Checkpoint,
    source: Decoder.Config,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> bool:
    """Keep what the file holds, code for code. False where the module's format is another."""
    if not isinstance(module, Weight) or attribute != "weight":
        return False
    if isinstance(checkpoint, CompressedCheckpoint):
        packed = checkpoint.read_packed(ours, module.format, module.shape)
        if packed is not None:
            module._place({name: part.to(device) for name, part in _typed(module, packed, dtype).items()})
            return True
    if not isinstance(module.format, GroupedFormat):
        return False
    grouped = checkpoint.read_grouped(ours, source)
    if grouped is None:
        return False
    check_shape(ours, tuple(grouped.codes.shape), module.shape)
    return module.assign_grouped(grouped.to(device))


def _typed(module: Weight, packed: Packed, dtype: torch.dtype | None) -> Packed:
    """Packed parts; those without a type of their own, which a file keeps as narrow as it can, in the type that is asked for."""
    if dtype is None and isinstance(module.format, Plain) and packed["weight"].dtype == torch.bfloat16:
        return packed
    layout = module.format.layout(module.shape)
    return {name: part if layout[name].dtype else part.to(dtype or torch.float32) for name, part in packed.items()}
