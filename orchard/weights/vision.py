"""From a Hugging Face folder to a ViT that runs: held against its config, built without memory, filled tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch

from orchard.core.errors import BadFile
from orchard.models.vision.vit import ViT
from orchard.models.zoo.fields import shown
from orchard.models.zoo.vit import hf_name, vit
from orchard.nn.tensors import fill, tensor_names
from orchard.weights.checkpoint import DISAGREE, check_tensor, refuse_packing
from orchard.weights.folder import HFFolder

UNREAD = ("vit.pooler.dense.weight", "vit.pooler.dense.bias")
"""A layer above the first token, which classifying does without."""


def load_vit(path: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> ViT:
    """Build the folder's model and read its weights. What is missing, of another shape or of no part is refused first."""
    with HFFolder.open(Path(path)) as folder:
        refuse_packing(folder.config)
        with torch.device("meta"):
            model: ViT = vit(folder.config).build()
        parts = tensor_names(model)
        stored = {ours: _stored(model, ours, tuple(getattr(*parts[ours]).shape)) for ours in parts}
        for ours, shape in stored.items():
            check_tensor(folder.path, folder.tensors, hf_name(ours), shape)
        left = set(folder.tensors) - {hf_name(ours) for ours in parts} - set(UNREAD)
        if left:
            raise BadFile(f"{len(left)} tensors belong to no part of a ViT: {shown(sorted(left)[:3])}", hint=DISAGREE)
        for ours, (module, attribute) in parts.items():
            tensor = folder.read(hf_name(ours)).reshape(getattr(module, attribute).shape)
            fill(module, attribute, ours, tensor, dtype, device)
    return model.eval().requires_grad_(False)


def _stored(model: ViT, ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one of our tensors in a folder, which keeps the map of squares as a convolution and places as a batch."""
    patches = model.config.patches
    special = {
        "patches.map.weight": (shape[0], patches.channels, patches.patch, patches.patch),
        "patches.places": (1, *shape),
        "patches.first": (1, 1, *shape),
    }
    return special.get(ours, shape)
