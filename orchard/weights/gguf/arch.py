"""GGUF's own words for a model's shape, to and from the Hugging Face config that the zoo reads.

Names of the keys: the GGUF specification (ggml-org/ggml, docs/gguf.md). What a file does not say is filled with what its
reference runtime assumes for that architecture; each such rule is named where it stands.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from orchard.core.errors import BadFile, UnknownArchitecture, UnsupportedFormat
from orchard.weights.gguf.quants import dequantize

if TYPE_CHECKING:
    from orchard.weights.gguf.reader import GGUFFile

Json = dict[str, Any]
Metadata = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

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

REAL = ("rms_norm_eps", "attn_logit_softcapping", "final_logit_softcapping")
"""Fields that are no whole numbers."""
PER_LAYER = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
"""Fields that a file may give as a list with one number per layer."""
ABSENT = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
"""Fields that some converters write as 0 where a model has no such thing."""
LIMIT = 1 << 24  # No real dimension is larger.
DAMAGED = "the file is damaged, or was written by a broken converter"


def file_config(file: GGUFFile) -> Json:
    """`hf_config` of an open file."""

    def read(name: str) -> list[float]:
        info = file.tensors[name]
        values: list[float] = dequantize(file.raw(name), info.type, info.shape).tolist()
        return values

    return hf_config(file.metadata, {name: info.shape for name, info in file.tensors.items()}, read)


def hf_config(metadata: Metadata, shapes: Shapes, read: Callable[[str], Any]) -> Json:
    """A Hugging Face config for a GGUF file. `shapes` are its tensors', `read` brings one as numbers.

    Every value is checked for its kind here, where its key is still known.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        what = "names no architecture" if arch is None else f"has {reprlib.repr(arch)} for general.architecture"
        raise BadFile(f"the file {what}", hint="it is damaged, or holds no model")
    if arch not in MODEL_TYPES:
        raise UnknownArchitecture(
            f"unknown architecture {reprlib.repr(arch)}", hint="known in GGUF: " + ", ".join(MODEL_TYPES)
        )
    hf: Json = {"model_type": MODEL_TYPES[arch]}
    for name, key in FIELDS.items():
        value = _field(metadata, f"{arch}.{key}", name, hf)
        if value is not None:
            hf[name] = value
    hf.setdefault("vocab_size", _vocabulary(metadata, shapes))
    hf["tie_word_embeddings"] = "output.weight" not in shapes
    if arch == "llama":
        if not hf.get("sliding_window"):  # The reference runtime reads 0 as none.
            hf.pop("sliding_window", None)
        hf["model_type"] = "mixtral" if "num_experts" in hf else "mistral" if "sliding_window" in hf else "llama"
        hf["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if arch == "qwen3moe":
        hf["norm_topk_prob"] = True  # The reference runtime always renormalises for this architecture.
        hf.setdefault("intermediate_size", hf.get("moe_intermediate_size"))
    if arch in ("gemma2", "gemma3"):
        hf.update(_gemma(arch, metadata, hf))
    # Families have defaults of their own for what a config.json leaves out; a GGUF file means these instead.
    heads, width = hf.get("num_attention_heads"), hf.get("hidden_size")
    if heads is not None:
        hf.setdefault("num_key_value_heads", heads)
    if heads and width and width % heads == 0:
        hf.setdefault("head_dim", width // heads)
    hf["rope_parameters"] = _rope(arch, metadata, shapes, read, hf)
    for name in ("eos_token_id", "bos_token_id"):
        token = metadata.get(f"tokenizer.ggml.{name}")
        hf[name] = token if type(token) is int else None
    return hf


# One value ---------------------------------------------------------------------------------------------------------


def _refused(key: str, value: Any, wanted: str) -> BadFile:
    return BadFile(f"{key} is {reprlib.repr(value)}, not {wanted}", hint=DAMAGED)


def _field(metadata: Metadata, key: str, name: str, hf: Json) -> Any:
    """One of `FIELDS`; None where the file does not say."""
    if name in REAL:
        return _real(metadata, key, least=0.0)
    value = metadata.get(key)
    values = _items(value)
    if name in PER_LAYER and values is not None:
        value = _same_everywhere(values, key, hf.get("num_hidden_layers"))
    if name in ABSENT and type(value) is int and value == 0:
        return None
    return _whole({key: value}, key, least=0 if name == "sliding_window" else 1)


def _whole(metadata: Metadata, key: str, *, least: int = 1, most: int = LIMIT - 1) -> int | None:
    value = metadata.get(key)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise _refused(key, value, f"a whole number from {least} to {most:,}")
    return value


def _real(metadata: Metadata, key: str, *, least: float, most: float = 1e30) -> float | None:
    value = metadata.get(key)
    if value is not None and (type(value) not in (int, float) or not least <= value <= most):  # nor is NaN
        raise _refused(key, value, "a number from 0" if least == 0 else "a number above 0")
    return value


def _items(value: Any) -> list[Any] | None:
    """The items of an array, or None for anything else. Long arrays of numbers come as numpy arrays."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return value if isinstance(value, list) else None


def _same_everywhere(values: list[Any], key: str, layers: Any) -> int:
    """Per-layer lists of equal numbers count as one number."""
    if len(values) != layers or not all(type(value) is int for value in values):
        raise _refused(key, values, f"one whole number, or one for each of {layers} layers")
    if len(set(values)) > 1:
        raise UnknownArchitecture(f"{key} differs from layer to layer", hint="such models are not read yet")
    return int(values[0])


def _vocabulary(metadata: Metadata, shapes: Shapes) -> int:
    if "token_embd.weight" in shapes:
        return int(shapes["token_embd.weight"][0])
    tokens = metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else 0


# Families ----------------------------------------------------------------------------------------------------------


def _gemma(arch: str, metadata: Metadata, hf: Json) -> Json:
    """Gemma's files do not say how queries are scaled: by head width, except in the 27B models (by width per head)."""
    largest = {"gemma2": 46, "gemma3": 62}[arch]
    heads, width = hf.get("num_attention_heads"), hf.get("hidden_size")
    if hf.get("num_hidden_layers") == largest and heads and width:
        scalar = width / heads
    else:
        scalar = hf.get("head_dim", 256)
    result: Json = {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}
    key = f"{arch}.attention.sliding_window_pattern"
    slides, layers = _items(metadata.get(key)), hf.get("num_hidden_layers")
    every = _whole(metadata, key) if slides is None else None
    if every is not None:
        result["sliding_window_pattern"] = every
    if slides is None:
        return result
    if len(slides) != layers or not all(type(value) in (bool, int) for value in slides):
        raise _refused(key, slides, f"one yes or no for each of {layers} layers")
    result["layer_types"] = ["sliding_attention" if value else "full_attention" for value in slides]
    return result


def _rope(arch: str, metadata: Metadata, shapes: Shapes, read: Callable[[str], Any], hf: Json) -> Json:
    base = 1_000_000.0 if arch == "gemma3" else 10_000.0
    rope: Json = {"rope_theta": _theta(metadata, f"{arch}.rope.freq_base", base), "rope_type": "default"}
    width = hf.get("head_dim")
    if width is None and hf.get("num_attention_heads") and hf.get("hidden_size"):
        width = hf["hidden_size"] // hf["num_attention_heads"]
    key = f"{arch}.rope.dimension_count"
    turned = _whole(metadata, key)
    if turned is not None and width and turned != width:
        if turned % 2 or turned > width:
            raise _refused(key, turned, f"an even part of a head's {width} channels")
        fraction = turned / width
        # Whoever multiplies again must get the same whole number.
        rope["partial_rotary_factor"] = fraction if int(fraction * width) == turned else math.nextafter(fraction, 1.0)
    _stretch(arch, metadata, rope)
    if ROPE_FACTORS in shapes:
        if rope.get("factor", 1) != 1:
            raise UnsupportedFormat(
                f"the file has both {ROPE_FACTORS} and {arch}.rope.scaling.type {rope['rope_type']!r}",
                hint="convert the model again with one of them",
            )
        rope.update(rope_type="factors", factors=_factors(shapes, read, (turned or width or 0) // 2))
    if arch != "gemma3":
        return rope
    local = {"rope_theta": _theta(metadata, f"{arch}.rope.freq_base_swa", 10_000.0), "rope_type": "default"}
    return {"full_attention": rope, "sliding_attention": local}


def _theta(metadata: Metadata, key: str, default: float) -> float:
    found = _real(metadata, key, least=1e-30)
    return default if found is None else float(found)


def _stretch(arch: str, metadata: Metadata, rope: Json) -> None:
    """Linear and YaRN stretches. The reference runtime takes a factor without a type as linear, and a factor of 0 as none."""
    prefix = f"{arch}.rope.scaling"
    kind, factor = metadata.get(f"{prefix}.type", "linear"), _real(metadata, f"{prefix}.factor", least=0.0)
    original = _whole(metadata, f"{prefix}.original_context_length", least=0)
    if not isinstance(kind, str):
        raise _refused(f"{prefix}.type", kind, "a text")
    if kind == "none" or not factor:
        return
    if kind not in ("linear", "yarn"):
        raise UnsupportedFormat(
            f"{prefix}.type is {reprlib.repr(kind)}, which is not known", hint="known: none, linear, yarn"
        )
    rope.update(rope_type=kind, factor=factor)
    if original:
        rope["original_max_position_embeddings"] = original


def _factors(shapes: Shapes, read: Callable[[str], Any], pairs: int) -> list[float]:
    shape = shapes[ROPE_FACTORS]
    if len(shape) != 1 or shape[0] != pairs:
        raise BadFile(f"{ROPE_FACTORS} has shape {list(shape)} for {pairs} pairs of channels", hint=DAMAGED)
    factors = [float(value) for value in read(ROPE_FACTORS)]
    for factor in factors:
        if not 1e-30 <= factor <= 1e30:
            raise _refused(ROPE_FACTORS, factor, "made of numbers above 0")
    return factors


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
