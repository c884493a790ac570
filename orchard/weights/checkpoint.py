"""A checkpoint on disk, whatever its format: what model it is, and its tensors by Orchard's names.

Opening one reads headers only. Tensors are read when asked for, in the layout Orchard computes in: experts stacked, rotary
pairs half a head apart, norm weights as the family stores them.

What a file claims to be is held against the tensors that are really in it before anything of the claimed size is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from orchard.core.errors import BadFile, ModelNotFound, UnsupportedFormat
from orchard.models.language.decoder import Decoder
from orchard.models.zoo import Family, family_of
from orchard.models.zoo.fields import count, shown
from orchard.nn.attention import Attention
from orchard.nn.formats import Grouped
from orchard.nn.moe import MoE
from orchard.nn.stack import block_of
from orchard.weights.compressed_file import ENDING, is_compressed
from orchard.weights.folder import HFFolder
from orchard.weights.gguf.arch import ROPE_FACTORS, file_config
from orchard.weights.gguf.grouped import split
from orchard.weights.gguf.quants import READABLE
from orchard.weights.gguf.reader import GGUFFile
from orchard.weights.sentence import refuse_encoder

if TYPE_CHECKING:
    from orchard.weights.compressed_file import CompressedFile

INCOMPLETE = "the file is incomplete: download it again"
DISAGREE = "the config and the weights disagree: they are of different models, or one of them is damaged"
FLOATS = frozenset({"F16", "F32", "F64", "BF16", "F8_E4M3", "F8_E5M2"} | {kind.name for kind in READABLE})
WHOLE = frozenset(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64)) | {"BOOL"}
_GGUF_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_HF_LAYER = re.compile(r"(?:language_model\.model\.|model\.language_model\.|model\.)?layers\.(\d{1,9})\.")


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
    source: GGUFFile | HFFolder | CompressedFile
    licence: str | None = None

    def config(self) -> Decoder.Config:
        """The model as a config tree, without weights. Refused when the file's tensors belie its number of layers, its
        vocabulary or its width; `load_decoder` checks every tensor."""
        pattern, name = (_GGUF_LAYER, "block_count") if self.format == "gguf" else (_HF_LAYER, "num_hidden_layers")
        claimed = count({name: self.family.fields(self.hf_config).get("num_hidden_layers")}, name)
        found = {match[1] for match in map(pattern.match, self.tensors) if match is not None}
        if claimed != len(found):
            raise BadFile(
                f"{name} is {claimed:,}, but {self.path.name} holds tensors of {len(found):,} layers", hint=DISAGREE
            )
        tree = self.family.tree(self.hf_config)
        self.check("embedding.weight", (tree.vocab, tree.dim), tree)
        return tree

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

    def check(self, ours: str, shape: tuple[int, ...], tree: Decoder.Config) -> list[str]:
        """Refuse one of our tensors that is not there, has another shape, or holds no weights; its names in the file.
        Nothing is read."""
        name = self.name(ours, tree)
        if "{e}" not in name:
            check_tensor(self.path, self.tensors, name, shape)
            return [name]
        names = []
        for expert in range(shape[0]):  # stops at the first that is missing, however many are claimed
            names.append(name.format(e=expert))
            check_tensor(self.path, self.tensors, names[-1], shape[1:])
        return names

    def spare(self, tree: Decoder.Config) -> set[str]:
        """Names of tensors that the file may hold and the model does not need: what is computed, or belongs to other
        senses, or repeats a tied embedding."""
        if self.format == "gguf":
            return {ROPE_FACTORS}
        found = {name for name in self.tensors if name.startswith(self.family.unread)} if self.family.unread else set()
        found |= {name for name in self.tensors if f".{name}".endswith(".rotary_emb.inv_freq")}
        if tree.head is None:
            found |= {name for name in spellings("lm_head.weight") if self._repeats_embedding(name, tree)}
        return found

    def holds(self, ours: str) -> bool:
        """Whether the file has a tensor that only Orchard knows, such as a side path's. Files of others have none."""
        return False

    def read(self, ours: str, tree: Decoder.Config) -> Tensor:
        """One of our tensors, dense: in the dtype it has on disk, or float32 where the file packs it."""
        name = self.name(ours, tree)
        if "{e}" in name:
            experts = [self._read(name.format(e=e)) for e in range(_block_part(ours, tree, "mlp").experts)]
            same = all(expert.dtype == experts[0].dtype for expert in experts)
            return torch.stack(experts if same else [expert.float() for expert in experts])
        tensor = self._read(name)
        if self.format == "gguf":
            return from_gguf(ours, tensor, tree, self.family)
        return tensor

    def read_grouped(self, ours: str, tree: Decoder.Config) -> Grouped | None:
        """One of our weights as the whole numbers and scales that the file holds; None where it holds no such thing."""
        name = self.name(ours, tree)
        if not isinstance(self.source, GGUFFile) or name not in self.source.tensors:
            return None
        info = self.source.tensors[name]
        found = split(self.source.raw(name), info.type, info.shape)
        if found is None:
            return None
        # Only rows change places, so codes, scales and minima move alike.
        codes, scales, minima = (
            None if part is None else from_gguf(ours, torch.from_numpy(part), tree, self.family) for part in found[:3]
        )
        assert codes is not None and scales is not None
        return Grouped(codes, scales, minima, found.bits, found.group)

    def _repeats_embedding(self, name: str, tree: Decoder.Config) -> bool:
        """Whether a head beside a tied embedding says the same. One that does not would be lost without a word."""
        if name not in self.tensors:
            return False
        check_tensor(self.path, self.tensors, name, (tree.vocab, tree.dim))
        head, embedding = self._read(name), self._read(self.name("embedding.weight", tree))
        if head.dtype != embedding.dtype:
            head, embedding = head.float(), embedding.float()
        if not torch.equal(head.view(torch.uint8), embedding.view(torch.uint8)):
            raise BadFile(
                f"tie_word_embeddings is true, but {name!r} is not the embedding",
                hint="set tie_word_embeddings to false in config.json to use both",
            )
        return True

    def _read(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise BadFile(f"{self.path.name} has no tensor {name!r}", hint=INCOMPLETE)
        if isinstance(self.source, GGUFFile):
            return self.source.read(name, dtype=None)
        tensor: Tensor = self.source.read(name)
        return tensor

    def _spelled(self, name: str) -> str:
        for candidate in spellings(name):
            if candidate.replace("{e}", "0") in self.tensors:
                return candidate
        raise BadFile(f"{self.path.name} has no tensor {name.replace('{e}', '0')!r}", hint=INCOMPLETE)


def check_tensor(path: Path, tensors: Mapping[str, TensorLike], name: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is not there, has another shape, or holds no weights. Nothing is read."""
    if name not in tensors:
        raise BadFile(f"{path.name} has no tensor {name!r}", hint=INCOMPLETE)
    info = tensors[name]
    if tuple(info.shape) != shape:
        raise BadFile(f"tensor {name!r} has shape {list(info.shape)}, not {list(shape)}", hint=DISAGREE)
    stored = getattr(info, "type", None)
    kind: str = stored.name if stored is not None else info.dtype  # type: ignore[attr-defined]
    if kind in WHOLE:
        raise BadFile(f"tensor {name!r} holds whole numbers ({kind}) where weights belong", hint=DISAGREE)
    if kind not in FLOATS:
        raise UnsupportedFormat(
            f"tensor {name!r} has type {shown(kind)}, which Orchard does not read",
            hint="use another file of the model, such as Q4_K_M, Q8_0 or F16",
        )


def spellings(name: str) -> list[str]:
    """Where a folder may keep a tensor. Checkpoints that also see, and bare bodies, use another prefix."""
    body = name.removeprefix("model.")
    return [name, f"language_model.{name}", f"model.language_model.{body}", body]


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a GGUF file, a compressed file, a Hugging Face folder, or a folder with one such file in it. Reads headers only."""
    path = Path(path)
    if path.is_dir():
        files = sorted((*path.glob("*.gguf"), *path.glob(f"*{ENDING}")))
        if files and not (path / "config.json").exists():
            if len(files) > 1:
                raise BadFile(f"{path.name} holds {len(files)} model files", hint="name the one you want")
            return _open_file(files[0])
        return _open_folder(path)
    if not path.exists():
        raise ModelNotFound(f"nothing at {path}", hint="check the path, or `orchard list` for pulled models")
    return _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    if is_compressed(path):
        from orchard.weights.compressed_read import CompressedCheckpoint

        return CompressedCheckpoint.open(path)
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile.open(path)
    try:
        hf = file_config(file)
        licence = file.metadata.get("general.license")
        known = licence if isinstance(licence, str) else None
        return Checkpoint(path, "gguf", family_of(hf), hf, file.tensors, file, known)
    except BaseException:
        file.close()
        raise


def _open_folder(path: Path) -> Checkpoint:
    folder = HFFolder.open(path)
    try:
        hf = folder.config
        refuse_encoder(hf, path.name)
        refuse_packing(hf)
        return Checkpoint(path, "safetensors", family_of(hf), hf, folder.tensors, folder)
    except BaseException:
        folder.close()
        raise


def refuse_packing(hf: dict[str, Any]) -> None:
    """Folders whose weights another library packed."""
    packing = hf.get("quantization_config")
    if packing is not None:
        method = packing.get("quant_method", "unknown") if isinstance(packing, dict) else packing
        raise UnsupportedFormat(
            f"quantization_config: weights packed by {shown(method)} are not read",
            hint="take the unquantised model or a GGUF",
        )


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
    block = block_of(ours, tree)
    if block is None:
        return None
    found = getattr(block, part)
    if part == "mixer" and not isinstance(found, Attention.Config):
        raise UnsupportedFormat(f"{ours} is no attention tensor", hint="save in Orchard's own names")
    return found
