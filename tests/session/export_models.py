"""Tiny models of several families with tokenizers that text can be spelled in, as folders, and adapters for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orchard.session.build import build
from orchard.session.model import Model
from orchard.text.tokenizer import Tokenizer
from orchard.weights.adapters import Side, write_adapter
from tests.parity.families import CASES, COMMON
from tests.text.tiny_vocabularies import byte_level, gguf_of_pieces
from tests.tiny import TEMPLATE

ROWS = 736
"""Of the embedding: more than any of the vocabularies has, as in many real models."""


def folder_of(path: Path, case: str = "llama", *, pieces: bool = False, dtype: str = "float32") -> Path:
    """A random model of a family in a folder, with byte-level BPE or with SentencePiece entries."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = CASES[case]
    torch.manual_seed(0)
    sizes = {"vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **changes, **sizes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" not in name:
                parameter.mul_(4.0)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    source = Tokenizer.from_gguf(gguf_of_pieces()).to_json() if pieces else byte_level("smollm")
    (path / "tokenizer.json").write_text(source, encoding="utf-8")
    facts: dict[str, Any] = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE, "add_bos_token": pieces}
    if pieces:
        facts |= {"bos_token": "<s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(facts))
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


def opened(path: Path) -> Model:
    tokenizer, built = build(path, None)
    return Model(built, tokenizer, name=path.name, source=path)


def adapter_for(
    base: Path, path: Path, *, seed: int = 0, rank: int = 3, size: float = 0.2, rslora: bool = False, dora: bool = False
) -> Path:
    """A random adapter of all linear maps in the layers of a model."""
    adapters = opened(base).adapters
    make = np.random.default_rng(seed)
    sides, lengths = {}, {}
    for name, shape in adapters.base.shapes.items():
        if len(shape) != 2 or not name.startswith("stack.") or "router" in name:
            continue
        a, b = (
            make.normal(size=each).astype(np.float32) * np.float32(size)
            for each in ((rank, shape[1]), (shape[0], rank))
        )
        ours = name.removesuffix(".weight")
        sides[ours] = Side(a, b, 2.0)
        lengths[ours] = make.uniform(0.5, 1.5, size=shape[0]).astype(np.float32)
    write_adapter(path, sides, adapters.base, rslora=rslora, magnitudes=lengths if dora else None)
    return path
