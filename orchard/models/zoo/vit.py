"""ViT (arXiv 2010.11929) as Hugging Face folders hold it: a config function and a key map. DeiT without a token to distil into is
stored as one.

It is no entry of `FAMILIES`: those are decoders, which write.
"""

from __future__ import annotations

import re

from orchard.core.errors import BadFile, UnknownArchitecture, UnsupportedFormat
from orchard.models.vision.vit import ViT
from orchard.models.zoo.bert import BERT_ACTIVATIONS
from orchard.models.zoo.fields import DAMAGED, Json, count, flag, number, refused, shown, table
from orchard.models.zoo.parts import MAX_LAYERS
from orchard.nn.attention.bidirectional import BidirectionalAttention
from orchard.nn.feed_forward import FeedForward
from orchard.nn.layer_norm import LayerNorm
from orchard.nn.linear import Linear
from orchard.nn.stack import Block, Stack
from orchard.nn.vision.patches import Patches

KIND = "vit"
HF_KEYS = {
    "patches.map.weight": "embeddings.patch_embeddings.projection.weight",
    "patches.map.bias": "embeddings.patch_embeddings.projection.bias",
    "patches.places": "embeddings.position_embeddings",
    "patches.first": "embeddings.cls_token",
    "norm": "layernorm",
    "mixer_norm": "layernorm_before",
    "mixer.q": "attention.attention.query",
    "mixer.k": "attention.attention.key",
    "mixer.v": "attention.attention.value",
    "mixer.o": "attention.output.dense",
    "mlp_norm": "layernorm_after",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_LAYER = re.compile(r"stack\.layers\.(\d+)\.(.+)")


def vit(hf: Json) -> ViT.Config:
    """The config tree of a Hugging Face config with `model_type` "vit"; what it leaves out is as in ViT base."""
    if hf.get("model_type") != KIND:
        raise UnknownArchitecture(f"unknown architecture {shown(hf.get('model_type'))}", hint=f"known: {KIND}")
    dim, layers, heads = (
        count(hf, name, default)
        for name, default in (("hidden_size", 768), ("num_hidden_layers", 12), ("num_attention_heads", 12))
    )
    if layers > MAX_LAYERS:
        raise BadFile(f"num_hidden_layers is {layers:,}, and no model has so many layers", hint=DAMAGED)
    side, patch = count(hf, "image_size", 224), count(hf, "patch_size", 16)
    for name, whole, part in (("hidden_size", dim, heads), ("image_size", side, patch)):
        if whole % part:
            raise BadFile(f"{name} is {whole}, which {part} does not divide", hint=DAMAGED)
    eps, biased = number(hf, "layer_norm_eps", 1e-12, least=0.0), flag(hf, "qkv_bias", True)
    block = Block.Config(
        mixer_norm=LayerNorm.Config(eps=eps),
        mixer=BidirectionalAttention.Config(heads=heads, **{side: Linear.Config(bias=biased) for side in "qkv"}),  # type: ignore[arg-type]
        mlp_norm=LayerNorm.Config(eps=eps),
        mlp=FeedForward.Config(hidden_dim=count(hf, "intermediate_size", 3072), activation=_activation(hf)),
    )
    return ViT.Config(
        dim=dim,
        classes=len(table(hf, "id2label")) or count(hf, "num_labels", 2),
        patches=Patches.Config(side=side, patch=patch, channels=count(hf, "num_channels", 3), first=True),
        stack=Stack.Config(layers=[block.clone() for _ in range(layers)]),
        norm=LayerNorm.Config(eps=eps),
        pool="first",
    )


def hf_name(ours: str) -> str:
    """Where a folder keeps one of our tensors; `KeyError` for what such a model does not have."""
    if ours.startswith("head."):
        return ours.replace("head", "classifier")
    if ours in HF_KEYS:
        return f"{KIND}.{HF_KEYS[ours]}"
    part, _, end = ours.rpartition(".")
    match = _LAYER.fullmatch(part)
    usual = HF_KEYS[part] if match is None else f"encoder.layer.{match[1]}.{HF_KEYS[match[2]]}"
    return f"{KIND}.{usual}.{end}"


def _activation(hf: Json) -> str:
    name = hf.get("hidden_act", "gelu")
    if not isinstance(name, str):
        raise refused("hidden_act", name, "the name of an activation")
    if name not in BERT_ACTIVATIONS:
        raise UnsupportedFormat(
            f"hidden_act is {shown(name)}, which is not known", hint="known: " + ", ".join(BERT_ACTIVATIONS)
        )
    return BERT_ACTIVATIONS[name]
