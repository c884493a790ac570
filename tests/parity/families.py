"""Tiny random models of every family, as transformers makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

# case → (model_type, what differs from COMMON)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral-global": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 6, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    ),
    "gemma3-stretched": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 8,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe-clipped": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.02, "norm_topk_prob": True}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
}
GGUF_CASES = (
    *("llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma2-gguf", "gemma3", "gemma3-stretched"),
    *("mixtral", "olmo2", "olmoe", "qwen3-moe-all"),
)
CASES["gemma2-gguf"] = ("gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16})
CASES["qwen3-moe-all"] = (
    "qwen3_moe",
    {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
)


def reference(case: str, *, seed: int = 0) -> Any:
    """A random transformers model. Norm weights and biases are made random too, so that no error can hide in ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = CASES[case]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**COMMON, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" not in name:
                parameter.mul_(4.0)
    return model


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
