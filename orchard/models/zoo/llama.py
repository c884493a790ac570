"""Llama and the models that share its shape: SmolLM2, TinyLlama, Mistral."""

from __future__ import annotations

from orchard.models.language.decoder import Decoder
from orchard.models.zoo.family import Family
from orchard.models.zoo.fields import Json, flag
from orchard.models.zoo.parts import FULL, SLIDING, attention, decoder, layer_kinds, mlp, norm
from orchard.nn.stack import Block


def llama(hf: Json) -> Decoder.Config:
    bias = flag(hf, "attention_bias")
    blocks = [
        Block.Config(
            mixer_norm=norm(hf),
            mixer=attention(hf, bias=bias, o_bias=bias),
            mlp_norm=norm(hf),
            mlp=mlp(hf, bias=flag(hf, "mlp_bias")),
        )
        for _ in layer_kinds(hf, lambda i: FULL)
    ]
    return decoder(hf, blocks)


def mistral(hf: Json) -> Decoder.Config:
    default = FULL if hf.get("sliding_window") is None else SLIDING
    blocks = [
        Block.Config(mixer_norm=norm(hf), mixer=attention(hf, kind=kind), mlp_norm=norm(hf), mlp=mlp(hf))
        for kind in layer_kinds(hf, lambda i: default)
    ]
    return decoder(hf, blocks)


FAMILIES = (
    Family("llama", llama, gguf="llama", pairs_neighbours=True),
    Family(
        "mistral",
        mistral,
        gguf="llama",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        pairs_neighbours=True,
    ),
)
