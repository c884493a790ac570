"""A tiny model with a real tokenizer, for tests that need a whole one: one layer, random weights, bytes for tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from orchard.weights.gguf.types import GGMLType
from orchard.weights.gguf.writer import TensorOut, write_gguf

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
WIDTH, HIDDEN, CONTEXT = 32, 64, 256


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level vocabularies spell bytes with (as in GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def tiny_gguf(path: Path, **changes: Any) -> Path:
    """Write the model; `changes` replace metadata."""
    alphabet = byte_alphabet()
    tokens = [*alphabet, alphabet[32] + "t", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    shapes = {
        "token_embd.weight": (len(tokens), WIDTH),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (WIDTH, WIDTH),
        "blk.0.attn_k.weight": (16, WIDTH),
        "blk.0.attn_v.weight": (16, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, WIDTH),
        "blk.0.ffn_gate.weight": (HIDDEN, WIDTH),
        "blk.0.ffn_up.weight": (HIDDEN, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, HIDDEN),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "output_norm.weight": (WIDTH,),
    }
    random = np.random.default_rng(0)
    values = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    values["token_embd.weight"][128:] = 0  # answers stay within ASCII, and never end by themselves
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.license": "apache-2.0",
        "llama.block_count": 1,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 3],
        "tokenizer.ggml.merges": [f"{alphabet[32]} t"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": TEMPLATE,
        **changes,
    }
    tensors = [
        TensorOut(name, shapes[name], GGMLType.F32, lambda value=value: value)  # type: ignore[misc]
        for name, value in values.items()
    ]
    write_gguf(path, metadata, tensors)
    return path


def tiny_tokenizer_files(vocab: int) -> dict[str, bytes]:
    """A tokenizer.json whose tokens are single characters, as few as `vocab`."""
    characters = [chr(code) for code in range(33, 33 + vocab - 2)]
    tree = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": vocab - 1,
                "content": "<end>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "model": {
            "type": "BPE",
            "vocab": {**{c: i for i, c in enumerate(characters)}, " ": vocab - 2, "<end>": vocab - 1},
            "merges": [],
        },
    }
    config = {"eos_token": "<end>"}
    return {"tokenizer.json": json.dumps(tree).encode(), "tokenizer_config.json": json.dumps(config).encode()}
