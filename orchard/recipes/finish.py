"""What a run leaves: `model`, a Hugging Face folder with its tokenizer, or `adapter`, a PEFT folder signed by its base. A base
that was changed into something that no such folder describes is left as the file `model.orchard`.

Both are made from the last checkpoint, which holds the whole of every tensor whatever the run was cut into, and both are there
whole or not at all. With averages (EMA) it is the averages that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from orchard.core.errors import ConfigError
from orchard.models.language.decoder import Decoder
from orchard.nn.attention import Attention
from orchard.nn.tensors import fill, tensor_names
from orchard.recipes.begin import Begun
from orchard.recipes.shapes import words_of
from orchard.session.build import Built
from orchard.session.save import save_built
from orchard.transforms.route_kv import settled
from orchard.weights.adapters import Side, write_adapter
from orchard.weights.compressed_file import ENDING
from orchard.weights.export import describing
from orchard.weights.safetensors import SafetensorsFile

if TYPE_CHECKING:
    from orchard.recipes.run import Run

MODEL, ADAPTER = "model", "adapter"


def result_of(cfg: Run.Config, folder: Path, begun: Begun) -> Path:
    """Where the result goes."""
    if cfg.adapter is not None:
        return folder / ADAPTER
    own = bool(cfg.after) or _shares(begun.model.config)  # what no folder may describe
    changed = own and begun.family is not None and describing(begun.family, begun.hf_config, begun.model) is None
    return folder / (MODEL + ENDING if changed else MODEL)


def describe(begun: Begun) -> str:
    """Say in Hugging Face's words what a fresh model is, so that it can be written; why not, where there are none."""
    if begun.family is not None:
        return ""
    try:
        begun.family, begun.hf_config = words_of(_each_its_own(begun.model.config))
    except ConfigError as error:
        return error.message
    begun.hf_config |= {"bos_token_id": begun.tokenizer.bos_id, "eos_token_id": begun.tokenizer.eos_id}
    return ""


def write_model(begun: Begun, weights: Path, target: Path) -> None:
    """The whole model, from a file of all its weights."""
    with torch.device("meta"):
        model: Decoder = settled(begun.model.config).build()
    with SafetensorsFile.open(weights) as file:
        for ours, (module, attribute) in tensor_names(model).items():
            fill(module, attribute, ours, file.read(ours), torch.float32, "cpu")
        save_built(Built(model, begun.family, begun.hf_config), begun.tokenizer, begun.words, target, None)


def write_sides(cfg: Run.Config, begun: Begun, weights: Path, target: Path) -> None:
    """The side paths alone."""
    assert cfg.adapter is not None and begun.signed is not None
    with SafetensorsFile.open(weights) as file:
        a, b, sizes = (_arrays(file, begun.scales, name) for name in ("lora_a", "lora_b", "lora_magnitude"))
    more: dict[str, Any] = {"lora_dropout": cfg.adapter.dropout} if cfg.adapter.dropout else {}
    write_adapter(
        target,
        {path: Side(a[path], b[path], scale) for path, scale in begun.scales.items()},
        begun.signed,
        base_name=cfg.base or "",
        rslora=cfg.adapter.method == "rslora",
        more=more,
        magnitudes=sizes or None,
    )


def _shares(tree: Decoder.Config) -> bool:
    return any(mixer.store.owner is not None for _, mixer in tree.find(Attention))


def _each_its_own(tree: Decoder.Config) -> Decoder.Config:
    """The tree in which every layer keeps keys and values: families have no words for others. The file `model.orchard` says which
    do, beside the words for all the rest."""
    if not _shares(tree):
        return tree
    whole = next(mixer for _, mixer in tree.find(Attention) if mixer.store.owner is None)
    own = {"k": whole.k, "v": whole.v, "k_norm": whole.k_norm}
    return tree.rewrite(
        Attention,
        lambda node: node if node.store.owner is None else node.clone(store=node.store.clone(owner=None), **own),
    )


def _arrays(file: SafetensorsFile, paths: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    found = {path: f"{path}.{name}" for path in paths if f"{path}.{name}" in file.tensors}
    return {path: file.read(full).float().numpy() for path, full in found.items()}
