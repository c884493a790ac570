"""Configs that lie, in GGUF metadata and in config.json: each is refused, and the message names the culprit."""

from __future__ import annotations

import copy
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.cli.main import main
from orchard.core.errors import BadFile, UnknownArchitecture, UnsupportedFormat
from orchard.weights.gguf.arch import ROPE_FACTORS, hf_config
from tests.fuzz.checkpoint_cases import make_samples
from tests.weights.hostile import opened, refusal, sample

MISSING = object()


def put(config: dict[str, Any], key: str, value: Any) -> None:
    if value is MISSING:
        del config[key]
    else:
        config[key] = value


# GGUF metadata ------------------------------------------------------------------------------------------------------

WRONG_COUNTS = ("1", [], ["a"], -1, 2**63, 1 << 24, True, 1.0, math.nan, [[1]], [7] * 1500)


@pytest.mark.parametrize("value", WRONG_COUNTS, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "attention.key_length"])
def test_gguf_counts_of_wrong_kinds(key: str, value: Any, tmp_path: Path) -> None:
    model = sample("gguf", "llama")
    model.config[f"llama.{key}"] = value
    assert refusal(model, tmp_path).startswith(f"llama.{key} is ")


GGUF_DAMAGE: list[tuple[str, str, Any, str]] = [
    ("llama", "block_count", 0, "llama.block_count is 0"),
    ("llama", "block_count", MISSING, "no block_count"),
    ("llama", "attention.head_count", 0, "llama.attention.head_count is 0"),
    ("llama", "attention.head_count", 3, "num_key_value_heads is 2, which does not divide num_attention_heads 3"),
    ("llama", "attention.head_count_kv", [2, 2, 2], "llama.attention.head_count_kv is [2, 2, 2]"),
    ("llama", "attention.key_length", 0, "llama.attention.key_length is 0"),
    ("llama", "attention.key_length", 7, "llama.rope.dimension_count is 8, not an even part of a head's 7 channels"),
    ("llama", "attention.key_length", 16, "'blk.0.attn_q.weight' has shape [32, 32], not [64, 32]"),
    ("llama", "attention.layer_norm_rms_epsilon", math.nan, "layer_norm_rms_epsilon is nan"),
    ("llama", "attention.layer_norm_rms_epsilon", -1e-5, "layer_norm_rms_epsilon is -1e-05"),
    ("llama", "attention.layer_norm_rms_epsilon", "1e-5", "layer_norm_rms_epsilon is '1e-5'"),
    ("llama", "attention.sliding_window", -4, "llama.attention.sliding_window is -4"),
    ("llama", "rope.dimension_count", 5, "llama.rope.dimension_count is 5, not an even part of a head's 8 channels"),
    ("llama", "rope.dimension_count", 16, "llama.rope.dimension_count is 16, not an even part"),
    ("llama", "rope.dimension_count", 0, "llama.rope.dimension_count is 0"),
    ("llama", "rope.freq_base", 0.0, "llama.rope.freq_base is 0.0"),
    ("llama", "rope.freq_base", math.inf, "llama.rope.freq_base is inf"),
    ("llama", "rope.scaling.type", 3, "llama.rope.scaling.type is 3"),
    ("llama", "rope.scaling.factor", -2.0, "llama.rope.scaling.factor is -2.0"),
    ("llama", "vocab_size", 96, "'token_embd.weight' has shape [48, 32], not [96, 32]"),
    ("llama", "embedding_length", 64, "'token_embd.weight' has shape [48, 32], not [48, 64]"),
    ("llama", "feed_forward_length", 32, "ffn_gate.weight' has shape [64, 32], not [32, 32]"),
    ("gemma2", "attention.sliding_window", 0, "sliding_window is 0"),
    ("gemma2", "attn_logit_softcapping", 0.0, "attn_logit_softcapping is 0.0"),
    ("gemma2", "final_logit_softcapping", -30.0, "final_logit_softcapping is -30.0"),
    ("gemma3", "attention.sliding_window_pattern", 0, "sliding_window_pattern is 0"),
    ("gemma3", "attention.sliding_window_pattern", "6", "sliding_window_pattern is '6'"),
    ("gemma3", "attention.sliding_window_pattern", [True] * 5, "one yes or no for each of 2 layers"),
    ("gemma3", "attention.sliding_window_pattern", [0.5, 0.5], "one yes or no for each of 2 layers"),
    ("gemma3", "rope.freq_base_swa", math.nan, "gemma3.rope.freq_base_swa is nan"),
    ("olmoe", "expert_used_count", 9, "num_experts_per_tok is 9, more than num_experts 8"),
    ("olmoe", "expert_count", 4, "ffn_gate_inp.weight' has shape [8, 32], not [4, 32]"),
    ("olmoe", "expert_count", "8", "olmoe.expert_count is '8'"),
]


