"""OLMo 2 (norms after, normalised queries and keys over all heads) and OLMoE."""

from __future__ import annotations

from orchard.models.language.decoder import Decoder
from orchard.models.zoo.family import Family
from orchard.models.zoo.fields import HALF, Json, count, flag, maybe_number
from orchard.models.zoo.parts import FULL, attention, decoder, layer_kinds, mixture, mlp, norm
from orchard.models.zoo.qwen import EXPERT_KEYS
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block


def olmo2(hf: Json) -> Decoder.Config:
    def late_norm() -> RMSNorm.Config:
        return norm(hf, cast_first=False)

    bias = flag(hf, "attention_bias")
    blocks = [
        Block.Config(
            mixer_norm=None,
            mixer=attention(hf, bias=bias, o_bias=bias, q_norm=late_norm(), k_norm=late_norm(), norm_over="all"),
            mixer_out_norm=late_norm(),
            mlp_norm=None,
            mlp=mlp(hf),
            mlp_out_norm=late_norm(),
        )
        for _ in layer_kinds(hf, lambda i: FULL)
    ]
    return decoder(hf, blocks, norm=late_norm())


def olmoe(hf: Json) -> Decoder.Config:
    bias = flag(hf, "attention_bias")
    blocks = [
        Block.Config(
            mixer_norm=norm(hf),
            mixer=attention(
                hf,
                bias=bias,
                o_bias=bias,
                q_norm=norm(hf),
                k_norm=norm(hf),
                norm_over="all",
                clip=maybe_number(hf, "clip_qkv", most=HALF),
            ),
            mlp_norm=norm(hf),
            mlp=mixture(
                hf,
                hidden_dim=count(hf, "intermediate_size"),
                renormalize=flag(hf, "norm_topk_prob"),
            ),
        )
        for _ in layer_kinds(hf, lambda i: FULL)
    ]
    return decoder(hf, blocks)


FAMILIES = (
    Family(
        "olmo2",
        olmo2,
        gguf="olmo2",
        defaults={"rms_norm_eps": 1e-5},
        hf_keys={
            "mixer_out_norm.weight": "post_attention_layernorm.weight",
            "mlp_out_norm.weight": "post_feedforward_layernorm.weight",
        },
    ),
    Family(
        "olmoe",
        olmoe,
        gguf="olmoe",
        hf_expert_keys=EXPERT_KEYS,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ),
)
