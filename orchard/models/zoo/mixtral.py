"""Mixtral: Mistral with eight experts in place of each MLP (arXiv 2401.04088)."""

from __future__ import annotations

from orchard.models.language.decoder import Decoder
from orchard.models.zoo.family import Family
from orchard.models.zoo.fields import Json, count
from orchard.models.zoo.parts import FULL, SLIDING, attention, decoder, layer_kinds, mixture, norm
from orchard.nn.stack import Block


def mixtral(hf: Json) -> Decoder.Config:
    default = FULL if hf.get("sliding_window") is None else SLIDING
    blocks = [
        Block.Config(
            mixer_norm=norm(hf),
            mixer=attention(hf, kind=kind),
            mlp_norm=norm(hf),
            mlp=mixture(hf, hidden_dim=count(hf, "intermediate_size"), renormalize=True),
        )
        for kind in layer_kinds(hf, lambda i: default)
    ]
    return decoder(hf, blocks)


FAMILIES = (
    Family(
        "mixtral",
        mixtral,
        gguf="llama",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
        hf_expert_keys={
            "mlp.router.gate.weight": "block_sparse_moe.gate.weight",
            "mlp.gate.weight": "block_sparse_moe.experts.{e}.w1.weight",
            "mlp.down.weight": "block_sparse_moe.experts.{e}.w2.weight",
            "mlp.up.weight": "block_sparse_moe.experts.{e}.w3.weight",
        },
        pairs_neighbours=True,
    ),
)