@pytest.mark.parametrize(("arch", "key", "value", "message"), GGUF_DAMAGE)
def test_gguf_metadata_that_makes_no_model(arch: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    model = sample("gguf", arch)
    put(model.config, f"{arch}.{key}", value)
    assert message in refusal(model, tmp_path)


@pytest.mark.parametrize("name", [7, ["llama"], True, "", "rwkv7", "x" * 100_000, "\x1b[2J"])
def test_architectures_that_are_none(name: Any, tmp_path: Path) -> None:
    model = sample("gguf", "llama")
    model.config["general.architecture"] = name
    assert "architecture" in refusal(model, tmp_path, UnknownArchitecture if isinstance(name, str) else BadFile)


@pytest.mark.parametrize("key", ["attention.sliding_window", "expert_count", "expert_used_count"])
def test_zeros_that_converters_write_for_nothing(key: str, tmp_path: Path) -> None:
    model = sample("gguf", "llama")
    model.config[f"llama.{key}"] = 0
    mixer = opened(model, tmp_path).config.stack.layers[0].mixer
    assert mixer.window is None  # type: ignore[attr-defined]


def test_numbers_that_differ_from_layer_to_layer(tmp_path: Path) -> None:
    model = sample("gguf", "gemma3")
    model.config["gemma3.attention.head_count_kv"] = [2, 4]
    assert "gemma3.attention.head_count_kv differs" in refusal(model, tmp_path, UnknownArchitecture)
    model.config["gemma3.attention.head_count_kv"] = [2, 2]
    opened(model, tmp_path)


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 9, [0.0] * 8, [math.nan] * 8, [math.inf] * 8, [-1.0] * 8])
def test_rotary_factors(factors: list[float], tmp_path: Path) -> None:
    model = next(copy.deepcopy(s) for s in make_samples() if s.kind == "gguf" and ROPE_FACTORS in s.tensors)
    model.tensors[ROPE_FACTORS] = ("F32", (len(factors),), struct.pack(f"<{len(factors)}f", *factors))
    assert ROPE_FACTORS in refusal(model, tmp_path)
    good = struct.pack("<8e", *[2.0] * 8)
    model.tensors[ROPE_FACTORS] = ("F16", (8,), good)
    opened(model, tmp_path)
    assert main(["show", str(tmp_path / "case.gguf")]) == 0
    model.tensors[ROPE_FACTORS] = ("F16", (2, 4), good)
    assert ROPE_FACTORS in refusal(model, tmp_path)
    model.tensors[ROPE_FACTORS] = ("I16", (8,), good)
    assert "I16" in refusal(model, tmp_path, UnsupportedFormat)


def test_stretches_of_rotary_positions(tmp_path: Path) -> None:
    model = sample("gguf", "qwen3")
    model.config["qwen3.rope.scaling.type"] = "longrope"
    model.config["qwen3.rope.scaling.factor"] = 4.0
    assert "'longrope'" in refusal(model, tmp_path, UnsupportedFormat)
    del model.config["qwen3.rope.scaling.type"]  # a factor alone is linear, as the reference runtime has it
    assert opened(model, tmp_path).config.stack.layers[0].mixer.rotary.scaling.factor == 4.0  # type: ignore[attr-defined]
    model.tensors[ROPE_FACTORS] = ("F32", (8,), struct.pack("<8f", *[2.0] * 8))
    assert "both" in refusal(model, tmp_path, UnsupportedFormat)


@given(pairs=st.integers(1, 300), turned=st.integers(1, 300))
def test_the_turned_share_of_a_head_survives_division(pairs: int, turned: int) -> None:
    width, turned = 2 * max(pairs, turned), 2 * min(pairs, turned)
    metadata = {
        "general.architecture": "llama",
        "llama.attention.key_length": width,
        "llama.rope.dimension_count": turned,
    }
    fraction = hf_config(metadata, {}, lambda name: ())["rope_parameters"].get("partial_rotary_factor", 1.0)
    assert fraction <= 1.0 and int(width * fraction) == turned


# Folders ------------------------------------------------------------------------------------------------------------

