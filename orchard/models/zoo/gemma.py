"""Gemma 2 and 3 (text): norms before and after, scaled embeddings, windows between global layers."""

from __future__ import annotations

from orchard.models.language.decoder import Decoder
from orchard.models.zoo.family import Family
from orchard.models.zoo.parts import FULL, SLIDING, Json, attention, count, decoder, layer_kinds, mlp, norm, number
from orchard.nn.linear import Embedding
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block

KEYS = {
    "mixer_out_norm.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_out_norm.weight": "post_feedforward_layernorm.weight",
}


def _norm(hf: Json) -> RMSNorm.Config:
    return norm(hf, offset=1.0, cast_first=False)


def _gemma(hf: Json, kinds: list[str], *, query_norm: bool) -> Decoder.Config:
    scale = (number(hf, "query_pre_attn_scalar", 256) or 256) ** -0.5
    bias = bool(hf.get("attention_bias", False))
    hf = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **hf}
    blocks = [
        Block.Config(
            mixer_norm=_norm(hf),
            mixer=attention(
                hf,
                kind=kind,
                bias=bias,
                o_bias=bias,
                scale=scale,
                softcap=number(hf, "attn_logit_softcapping"),
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
        softcap=number(hf, "final_logit_softcapping"),
    )


def gemma2(hf: Json) -> Decoder.Config:
    hf = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096, **hf}
    return _gemma(hf, layer_kinds(hf, lambda i: FULL if i % 2 else SLIDING), query_norm=False)


def gemma3(hf: Json) -> Decoder.Config:
    hf = {"sliding_window": 4096, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, **hf}
    every = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    return _gemma(hf, layer_kinds(hf, lambda i: SLIDING if (i + 1) % every else FULL), query_norm=True)


def gemma3_with_images(hf: Json) -> Decoder.Config:
    """The text part of a checkpoint that also sees."""
    return gemma3({**hf.get("text_config", {}), "model_type": "gemma3_text"})


FAMILIES = (
    Family("gemma2", gemma2, gguf="gemma2", hf_keys=KEYS, adds_norm_offset=True),
    Family("gemma3_text", gemma3, gguf="gemma3", hf_keys=KEYS, adds_norm_offset=True),
    Family("gemma3", gemma3_with_images, gguf="gemma3", hf_keys=KEYS, adds_norm_offset=True),
)
