"""GGUF's own words for a model's shape, to and from the Hugging Face config that the zoo reads.

Names of the keys: the GGUF specification (ggml-org/ggml, docs/gguf.md). What a file does not say is filled with what its
reference runtime assumes for that architecture; each such rule is named where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchard.core.errors import BadFile, UnknownArchitecture

Json = dict[str, Any]

# Hugging Face name ← key inside the architecture's own namespace.
FIELDS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "num_experts_per_tok": "expert_used_count",
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "vocab_size": "vocab_size",
}
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
}
ROPE_FACTORS = "rope_freqs.weight"


def hf_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Any],
) -> Json:
    """A Hugging Face config for a GGUF file. `shapes` are its tensors', `read` brings one as numbers."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise BadFile("the file names no architecture", hint="it is damaged, or holds no model")
    if arch not in MODEL_TYPES:
        raise UnknownArchitecture(f"unknown architecture {arch!r}", hint="known in GGUF: " + ", ".join(MODEL_TYPES))
    hf: Json = {"model_type": MODEL_TYPES[arch]}
    for name, key in FIELDS.items():
        value = metadata.get(f"{arch}.{key}")
        if value is not None:
            hf[name] = _scalar(value, f"{arch}.{key}")
    hf.setdefault("vocab_size", _vocabulary(metadata, shapes))
    hf["tie_word_embeddings"] = "output.weight" not in shapes
    if arch == "llama" and hf.get("num_experts"):
        hf["model_type"] = "mixtral"
    elif arch == "llama" and hf.get("sliding_window"):
        hf["model_type"] = "mistral"
    if arch == "llama":
        hf["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if arch == "qwen3moe":
        hf["norm_topk_prob"] = True  # The reference runtime always renormalises for this architecture.
        hf.setdefault("intermediate_size", hf.get("moe_intermediate_size"))
    if arch in ("gemma2", "gemma3"):
        hf.update(_gemma(arch, metadata, hf))
    hf["rope_parameters"] = _rope(arch, metadata, shapes, read, hf)
    hf["eos_token_id"] = metadata.get("tokenizer.ggml.eos_token_id")
    hf["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    return hf


def _scalar(value: Any, key: str) -> Any:
    """Per-layer lists of equal numbers count as one number."""
    if isinstance(value, (list, tuple)) or hasattr(value, "tolist"):
        values = list(value.tolist() if hasattr(value, "tolist") else value)
        if not values or any(v != values[0] for v in values):
            raise UnknownArchitecture(f"{key} differs from layer to layer", hint="such models are not read yet")
        return values[0]
    return value


def _vocabulary(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> int:
    if "token_embd.weight" in shapes:
        return int(shapes["token_embd.weight"][0])
    return len(metadata.get("tokenizer.ggml.tokens", ()))


def _gemma(arch: str, metadata: Mapping[str, Any], hf: Json) -> Json:
    """Gemma's files do not say how queries are scaled: by head width, except in the 27B models (by width per head)."""
    largest = {"gemma2": 46, "gemma3": 62}[arch]
    heads, width = hf.get("num_attention_heads"), hf.get("hidden_size")
    if hf.get("num_hidden_layers") == largest and heads and width:
        scalar = width / heads
    else:
        scalar = hf.get("head_dim", 256)
    result: Json = {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        result["sliding_window_pattern"] = pattern
    elif isinstance(pattern, list):
        result["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return result


def _rope(
    arch: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Any],
    hf: Json,
) -> Json:
    base = 1_000_000.0 if arch == "gemma3" else 10_000.0
    rope: Json = {"rope_theta": metadata.get(f"{arch}.rope.freq_base", base), "rope_type": "default"}
    kind = metadata.get(f"{arch}.rope.scaling.type")
    factor = metadata.get(f"{arch}.rope.scaling.factor")
    if ROPE_FACTORS in shapes:
        if len(shapes[ROPE_FACTORS]) != 1 or shapes[ROPE_FACTORS][0] > 4096:
            raise BadFile(f"{ROPE_FACTORS} has shape {shapes[ROPE_FACTORS]}", hint="the file is damaged")
        rope.update(rope_type="factors", factors=[float(x) for x in read(ROPE_FACTORS)])
    elif kind in ("linear", "yarn") and factor:
        rope.update(rope_type=kind, factor=factor)
        original = metadata.get(f"{arch}.rope.scaling.original_context_length")
        if original:
            rope["original_max_position_embeddings"] = original
    turned, width = metadata.get(f"{arch}.rope.dimension_count"), hf.get("head_dim")
    if width is None and hf.get("num_attention_heads"):
        width = hf["hidden_size"] // hf["num_attention_heads"]
    if turned and width and turned != width:
        rope["partial_rotary_factor"] = turned / width
    if arch != "gemma3":
        return rope
    local = {"rope_theta": metadata.get(f"{arch}.rope.freq_base_swa", 10_000.0), "rope_type": "default"}
    return {"full_attention": rope, "sliding_attention": local}


def gguf_metadata(hf: Json, arch: str) -> Json:
    """The architecture's keys for a Hugging Face config: what `hf_config` reads back."""
    result: Json = {"general.architecture": arch, "general.quantization_version": 2}
    names = {**hf, "num_experts": hf.get("num_experts", hf.get("num_local_experts"))}
    for name, key in FIELDS.items():
        if names.get(name) is not None:
            result[f"{arch}.{key}"] = names[name]
    heads = hf["num_attention_heads"]
    width = hf.get("head_dim") or hf["hidden_size"] // heads
    result[f"{arch}.attention.key_length"] = result[f"{arch}.attention.value_length"] = width
    result.setdefault(f"{arch}.attention.head_count_kv", heads)
    rope: Json = hf.get("rope_parameters") or {}
    full: Json = rope.get("full_attention", rope)
    older: Json = hf.get("rope_scaling") or {}
    merged = {"rope_theta": hf.get("rope_theta"), **older, **full}
    if merged.get("rope_theta"):
        result[f"{arch}.rope.freq_base"] = float(merged["rope_theta"])
    kind = merged.get("rope_type", merged.get("type"))
    if kind in ("linear", "yarn"):
        result[f"{arch}.rope.scaling.type"] = kind
        result[f"{arch}.rope.scaling.factor"] = float(merged["factor"])
        if merged.get("original_max_position_embeddings"):
            result[f"{arch}.rope.scaling.original_context_length"] = merged["original_max_position_embeddings"]
    turned = float(merged.get("partial_rotary_factor", 1.0))
    result[f"{arch}.rope.dimension_count"] = int(width * turned)
    return result
