"""BERT (arXiv 1810.04805) and what shares its shape, such as MiniLM: a config function and a key map.

It is no entry of `FAMILIES`: those are decoders, which write. Folders hold the body alone (`BertModel`) or below a `bert.`
prefix beside heads; folders converted from the first release call a norm's weight and bias `gamma` and `beta`.
"""

from __future__ import annotations

import re

from orchard.core.errors import BadFile, UnsupportedFormat
from orchard.models.language.encoder import Encoder
from orchard.models.zoo.fields import DAMAGED, Json, count, flag, number, refused, shown
from orchard.models.zoo.parts import ACTIVATIONS, MAX_LAYERS
from orchard.nn.attention.bidirectional import BidirectionalAttention
from orchard.nn.feed_forward import FeedForward
from orchard.nn.layer_norm import LayerNorm
from orchard.nn.post_norm import PostNormBlock
from orchard.nn.stack import Stack

BERT_ACTIVATIONS = {**ACTIVATIONS, "gelu_new": "gelu_tanh"}
HF_KEYS = {
    "embedding": "embeddings.word_embeddings",
    "places": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "mixer.q": "attention.self.query",
    "mixer.k": "attention.self.key",
    "mixer.v": "attention.self.value",
    "mixer.o": "attention.output.dense",
    "mixer_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
# What the body does not need: counted places, the layer above [CLS], and heads that guess words or next sentences.
UNREAD = re.compile(r"(?:bert\.)?(?:embeddings\.position_ids|pooler\..+)|cls\..+")

_LAYER = re.compile(r"stack\.layers\.(\d+)\.(.+)")
_FIRST_RELEASE = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def bert(hf: Json) -> Encoder.Config:
    """The config tree of a Hugging Face config with `model_type` "bert"; what it leaves out is as in BERT base."""
    _refuse_other_kinds(hf)
    dim, layers = count(hf, "hidden_size", 768), count(hf, "num_hidden_layers", 12)
    heads, eps = count(hf, "num_attention_heads", 12), number(hf, "layer_norm_eps", 1e-12, least=0.0)
    if layers > MAX_LAYERS:
        raise BadFile(f"num_hidden_layers is {layers:,}, and no model has so many layers", hint=DAMAGED)
    if dim % heads:
        raise BadFile(f"hidden_size is {dim}, which num_attention_heads {heads} does not divide", hint=DAMAGED)
    hidden, act = count(hf, "intermediate_size", 3072), _activation(hf)
    blocks = [
        PostNormBlock.Config(
            mixer=BidirectionalAttention.Config(heads=heads),
            mixer_norm=LayerNorm.Config(eps=eps),
            mlp=FeedForward.Config(hidden_dim=hidden, activation=act),
            mlp_norm=LayerNorm.Config(eps=eps),
        )
        for _ in range(layers)
    ]
    return Encoder.Config(
        vocab=count(hf, "vocab_size", 30_522),
        dim=dim,
        context=count(hf, "max_position_embeddings", 512),
        kinds=count(hf, "type_vocab_size", 2),
        norm=LayerNorm.Config(eps=eps),
        stack=Stack.Config(layers=blocks),
    )


def hf_names(ours: str) -> list[str]:
    """Where a folder may keep one of our tensors, the usual name first; `KeyError` for what BERT does not have."""
    part, _, kind = ours.rpartition(".")
    match = _LAYER.fullmatch(part)
    usual = HF_KEYS[part] if match is None else f"encoder.layer.{match[1]}.{HF_KEYS[match[2]]}"
    names = [f"{usual}.{kind}"]
    names += [names[0].replace(new, old) for new, old in _FIRST_RELEASE.items() if names[0].endswith(new)]
    return [prefix + name for prefix in ("", "bert.") for name in names]


def _activation(hf: Json) -> str:
    name = hf.get("hidden_act", "gelu")
    if not isinstance(name, str):
        raise refused("hidden_act", name, "the name of an activation")
    if name not in BERT_ACTIVATIONS:
        raise UnsupportedFormat(
            f"hidden_act is {shown(name)}, which is not known", hint="known: " + ", ".join(BERT_ACTIVATIONS)
        )
    return BERT_ACTIVATIONS[name]


def _refuse_other_kinds(hf: Json) -> None:
    """Options that make another model of it; read as the usual one it would give vectors that mean nothing."""
    positions = hf.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise UnsupportedFormat(
            f"position_embedding_type is {shown(positions)}, which is not read", hint="take one with absolute positions"
        )
    for option in ("is_decoder", "add_cross_attention"):
        if flag(hf, option):
            raise UnsupportedFormat(f"{option} is true: this BERT is no encoder", hint="take an encoder (BertModel)")
