"""The models that the `axlearn` study rewrites: every family of the zoo, and trees that use the sockets no family uses.

All are tiny (a few thousand weights) and all are different. `full` adds trees drawn at random from the same choices.
"""

from __future__ import annotations

import random
from typing import Any

from orchard.cache.codecs import Int8 as Int8Slots
from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.config import Config
from orchard.models.language import Decoder
from orchard.models.zoo import config
from orchard.nn.attention import Attention, Rotary, scaling
from orchard.nn.formats import Int8
from orchard.nn.linear import Embedding, Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, TopK
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack

VOCABULARY = 64
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Name → Hugging Face fields beside the common ones.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4, "hidden_size": 24},
    "llama3_scaled": {"model_type": "llama", "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 32}},
    "llama_bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 1},
    "mistral_window": {"model_type": "mistral", "sliding_window": 6},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen2_window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {"model_type": "qwen3_moe", **_EXPERTS, "mlp_only_layers": [0]},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 6},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 6},
    "olmo2": {"model_type": "olmo2"},
    "olmoe": {"model_type": "olmoe", **_EXPERTS, "clip_qkv": 8.0},
    "mixtral": {"model_type": "mixtral", **_EXPERTS},
}
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def trees(extra: int = 0, seed: int = 0) -> dict[str, Decoder.Config]:
    """Every tree by name, made anew at each call; `extra` more are drawn at random."""
    found: dict[str, Decoder.Config] = {name: config({**_COMMON, **hf}) for name, hf in _FAMILIES.items()}
    found |= _others()
    choose = random.Random(seed)
    return found | {f"drawn_{i}": _drawn(choose) for i in range(extra)}


def long_tree(layers: int) -> Decoder.Config:
    """A tree as deep as the models people run."""
    return config({**_COMMON, "model_type": "llama", "num_hidden_layers": layers})


def attention(**changes: Any) -> Attention.Config:
    return Attention.Config(**{"heads": 4, "kv_heads": 2, "head_dim": 8, **changes})


def decoder(blocks: list[Block.Config], **changes: Any) -> Decoder.Config:
    fields: dict[str, Any] = {"vocab": VOCABULARY, "dim": 32, "context": 128, "stack": Stack.Config(layers=blocks)}
    return Decoder.Config(**{**fields, **changes})


def block(mixer: Config | None = None, mlp: Config | None = None, **changes: Any) -> Block.Config:
    return Block.Config(mixer=mixer or attention(), mlp=mlp or GatedMLP.Config(hidden_dim=48), **changes)


def _others() -> dict[str, Decoder.Config]:
    """What the sockets allow beyond the families."""
    int8 = Int8.Config(group=8)
    int8_attention = attention(**dict.fromkeys("qkvo", Linear.Config(format=int8)))
    narrow = Linear.Config(format=int8)
    int8_mlp = GatedMLP.Config(hidden_dim=48, gate=narrow, up=narrow, down=narrow)
    sinks = Store.Config(policy=Window.Config(window=6, sinks=2))
    experts = MoE.Config(hidden_dim=16, experts=4, router=TopK.Config(k=1))
    return {
        "nope_between": decoder([block(), block(attention(rotary=None)), block()]),
        "shared_store": decoder([block(), block(attention(store=Store.Config(owner=0))), block()]),
        "int8_weights": decoder([block(int8_attention, int8_mlp)] * 2),
        "int8_embedding": decoder([block()], embedding=Embedding.Config(format=Int8.Config()), head=None),
        "int8_slots": decoder([block(attention(store=Store.Config(codec=Int8Slots.Config())))] * 2),
        "sinks": decoder([block(attention(window=6, store=sinks)), block()]),
        "half_experts": decoder([block(), block(mlp=experts), block(), block(mlp=experts)]),
        "half_rotary": decoder([block(attention(rotary=Rotary.Config(fraction=0.5)))] * 2),
        "yarn": decoder([block(attention(rotary=Rotary.Config(scaling=scaling.Yarn.Config(factor=4.0, original=32))))]),
        "no_norms": decoder([block(mixer_norm=None, mlp_norm=None)], dim=24),
        "relu": decoder([block(mlp=GatedMLP.Config(hidden_dim=40, activation="relu"))] * 3, softcap=20.0),
        "uneven": decoder([block(attention(heads=2, kv_heads=1, head_dim=12)), block(attention(heads=6))], dim=36),
        "wide_norms": decoder([block(mixer_out_norm=RMSNorm.Config(offset=1.0), mlp_out_norm=RMSNorm.Config())]),
    }


def _drawn(choose: random.Random) -> Decoder.Config:
    def norm() -> RMSNorm.Config | None:
        return choose.choice([None, RMSNorm.Config(), RMSNorm.Config(offset=1.0, cast_first=False)])

    def layer() -> Block.Config:
        qk_norm = choose.random() < 0.4
        mixer = attention(
            kv_heads=choose.choice([1, 2, 4]),
            q_norm=RMSNorm.Config() if qk_norm else None,
            k_norm=RMSNorm.Config() if qk_norm else None,
            window=choose.choice([None, None, 4, 7]),
            softcap=choose.choice([None, 30.0]),
            rotary=Rotary.Config(theta=choose.choice([1e4, 1e6]), fraction=choose.choice([0.5, 1.0])),
        )
        gated = GatedMLP.Config(hidden_dim=choose.choice([32, 48]), activation=choose.choice(["silu", "gelu_tanh"]))
        return block(mixer, gated, mixer_out_norm=norm(), mlp_out_norm=norm())

    return decoder(
        [layer() for _ in range(choose.randint(1, 4))],
        head=choose.choice([None, Linear.Config()]),
        softcap=choose.choice([None, 30.0]),
    )