HF_DAMAGE: list[tuple[str, str, Any, str]] = [
    ("llama", "num_hidden_layers", 30.0, "num_hidden_layers is 30.0, not a whole number"),
    ("llama", "num_hidden_layers", True, "num_hidden_layers is True"),
    ("llama", "num_hidden_layers", 10**400, "num_hidden_layers is 1000"),
    ("llama", "num_hidden_layers", None, "no num_hidden_layers"),
    ("llama", "num_attention_heads", 3, "num_key_value_heads is 2"),
    ("llama", "hidden_size", 30, "hidden_size is 30, which num_attention_heads 4 does not divide"),
    ("llama", "hidden_size", "32", "hidden_size is '32'"),
    ("llama", "head_dim", 7, "head_dim is 7, which turns 7 channels; they come in pairs"),
    ("llama", "head_dim", {"a": 1}, "head_dim is {'a': 1}"),
    ("llama", "rms_norm_eps", "small", "rms_norm_eps is 'small'"),
    ("llama", "rms_norm_eps", math.inf, "rms_norm_eps is inf"),
    ("llama", "rms_norm_eps", 1e300, "rms_norm_eps is 1e+300"),
    ("llama", "rope_parameters", [1], "rope_parameters is [1], not a table"),
    ("llama", "rope_parameters", "yarn", "rope_parameters is 'yarn', not a table"),
    ("llama", "rope_parameters", 7, "rope_parameters is 7, not a table"),
    ("llama", "rope_parameters", {"full_attention": 3}, "full_attention is 3, not a table"),
    ("llama", "rope_parameters", {"rope_theta": "10000"}, "rope_theta is '10000'"),
    ("llama", "rope_parameters", {"rope_type": "linear"}, "no factor"),
    ("llama", "rope_parameters", {"rope_type": "linear", "factor": 0}, "factor is 0"),
    ("llama", "rope_parameters", {"rope_type": "yarn", "factor": 2, "beta_fast": 1e-320}, "beta_fast is 1e-320"),
    ("llama", "rope_parameters", {"rope_type": "yarn", "factor": 2, "rope_theta": 1}, "rope_theta is 1"),
    ("llama", "rope_parameters", {"rope_type": "factors", "factors": [1.0]}, "1 factors for 4 pairs"),
    ("llama", "rope_parameters", {"rope_type": "factors", "factors": [1, 0, 1, 1]}, "rotary factor is 0"),
    ("llama", "rope_parameters", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ("llama", "rope_parameters", {"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 of head_dim 8"),
    ("llama", "rope_scaling", "linear", "rope_scaling is 'linear'"),
    ("llama", "tie_word_embeddings", "no", "tie_word_embeddings is 'no', not true or false"),
    ("llama", "tie_word_embeddings", 1, "tie_word_embeddings is 1"),
    ("llama", "attention_bias", [], "attention_bias is []"),
    ("llama", "hidden_act", ["silu"], "hidden_act is ['silu']"),
    ("llama", "max_position_embeddings", 0, "max_position_embeddings is 0"),
    ("llama", "model_type", ["llama"], "model_type is ['llama']"),
    ("qwen2", "layer_types", "full_attention", "layer_types is 'full_attention', not a list"),
    ("qwen2", "layer_types", ["full_attention"] * 5, "layer_types has 5 entries for"),
    ("qwen2", "layer_types", [["full_attention"]], "layer_types is [['full_attention']]"),
    ("qwen2", "max_window_layers", "1", "max_window_layers is '1'"),
    ("mistral", "sliding_window", 0, "sliding_window is 0"),
    ("mistral", "sliding_window", -7, "sliding_window is -7"),
    ("mistral", "sliding_window", "7", "sliding_window is '7'"),
    ("gemma2", "query_pre_attn_scalar", -1, "query_pre_attn_scalar is -1"),
    ("gemma2", "attn_logit_softcapping", 0, "attn_logit_softcapping is 0"),
    ("gemma3_text", "sliding_window_pattern", 0, "sliding_window_pattern is 0"),
    ("gemma3", "text_config", "gone", "text_config is 'gone', not a table"),
    ("gemma3", "text_config", None, "no num_hidden_layers"),
    ("mixtral", "num_experts_per_tok", 5, "num_experts_per_tok is 5, more than num_local_experts 4"),
    ("mixtral", "num_local_experts", "4", "num_local_experts is '4'"),
    ("olmoe", "clip_qkv", math.nan, "clip_qkv is nan"),
    ("qwen3_moe", "mlp_only_layers", "1", "mlp_only_layers is '1'"),
    ("qwen3_moe", "decoder_sparse_step", 0, "decoder_sparse_step is 0"),
]


@pytest.mark.parametrize(("family", "key", "value", "message"), HF_DAMAGE)
def test_configs_that_make_no_model(family: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    model = sample("folder", family)
    model.config[key] = value
    assert message in refusal(model, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("quantization_config", {"quant_method": "gptq"}, "'gptq'"),
        ("quantization_config", [1], "quantization_config"),
        ("quantization_config", {"quant_method": ["x" * 9999]}, "quantization_config"),
        ("rope_parameters", {"rope_type": "dynamic"}, "'dynamic'"),
        ("rope_parameters", {"rope_type": {"a": []}}, "rope_type"),
        ("layer_types", ["chunked_attention"], "'chunked_attention'"),
        ("hidden_act", "xielu", "'xielu'"),
    ],
)
def test_what_is_not_read_is_named(key: str, value: Any, word: str, tmp_path: Path) -> None:
    model = sample("folder", "llama")
    model.config[key] = value
    assert word in refusal(model, tmp_path, UnsupportedFormat)


@pytest.mark.parametrize("junk", [None, 7, "float99", ["x"], {"a": 1}])
def test_fields_that_nothing_depends_on_may_be_anything(junk: Any, tmp_path: Path) -> None:
    model = sample("folder", "llama")
    model.config |= {"dtype": junk, "torch_dtype": junk, "eos_token_id": junk, "architectures": junk}
    assert torch.isfinite(opened(model, tmp_path)(torch.tensor([[1]]))).all()
