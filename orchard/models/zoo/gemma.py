"""Gemma 2 and 3 (text): norms before and after, scaled embeddings, windows between global layers."""

from __future__ import annotations

from typing import Any

from orchard.models.language.decoder import Decoder
from orchard.models.zoo.family import Family
from orchard.models.zoo.fields import HALF, Json, count, flag, maybe_number, number
from orchard.models.zoo.parts import FULL, SLIDING, attention, decoder, layer_kinds, mlp, norm
from orchard.nn.linear import Embedding
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block

KEYS = {
    "mixer_out_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_out_norm.weight": "post_feedforward_layernorm.weight",
}
EYES = tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))


def _norm(hf: Json) -> RMSNorm.Config:
    return norm(hf, offset=1.0, cast_first=False)


def _gemma(hf: Json, kinds: list[str], *, query_norm: bool) -> Decoder.Config:
    scale = number(hf, "query_pre_attn_scalar", 256.0) ** -0.5
    bias = flag(hf, "attention_bias")
    blocks = [
        Block.Config(
            mixer_norm=_norm(hf),
            mixer=attention(
                hf,
                kind=kind,
                bias=bias,
                o_bias=bias,
                scale=scale,
                softcap=maybe_number(hf, "attn_logit_softcapping", most=HALF),
                q_norm=_norm(hf) if query_norm else None,
                k_norm=_norm(hf) if query_norm else None,
            ),
            mixer_out_norm=_norm(hf),
            mlp_norm=_norm(hf),
            mlp=mlp(hf),
            mlp_out_norm=_norm(hf),
        )
        for kind in kinds
    ]
    return decoder(
        hf,
        blocks,
        tied=True,
        embedding=Embedding.Config(scale=count(hf, "hidden_size") ** 0.5),
        norm=_norm(hf),
        softcap=maybe_number(hf, "final_logit_softcapping", most=HALF),
    )


def _kinds(hf: Json, every: int) -> list[str]:
    """Every so many layers one is global, the last of them; `every` is the family's usual number."""
    for field in ("_sliding_window_pattern", "sliding_window_pattern"):
        every = count(hf, field, every)
    return layer_kinds(hf, lambda layer: SLIDING if (layer + 1) % every else FULL)


def gemma2(hf: Json) -> Decoder.Config:
    return _gemma(hf, _kinds(hf, 2), query_norm=False)


def gemma3(hf: Json) -> Decoder.Config:
    return _gemma(hf, _kinds(hf, 6), query_norm=True)


_SHARED: dict[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}
GEMMA2 = {
    **_SHARED,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3 = {
    **_SHARED,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
FAMILIES = (
    Family("gemma2", gemma2, gguf="gemma2", defaults=GEMMA2, hf_keys=KEYS, adds_norm_offset=True),
    Family("gemma3_text", gemma3, gguf="gemma3", defaults=GEMMA3, hf_keys=KEYS, adds_norm_offset=True),
    Family(
        "gemma3",  # a checkpoint that also sees: its text part
        gemma3,
        gguf="gemma3",
        defaults=GEMMA3,
        hf_keys=KEYS,
        adds_norm_offset=True,
        nested="text_config",
        unread=EYES,
    ),
)
