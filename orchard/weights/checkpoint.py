"""A checkpoint on disk, whatever its format: what model it is, and its tensors by Orchard's names.

Opening one reads headers only. Tensors are read when asked for, in the layout Orchard computes in: experts stacked, rotary
pairs half a head apart, norm weights as the family stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from orchard.core.config import BaseConfig
from orchard.core.errors import BadFile, ModelNotFound, UnsupportedFormat
from orchard.models.language.decoder import Decoder
from orchard.models.zoo import Family, family_of
from orchard.nn.attention import Attention
from orchard.nn.moe import MoE
from orchard.weights.folder import HFFolder
from orchard.weights.gguf.arch import ROPE_FACTORS, hf_config
from orchard.weights.gguf.reader import GGUFFile


class TensorLike(Protocol):
    """What every format can tell of a tensor without reading it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass
class Checkpoint:
    """An open checkpoint. Close it, or use it as a context manager."""

    path: Path
    format: str
    family: Family
    hf_config: dict[str, Any]
    tensors: Mapping[str, TensorLike]
    source: GGUFFile | HFFolder
    licence: str | None = None

    def config(self) -> Decoder.Config:
        """The model as a config tree, without weights."""
        return self.family.tree(self.hf_config)

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Tensors ------------------------------------------------------------------------------------------------------

    def name(self, ours: str, tree: Decoder.Config) -> str:
        """The file's name for one of our tensors; `{e}` stands for the expert where the file keeps them apart."""
        mixture = isinstance(_block_part(ours, tree, "mlp"), MoE.Config)
        try:
            if self.format == "gguf":
                return self.family.gguf_name(ours, mixture=mixture)
            return self._spelled(self.family.hf_name(ours, mixture=mixture))
        except KeyError as error:
            raise UnsupportedFormat(
                f"{self.family.name} files have no place for {ours}", hint="save in Orchard's own names"
            ) from error

    def read(self, ours: str, tree: Decoder.Config) -> Tensor:
        """One of our tensors, dense: in the dtype it has on disk, or float32 where the file packs it."""
        name = self.name(ours, tree)
        if "{e}" in name:
            experts = _block_part(ours, tree, "mlp").experts
            return torch.stack([self._read(name.format(e=e)) for e in range(experts)])
        tensor = self._read(name)
        if self.format == "gguf":
            return from_gguf(ours, tensor, tree, self.family)
        return tensor

    def _read(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise BadFile(f"{self.path.name} has no tensor {name!r}", hint="the file is incomplete: download it again")
        if isinstance(self.source, GGUFFile):
            return self.source.read(name, dtype=None)
        return self.source.read(name)

    def _spelled(self, name: str) -> str:
        """Checkpoints that also see, and bare bodies, keep the same tensors under another prefix."""
        first = name.replace("{e}", "0")
        body = name.removeprefix("model.")
        for candidate in (name, f"language_model.{name}", f"model.language_model.{body}", body):
            if candidate.replace("{e}", "0") in self.tensors:
                return candidate
        raise BadFile(f"{self.path.name} has no tensor {first!r}", hint="the file is incomplete: download it again")


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder, or a folder with one GGUF file in it. Reads headers only."""
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if files and not (path / "config.json").exists():
            if len(files) > 1:
                raise BadFile(f"{path.name} holds {len(files)} GGUF files", hint="name the one you want")
            return _open_gguf(files[0])
        return _open_folder(path)
    if not path.exists():
        raise ModelNotFound(f"nothing at {path}", hint="check the path, or `orchard list` for pulled models")
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile.open(path)
    try:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        hf = hf_config(file.metadata, shapes, lambda name: file.read(name).tolist())
        licence = file.metadata.get("general.license")
        return Checkpoint(path, "gguf", family_of(hf), hf, file.tensors, file, licence)
    except BaseException:
        file.close()
        raise


def _open_folder(path: Path) -> Checkpoint:
    folder = HFFolder.open(path)
    try:
        hf = folder.config
        if "quantization_config" in hf:
            method = (
                hf["quantization_config"].get("quant_method", "unknown")
                if isinstance(hf["quantization_config"], dict)
                else "?"
            )
            raise UnsupportedFormat(
                f"weights quantised by {method!r} are not read", hint="take the unquantised model or a GGUF"
            )
        return Checkpoint(path, "safetensors", family_of(hf), hf, folder.tensors, folder)
    except BaseException:
        folder.close()
        raise


# Layout -----------------------------------------------------------------------------------------------------------


def from_gguf(ours: str, tensor: Tensor, tree: Decoder.Config, family: Family) -> Tensor:
    """A GGUF tensor as Orchard keeps it."""
    return _relayout(ours, tensor, tree, family, _pairs_apart, -1.0)


def to_gguf(ours: str, tensor: Tensor, tree: Decoder.Config, family: Family) -> Tensor:
    """One of our tensors as its family's GGUF files keep it."""
    return _relayout(ours, tensor, tree, family, _pairs_together, 1.0)


def _relayout(
    ours: str,
    tensor: Tensor,
    tree: Decoder.Config,
    family: Family,
    reorder: Callable[[Tensor, int], Tensor],
    sign: float,
) -> Tensor:
    if family.adds_norm_offset and "norm" in ours.rsplit(".", 2)[-2]:
        return tensor + sign
    part = ours.rsplit(".", 2)[-2]
    if family.pairs_neighbours and ".mixer." in ours and part in ("q", "k"):
        mixer = _block_part(ours, tree, "mixer")
        heads = mixer.heads if part == "q" else mixer.kv_heads
        if tensor.shape[0] % (2 * heads):
            raise BadFile(f"{ours} has {tensor.shape[0]} rows for {heads} heads", hint="the file is damaged")
        return reorder(tensor, heads)
    return tensor


def _pairs_apart(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _pairs_together(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _block_part(ours: str, tree: Decoder.Config, part: str) -> Any:
    """The config of a part (`mixer`, `mlp`) of the block that a tensor belongs to; None outside blocks."""
    if not ours.startswith("stack.layers."):
        return None
    block: BaseConfig = tree.stack.layers[int(ours.split(".")[2])]
    found = getattr(block, part)
    if part == "mixer" and not isinstance(found, Attention.Config):
        raise UnsupportedFormat(f"{ours} is no attention tensor", hint="save in Orchard's own names")
    return found


IGNORED = (
    ROPE_FACTORS,
    "rotary_emb.inv_freq",
    "vision_tower.",
    "multi_modal_projector.",
    "lm_head.weight",
    "output.weight",
)
"""Tensors that a file may hold and a text model does not read (a tied model's head among them)."""
