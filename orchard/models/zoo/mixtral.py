"""Mixtral: Mistral with eight experts in place of each MLP (arXiv 2401.04088)."""

from __future__ import annotations

from typing import Any

from orchard.models.language.decoder import Decoder
from orchard.models.zoo.family import Family
from orchard.models.zoo.fields import Json, count
from orchard.models.zoo.parts import FULL, SLIDING, attention, decoder, layer_kinds, mixture, norm
from orchard.nn.moe import MoE, TopK
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


def mixture_words(hf: Json, tree: Decoder.Config) -> Json | None:
    """The config of a Llama or Mistral whose MLPs have all become the same mixture (upcycled); None where they have not. Whether
    it says all that the tree is made of is for the caller to check."""
    mlps = [block.mlp for block in tree.stack.layers]
    first = mlps[0]
    alike = (
        isinstance(first, MoE.Config) and isinstance(first.router, TopK.Config) and all(mlp == first for mlp in mlps)
    )
    if not alike or hf.get("model_type") not in ("llama", "mistral"):
        return None
    assert isinstance(first, MoE.Config) and isinstance(first.router, TopK.Config)
    mixer: Any = tree.stack.layers[0].mixer
    assumed: Json = {  # what a config may leave out, and Mixtral would take for something else
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "max_position_embeddings": tree.context,
        "rms_norm_eps": tree.norm.eps,
        "rope_theta": None if mixer.rotary is None or hf.get("rope_parameters") else mixer.rotary.theta,
    }
    return {
        **{name: value for name, value in assumed.items() if value is not None},
        **{name: value for name, value in hf.items() if value is not None},
        "sliding_window": mixer.window,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": first.hidden_dim,
        "num_local_experts": first.experts,
        "num_experts_per_tok": first.router.k,
    }


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
