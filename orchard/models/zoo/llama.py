"""Llama and the models that share its shape: SmolLM2, TinyLlama, Mistral."""

from __future__ import annotations

from orchard.models.language.decoder import Decoder
from orchard.models.zoo.family import Family
from orchard.models.zoo.parts import FULL, SLIDING, Json, attention, decoder, layer_kinds, mlp, norm
from orchard.nn.stack import Block


def llama(hf: Json) -> Decoder.Config:
    bias = bool(hf.get("attention_bias", False))
    blocks = [
        Block.Config(
            mixer_norm=norm(hf),
            mixer=attention(hf, bias=bias, o_bias=bias),
            mlp_norm=norm(hf),
            mlp=mlp(hf, bias=bool(hf.get("mlp_bias", False))),
        )
        for _ in layer_kinds(hf, lambda i: FULL)
    ]
    return decoder(hf, blocks)


def mistral(hf: Json) -> Decoder.Config:
    default = SLIDING if hf.get("sliding_window") else FULL
    blocks = [
        Block.Config(mixer_norm=norm(hf), mixer=attention(hf, kind=kind), mlp_norm=norm(hf), mlp=mlp(hf))
        for kind in layer_kinds(hf, lambda i: default)
    ]
    return decoder(hf, blocks)


FAMILIES = (
    Family("llama", llama, gguf="llama", pairs_neighbours=True),
    Family("mistral", mistral, gguf="llama", pairs_neighbours=True),
)
