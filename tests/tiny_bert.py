"""A tiny embedding model in a folder, as sentence-transformers lays one out: two layers, random weights, words for tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from orchard.models.zoo.bert import bert, hf_names
from orchard.nn.tensors import tensor_shapes
from orchard.weights.folder import write_folder

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = [
    *SPECIAL,
    *LETTERS,
    *(f"##{letter}" for letter in LETTERS),
    "the",
    "cat",
    "dog",
    "sleeps",
    "barks",
    "[",
    "]",
    ".",
    "1",
]
CLS, SEP = 2, 3
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_act": "gelu",
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
TOKENS = 24  # what the files allow a text to have, below the places there are


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCAB)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    made.add_special_tokens(SPECIAL)
    made.enable_truncation(8)  # settings left over from training, which must not cut anything
    made.enable_padding(length=8)
    return {**json.loads(made.to_str()), **changes}


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for ours, shape in tensor_shapes(bert(config).complete()).items():
        value = torch.randn(shape, generator=generator) * 0.3
        found[hf_names(ours)[0]] = value + 1 if "orm.weight" in ours else value
    return found


def small_files(**changes: Any) -> dict[str, Any]:
    """The JSON files beside the weights; None leaves one out."""
    kinds = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    files = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": TOKENS, "do_lower_case": False},
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": {"cls_token": "[CLS]", "sep_token": "[SEP]", "model_max_length": 40},
    }
    return {name: content for name, content in {**files, **changes}.items() if content is not None}


def tiny_bert(
    path: Path,
    *,
    config: dict[str, Any] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    files: dict[str, Any] | None = None,
) -> Path:
    """Write the folder; `config` and `files` change what is said, `weights` replaces all tensors."""
    said = {**CONFIG, **(config or {})}
    beside = {
        name: content if isinstance(content, bytes) else json.dumps(content).encode()
        for name, content in small_files(**(files or {})).items()
    }
    write_folder(path, said, tensors(said) if weights is None else weights, extra_files=beside)
    return path
