"""Write a loaded model with everything it needs to be loaded again: weights, config, tokenizer, template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchard.core.errors import UsageError
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.export import save_folder, save_gguf
from orchard.weights.folder import HFFolder

if TYPE_CHECKING:
    from orchard.session.model import Model

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "LICENSE",
)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def save_model(model: Model, path: Path, type: str | None) -> None:
    if model.family is None:
        raise UsageError("this model belongs to no family that files know", hint="keep its config tree and state dict")
    if path.suffix == ".gguf":
        metadata = _kept_metadata(model)
        save_gguf(
            model.decoder, path, family=model.family, hf_config=model.hf_config, type=type or "f16", metadata=metadata
        )
        return
    name = type or str(model.hf_config.get("dtype") or model.hf_config.get("torch_dtype") or "")
    if type is not None and type not in DTYPES:
        raise UsageError(f"cannot write a folder as {type!r}", hint="one of " + ", ".join(DTYPES))
    save_folder(
        model.decoder,
        path,
        family=model.family,
        hf_config=model.hf_config,
        dtype=DTYPES.get(name),
        extra_files=_companions(model),
    )


def _kept_metadata(model: Model) -> dict[str, Any]:
    """What a GGUF source said besides its shape: tokenizer, template, name, licence."""
    if model.source is None or model.source.suffix != ".gguf" or not model.source.exists():
        raise UsageError(
            "a GGUF file needs a tokenizer in GGUF's own form, and this model did not come from one",
            hint="save a Hugging Face folder instead",
        )
    with open_checkpoint(model.source) as checkpoint:
        assert not isinstance(checkpoint.source, HFFolder)
        typed = checkpoint.source.typed_metadata()
        arch = f"{checkpoint.source.metadata['general.architecture']}."
        return {key: value for key, value in typed.items() if not key.startswith(arch) and key != "general.file_type"}


def _companions(model: Model) -> dict[str, bytes]:
    """The tokenizer's files: copied where the source has them, written from the tokenizer otherwise."""
    if model.source is not None and model.source.is_dir():
        return {name: (model.source / name).read_bytes() for name in COPIED if (model.source / name).is_file()}
    tokenizer = model.tokenizer
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
