"""From a decoder back to files that others read: a Hugging Face folder, or one GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchard.core.config_text import diff
from orchard.core.errors import ConfigError, UnsupportedFormat, UsageError
from orchard.core.progress import Advance, progress
from orchard.models.language.decoder import Decoder
from orchard.models.zoo import Family, families, family_of
from orchard.models.zoo.mixtral import mixture_words
from orchard.nn.attention import Attention, Rotary, scaling
from orchard.nn.formats import Plain
from orchard.nn.linear import Embedding, GroupedLinear, Linear
from orchard.nn.moe import MoE
from orchard.nn.stack import block_of
from orchard.nn.tensors import dense_tensor, tensor_names
from orchard.weights.checkpoint import Checkpoint, to_gguf
from orchard.weights.folder import write_folder
from orchard.weights.gguf.arch import ROPE_FACTORS, gguf_metadata
from orchard.weights.gguf.arch import hf_config as read_arch
from orchard.weights.gguf.quants import quantize
from orchard.weights.gguf.reader import GGUFFile
from orchard.weights.gguf.types import GGMLType
from orchard.weights.gguf.writer import TensorOut, write_gguf
from orchard.weights.safetensors import Lazy

WRITABLE = {name: GGMLType[name.upper()] for name in ("f32", "f16", "bf16", "q8_0", "q4_0")}


def save_folder(
    model: Decoder,
    path: Path,
    *,
    family: Family,
    hf_config: dict[str, Any],
    dtype: torch.dtype | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a Hugging Face folder (sharded when large). Packed weights are unpacked; `dtype` None keeps the model's."""
    family, hf_config = _words(family, hf_config, model)
    dtype = dtype or model.dtype
    tensors: dict[str, Lazy] = {}
    for ours, (module, attribute) in tensor_names(model).items():
        name = family.hf_name(ours, mixture=_mixture(ours, model))
        shape = _shape(module, attribute)
        if "{e}" in name:
            for expert in range(shape[0]):
                make = partial(_expert, module, attribute, dtype, expert)
                tensors[name.format(e=expert)] = Lazy(shape[1:], dtype, make)
        else:
            tensors[name] = Lazy(shape, dtype, partial(_dense, module, attribute, dtype))
    config = {**hf_config, "dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    with progress(f"writing {path.name}", total=len(tensors)) as advance:
        counted = {name: replace(lazy, load=partial(_counted, lazy.load, advance)) for name, lazy in tensors.items()}
        write_folder(path, config, counted, extra_files=extra_files or {})


def save_gguf(
    model: Decoder,
    path: Path,
    *,
    family: Family,
    hf_config: dict[str, Any],
    type: str = "f16",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write one GGUF file. `metadata` adds keys (the tokenizer's, the licence) to those that describe the model."""
    if type not in WRITABLE:
        raise UsageError(f"cannot write GGUF tensors as {type!r}", hint="one of " + ", ".join(WRITABLE))
    if not family.gguf:
        raise UnsupportedFormat(f"GGUF has no words for {family.name} models", hint="save a folder or an .orchard file")
    family, hf_config = _words(family, hf_config, model)
    described = gguf_metadata({**family.fields(hf_config), "head_dim": _mixer(model).head_dim}, family.gguf)
    tensors = list(_gguf_tensors(model, family, WRITABLE[type]))
    # GGUF has no words for some facts (how Gemma scales queries, which layers of a mixture are dense): what a reader would
    # understand from this file must be this model.
    understood = read_arch(
        described, {t.name: t.shape for t in tensors}, lambda name: _rope_factors(_mixer(model).rotary)
    )
    _check_describes(family_of(understood), understood, model, drop_stretch=True)
    kept = {key: value for key, value in (metadata or {}).items() if key not in described}
    with progress(f"writing {path.name}", total=len(tensors)) as advance:
        counted = [replace(tensor, data=partial(_counted, tensor.data, advance)) for tensor in tensors]
        write_gguf(path, {**described, **kept}, counted)


def copy_gguf(checkpoint: Checkpoint, path: Path) -> None:
    """Write a GGUF checkpoint again, every value and tensor as it was, whatever their types."""
    file = checkpoint.source
    if not isinstance(file, GGUFFile):
        raise UsageError(f"{checkpoint.path.name} is no GGUF file", hint="load it and save it with a tensor type")
    tensors = [TensorOut(name, info.shape, info.type, partial(file.raw, name)) for name, info in file.tensors.items()]
    write_gguf(path, file.typed_metadata(), tensors)


def _counted(make: Callable[[], Any], advance: Advance) -> Any:
    made = make()
    advance()
    return made


def _gguf_tensors(model: Decoder, family: Family, type: GGMLType) -> Iterator[TensorOut]:
    factors = _rope_factors(_mixer(model).rotary)
    if factors is not None:
        yield TensorOut(ROPE_FACTORS, tuple(factors.shape), GGMLType.F32, factors.numpy)
    for ours, (module, attribute) in tensor_names(model).items():
        name = family.gguf_name(ours, mixture=_mixture(ours, model))
        shape = _shape(module, attribute)
        # Vectors and routers decide much and weigh little: they stay exact. Rows that blocks do not divide cannot be packed.
        small = len(shape) < 2 or ".router." in ours
        kind = GGMLType.F32 if small or shape[-1] % type.block_size else type
        make: Callable[[], Tensor] = partial(_dense, module, attribute, torch.float32)
        yield TensorOut(name, shape, kind, partial(_gguf_bytes, make, ours, model, family, kind))


def _gguf_bytes(make: Callable[[], Tensor], ours: str, model: Decoder, family: Family, kind: GGMLType) -> np.ndarray:
    dense = to_gguf(ours, make(), model.config, family)
    return quantize(dense.cpu().numpy(), kind)


def describing(family: Family, hf_config: dict[str, Any], model: Decoder) -> tuple[Family, dict[str, Any]] | None:
    """A family and a config that describe the model: those it came with, or those of a mixture that its MLPs have become."""
    if not _differs(family, hf_config, model):
        return family, hf_config
    mixture, words = families()["mixtral"], mixture_words(hf_config, model.config)
    return None if words is None or _differs(mixture, words, model) else (mixture, words)


def _words(family: Family, hf_config: dict[str, Any], model: Decoder) -> tuple[Family, dict[str, Any]]:
    found = describing(family, hf_config, model)
    if found is None:
        _check_describes(family, hf_config, model)
    return found or (family, hf_config)


def _differs(family: Family, hf_config: dict[str, Any], model: Decoder, *, drop_stretch: bool = False) -> list[Any]:
    """`drop_stretch` leaves rotary stretches that are kept as a tensor out of the comparison."""
    described, real = shape_only(family.tree(hf_config).complete()), shape_only(model.config)
    if drop_stretch:
        described, real = without_stretch(described), without_stretch(real)
    return diff(described, real)


def _check_describes(family: Family, hf_config: dict[str, Any], model: Decoder, *, drop_stretch: bool = False) -> None:
    """Refuse to write a config that is not this model's: formats and stores are Orchard's affair, the rest is not."""
    changes = _differs(family, hf_config, model, drop_stretch=drop_stretch)
    if changes:
        shown = "; ".join(str(change) for change in changes[:3])
        raise ConfigError(
            f"a {family.name} file cannot describe this model: {shown}",
            hint="save it before the rewrite, or with a config that says the same",
        )


def shape_only(tree: Decoder.Config) -> Decoder.Config:
    for kind in (Linear, GroupedLinear, Embedding):
        if tree.find(kind):
            tree = tree.rewrite(kind, lambda node: node.clone(format=Plain.Config()))
    return tree.rewrite(Attention, lambda node: node.clone(store=type(node.store)(owner=node.store.owner), borrow=None))


def without_stretch(tree: Decoder.Config) -> Decoder.Config:
    tensors = (scaling.Llama3.Config, scaling.Factors.Config)
    if not tree.find(Rotary):
        return tree
    return tree.rewrite(Rotary, lambda node: node.clone(scaling=None) if isinstance(node.scaling, tensors) else node)


def _mixture(ours: str, model: Decoder) -> bool:
    return isinstance(getattr(block_of(ours, model.config), "mlp", None), MoE.Config)


def _mixer(model: Decoder) -> Any:
    return model.config.stack.layers[0].mixer


def _shape(module: nn.Module, attribute: str) -> tuple[int, ...]:
    shape = getattr(module, "shape", None) if attribute == "weight" else None
    return tuple(shape if shape is not None else getattr(module, attribute).shape)


def _dense(module: nn.Module, attribute: str, dtype: torch.dtype) -> Tensor:
    return dense_tensor(module, attribute, dtype).detach().cpu().contiguous()


def _expert(module: nn.Module, attribute: str, dtype: torch.dtype, expert: int) -> Tensor:
    return _dense(module, attribute, dtype)[expert].contiguous()


def _rope_factors(cfg: Rotary.Config | None) -> Tensor | None:
    """Stretches that GGUF keeps as a tensor of divisors."""
    if cfg is None or cfg.scaling is None or isinstance(cfg.scaling, (scaling.Linear.Config, scaling.Yarn.Config)):
        return None
    if not isinstance(cfg.scaling, (scaling.Llama3.Config, scaling.Factors.Config)):
        name = cfg.scaling.builds.__name__
        raise UnsupportedFormat(f"GGUF has no words for rotary scaling {name}", hint="save a Hugging Face folder")
    plain, stretched = (tree.build().frequencies(torch.device("cpu")) for tree in (cfg.clone(scaling=None), cfg))
    factors: Tensor = plain / stretched
    return factors
