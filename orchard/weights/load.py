"""From a checkpoint to a decoder that runs: checked against its config, built without memory, filled tensor by tensor."""

from __future__ import annotations

import torch
from torch import nn

from orchard.core.errors import BadFile
from orchard.core.progress import progress
from orchard.models.language.decoder import Decoder
from orchard.models.zoo.fields import shown
from orchard.nn.formats import GroupedFormat
from orchard.nn.linear import Weight
from orchard.nn.tensors import check_shape, fill, tensor_shapes
from orchard.nn.tensors import dense_tensor as dense_tensor
from orchard.nn.tensors import tensor_names as tensor_names
from orchard.weights.checkpoint import DISAGREE, Checkpoint


def load_decoder(
    checkpoint: Checkpoint,
    config: Decoder.Config | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Build the checkpoint's model (or a rewritten `config` of it) and read its weights.

    Weights are packed into whatever format the config asks for as they arrive, so that a compressed model never exists
    uncompressed as a whole; where the file already holds what the format keeps (`as_stored`), it is taken over as it is. A
    checkpoint whose tensors are not those of its own config is refused before anything is built or read. Tensors that a module
    says how to `begin` (name → shape → tensor) are its own, such as a side path's, and begin so.
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
            if begin is not None:  # a transform added it: no checkpoint has it
                fresh = begin(getattr(module, attribute).shape)  # a vector says how long rows are: it stays exact
                setattr(module, attribute, nn.Parameter(fresh.to(device, dtype if fresh.dim() > 1 else None)))
            elif not _take_over(module, attribute, ours, checkpoint, source, device):
                fill(module, attribute, ours, checkpoint.read(ours, source), dtype, device)
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


def _take_over(
    module: nn.Module,
    attribute: str,
    ours: str,
    checkpoint: Checkpoint,
    source: Decoder.Config,
    device: torch.device | str,
) -> bool:
    """Keep what the file holds, code for code. False where the module's format is another."""
    if not isinstance(module, Weight) or attribute != "weight" or not isinstance(module.format, GroupedFormat):
        return False
    grouped = checkpoint.read_grouped(ours, source)
    if grouped is None:
        return False
    check_shape(ours, tuple(grouped.codes.shape), module.shape)
    return module.assign_grouped(grouped.to(device))
