"""Qwen 2 and 2.5 (biased projections), Qwen 3 (normalised queries and keys), and Qwen 3's mixtures."""

from __future__ import annotations

from collections.abc import Callable

from orchard.core.config import BaseConfig
from orchard.models.language.decoder import Decoder
from orchard.models.zoo.family import Family
from orchard.models.zoo.fields import Json, count, flag, layers
from orchard.models.zoo.parts import FULL, SLIDING, attention, decoder, layer_kinds, mixture, mlp, norm
from orchard.nn.stack import Block

EXPERT_KEYS = {
    "mlp.router.gate.weight": "mlp.gate.weight",
    **{f"mlp.{x}.weight": f"mlp.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up", "down")},
}

DEFAULTS = {"max_position_embeddings": 32_768}


def _kinds(hf: Json) -> list[str]:
    """Qwen's first `max_window_layers` layers are global even when a window is in use."""
    windowed = flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None
    first = count(hf, "max_window_layers", 0, least=0)
    return layer_kinds(hf, lambda i: SLIDING if windowed and i >= first else FULL)


def qwen2(hf: Json) -> Decoder.Config:
    blocks = [
        Block.Config(mixer_norm=norm(hf), mixer=attention(hf, kind=kind, bias=True), mlp_norm=norm(hf), mlp=mlp(hf))
        for kind in _kinds(hf)
    ]
    return decoder(hf, blocks)


def _qwen3(hf: Json, kinds: list[str], feed_forward: Callable[[int], BaseConfig]) -> Decoder.Config:
    bias = flag(hf, "attention_bias")
    blocks = [
        Block.Config(
            mixer_norm=norm(hf),
            mixer=attention(hf, kind=kind, bias=bias, o_bias=bias, q_norm=norm(hf), k_norm=norm(hf)),
            mlp_norm=norm(hf),
            mlp=feed_forward(layer),
        )
        for layer, kind in enumerate(kinds)
    ]
    return decoder(hf, blocks)


def qwen3(hf: Json) -> Decoder.Config:
    return _qwen3(hf, _kinds(hf), lambda layer: mlp(hf))


def qwen3_moe(hf: Json) -> Decoder.Config:
    dense, step = layers(hf, "mlp_only_layers"), count(hf, "decoder_sparse_step", 1)

    def feed_forward(layer: int) -> BaseConfig:
        if layer in dense or (layer + 1) % step:
            return mlp(hf)
        hidden = count(hf, "moe_intermediate_size")
        return mixture(hf, hidden_dim=hidden, renormalize=flag(hf, "norm_topk_prob"))

    windowed = flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None
    default = SLIDING if windowed else FULL
    return _qwen3(hf, layer_kinds(hf, lambda i: default), feed_forward)


FAMILIES = (
    Family("qwen2", qwen2, gguf="qwen2", defaults={**DEFAULTS, "num_key_value_heads": 32}),
    Family("qwen3", qwen3, gguf="qwen3", defaults={**DEFAULTS, "num_key_value_heads": 32, "head_dim": 128}),
    Family(
        "qwen3_moe",
        qwen3_moe,
        gguf="qwen3moe",
        hf_expert_keys=EXPERT_KEYS,
        defaults={**DEFAULTS, "num_key_value_heads": 4},
    ),
)
