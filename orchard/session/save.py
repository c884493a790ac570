"""Write a loaded model with everything it needs to be loaded again: weights, config, tokenizer, template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchard.core.errors import UsageError
from orchard.text.to_gguf import gguf_metadata
from orchard.text.tokenizer import Tokenizer
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.compressed import write_compressed
from orchard.weights.compressed_file import ENDING, CompressedFile, is_compressed
from orchard.weights.export import save_folder, save_gguf
from orchard.weights.folder import HFFolder
from orchard.weights.gguf.types import ArrayType, GGUFValueType, Typed

if TYPE_CHECKING:
    from orchard.session.build import Built
    from orchard.session.model import Model

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "LICENSE",
)
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}
"""What most tensors of a file are, by the GGUF specification's numbers."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def save_model(model: Model, path: Path, type: str | None) -> None:
    save_built(model.built, model.tokenizer, model.source, path, type)


def save_built(
    built: Built,
    tokenizer: Tokenizer,
    source: Path | None,
    path: Path,
    type: str | None,
    made: dict[str, Any] | None = None,
) -> None:
    """Write torch modules: a GGUF file or a compressed file where the path ends so, a folder otherwise. `source` is where the
    model came from; `made` is what a compressed file says of how it was made."""
    if built.family is None:
        raise UsageError("this model belongs to no family that files know", hint="keep its config tree and state dict")
    described: dict[str, Any] = {"family": built.family, "hf_config": built.hf_config}
    if path.suffix == ENDING:
        if type is not None:
            raise UsageError(f"cannot write a compressed file as {type!r}", hint="it keeps what the model is made of")
        told = {**_origin(source), **(made or {})}
        write_compressed(path, built.decoder, tokenizer_files=companions(tokenizer, source), made=told, **described)
        return
    if path.suffix == ".gguf":
        kind = type or "f16"
        metadata = _gguf_facts(tokenizer, source, built.decoder.config.vocab)
        if kind in FILE_TYPES:
            metadata["general.file_type"] = FILE_TYPES[kind]
        save_gguf(built.decoder, path, type=kind, metadata=metadata, **described)
        return
    name = type or str(built.hf_config.get("dtype") or built.hf_config.get("torch_dtype") or "")
    if type is not None and type not in DTYPES:
        raise UsageError(f"cannot write a folder as {type!r}", hint="one of " + ", ".join(DTYPES))
    extra = companions(tokenizer, source)
    save_folder(built.decoder, path, dtype=DTYPES.get(name), extra_files=extra, **described)


def _gguf_facts(tokenizer: Tokenizer, source: Path | None, rows: int) -> dict[str, Any]:
    """What a GGUF file says besides the model's shape: tokenizer, template, name, licence. A source that is GGUF itself is
    repeated word for word; the tokenizer of any other is converted."""
    if source is None or source.suffix != ".gguf" or not source.exists():
        facts = {key: _typed(value) for key, value in gguf_metadata(tokenizer, rows).items()}
        return facts if source is None else {"general.name": source.name, **facts}
    with open_checkpoint(source) as checkpoint:
        assert not isinstance(checkpoint.source, HFFolder | CompressedFile)
        typed = checkpoint.source.typed_metadata()
        arch = f"{checkpoint.source.metadata['general.architecture']}."
        return {key: value for key, value in typed.items() if not key.startswith(arch) and key != "general.file_type"}


def _typed(value: Any) -> Any:
    """Lists as readers expect them; an empty one has to say of what."""
    if not isinstance(value, list):
        return value
    first = value[0] if value else ""
    kinds = {str: GGUFValueType.STRING, int: GGUFValueType.INT32, float: GGUFValueType.FLOAT32}
    return Typed(value, ArrayType(kinds[type(first)]))


def _origin(source: Path | None) -> dict[str, Any]:
    """What is known of the model that a compressed file was made from; one that is compressed itself tells what it was told."""
    if source is None or not source.exists():
        return {}
    with open_checkpoint(source) as checkpoint:
        if isinstance(checkpoint.source, CompressedFile):
            return dict(checkpoint.source.made)
        licence = checkpoint.licence
    name = source.parent.name if source.stem == "model" else source.stem if source.is_file() else source.name
    return {"from": name, **({"licence": licence} if licence else {})}


def companions(tokenizer: Tokenizer, source: Path | None) -> dict[str, bytes]:
    """The tokenizer's files: copied where the source has them, written from the tokenizer otherwise."""
    if source is not None and is_compressed(source) and source.is_file():
        with CompressedFile.open(source) as file:
            return {name: data for name, data in file.files().items() if name in COPIED}
    if source is not None and (source / "tokenizer.json").is_file():
        return {name: (source / name).read_bytes() for name in COPIED if (source / name).is_file()}
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": tokenizer.add_bos}
    for role, text in (("bos_token", tokenizer.bos_token), ("eos_token", tokenizer.eos_token)):
        if text:
            facts[role] = text
    if tokenizer.chat_template:
        facts["chat_template"] = tokenizer.chat_template
    generation = {"eos_token_id": sorted(tokenizer.eos_ids), "bos_token_id": tokenizer.bos_id}
    return {
        "tokenizer.json": tokenizer.to_json().encode(),
        "tokenizer_config.json": json.dumps(facts, indent=2, ensure_ascii=False).encode(),
        "generation_config.json": json.dumps(generation, indent=2).encode(),
    }
