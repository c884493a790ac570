"""Pieces that the families' config functions share: reading a Hugging Face config, old spelling or new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.config import BaseConfig
from orchard.core.errors import BadFile, UnsupportedFormat
from orchard.models.language.decoder import Decoder
from orchard.models.zoo.fields import (
    DAMAGED,
    Json,
    count,
    even_share,
    flag,
    maybe_number,
    number,
    refused,
    shown,
    table,
    texts,
)
from orchard.nn.attention import Attention, Rotary, scaling
from orchard.nn.linear import Embedding, Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, TopK
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Layer, Stack

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
MAX_LAYERS = 4096


def activation(hf: Json) -> str:
    for field in ("hidden_activation", "hidden_act"):
        name = hf.get(field)
        if name is None:
            continue
        if not isinstance(name, str):
            raise refused(field, name, "the name of an activation")
        if name not in ACTIVATIONS:
            raise UnsupportedFormat(
                f"{field} is {shown(name)}, which is not known", hint="known: " + ", ".join(ACTIVATIONS)
            )
        return ACTIVATIONS[name]
    return "silu"


def layer_kinds(hf: Json, default: Callable[[int], str]) -> list[str]:
    """Each layer's kind of attention: as listed, or by the family's rule."""
    layers = count(hf, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise BadFile(f"num_hidden_layers is {layers:,}, and no model has so many layers", hint=DAMAGED)
    kinds = texts(hf, "layer_types")
    if not kinds:
        return [default(layer) for layer in range(layers)]
    if len(kinds) != layers:
        raise BadFile(f"layer_types has {len(kinds)} entries for {layers} layers", hint=DAMAGED)
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedFormat(f"layer_types holds {shown(unknown[0])}", hint=f"known: {FULL}, {SLIDING}")
    return list(kinds)


def rotary(hf: Json, head_dim: int, kind: str = FULL) -> Rotary.Config:
    """Rotary positions from `rope_parameters` (perhaps one entry per kind of layer) or the older separate fields."""
    given = table(hf, "rope_parameters")
    if FULL in given or SLIDING in given:
        given = table(given, kind)
    older = table(hf, "rope_scaling")
    if kind == SLIDING and "rope_local_base_freq" in hf:
        older = {"rope_theta": hf["rope_local_base_freq"]}
    elif hf.get("rope_theta") is not None:
        older = {"rope_theta": hf["rope_theta"], **older}
    merged: Json = {**older, **given}
    theta = number(merged, "rope_theta", 10_000.0)
    whole = maybe_number(hf, "partial_rotary_factor", 1.0, most=1.0)
    fraction = number(merged, "partial_rotary_factor", whole, most=1.0)
    pairs = even_share(head_dim, fraction, "head_dim") // 2
    return Rotary.Config(theta=theta, fraction=fraction, scaling=_scaling(merged, hf, theta, pairs))


def _scaling(given: Json, hf: Json, theta: float, pairs: int) -> BaseConfig | None:
    kind = given.get("rope_type", given.get("type"))
    if kind is None or kind == "default":
        return None
    if kind == "factors":
        return scaling.Factors.Config(factors=_factors(given, pairs))
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedFormat(f"rope_type is {shown(kind)}, which is not known", hint="known: linear, llama3, yarn")
    factor = number(given, "factor")
    if kind == "linear":
        return scaling.Linear.Config(factor=factor)
    trained = count(hf, "max_position_embeddings", 8192 if kind == "llama3" else 2048)
    original = count(given, "original_max_position_embeddings", trained)
    if kind == "llama3":
        low, high = number(given, "low_freq_factor"), number(given, "high_freq_factor")
        if high <= low:
            raise BadFile(f"high_freq_factor {high:g} is not above low_freq_factor {low:g}", hint=DAMAGED)
        return scaling.Llama3.Config(factor=factor, low=low, high=high, original=original)
    if theta <= 1:
        raise BadFile(f"rope_theta is {theta:g}, which yarn cannot stretch", hint=DAMAGED)
    return scaling.Yarn.Config(
        factor=factor,
        original=original,
        fast=number(given, "beta_fast", 32.0),
        slow=number(given, "beta_slow", 1.0),
        gain=maybe_number(given, "attention_factor"),
    )


def _factors(given: Json, pairs: int) -> tuple[float, ...]:
    values = given.get("factors")
    if not isinstance(values, list) or len(values) != pairs:
        many = f"{len(values)} factors" if isinstance(values, list) else shown(values)
        raise BadFile(f"the rotary scaling has {many} for {pairs} pairs of channels", hint=DAMAGED)
    return tuple(number({"a rotary factor": value}, "a rotary factor") for value in values)


def attention(
    hf: Json, *, kind: str = FULL, bias: bool = False, o_bias: bool = False, **fields: Any
) -> Attention.Config:
    """An attention config; `fields` set what the family does differently."""
    heads = count(hf, "num_attention_heads")
    kv_heads = count(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise BadFile(
            f"num_key_value_heads is {kv_heads}, which does not divide num_attention_heads {heads}", hint=DAMAGED
        )
    head_dim = _head_dim(hf, heads)
    window = count(hf, "sliding_window") if kind == SLIDING else None
    store = Store.Config() if window is None else Store.Config(policy=Window.Config(window=window))
    return Attention.Config(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q=Linear.Config(bias=bias),
        k=Linear.Config(bias=bias),
        v=Linear.Config(bias=bias),
        o=Linear.Config(bias=o_bias),
        rotary=rotary(hf, head_dim, kind),
        window=window,
        store=store,
        **fields,
    )


def _head_dim(hf: Json, heads: int) -> int:
    if hf.get("head_dim") is not None:
        return count(hf, "head_dim")
    width = count(hf, "hidden_size")
    if width % heads:
        raise BadFile(f"hidden_size is {width}, which num_attention_heads {heads} does not divide", hint=DAMAGED)
    return width // heads


def mlp(hf: Json, *, bias: bool = False) -> GatedMLP.Config:
    return GatedMLP.Config(
        hidden_dim=count(hf, "intermediate_size"),
        activation=activation(hf),
        gate=Linear.Config(bias=bias),
        up=Linear.Config(bias=bias),
        down=Linear.Config(bias=bias),
    )


def mixture(hf: Json, *, hidden_dim: int, renormalize: bool) -> MoE.Config:
    name = next((name for name in ("num_experts", "num_local_experts") if hf.get(name) is not None), None)
    if name is None:
        raise refused("num_experts or num_local_experts", None, "which a mixture must have")
    experts, chosen = count(hf, name), count(hf, "num_experts_per_tok")
    if chosen > experts:
        raise BadFile(f"num_experts_per_tok is {chosen}, more than {name} {experts}", hint=DAMAGED)
    return MoE.Config(
        hidden_dim=hidden_dim,
        experts=experts,
        activation=activation(hf),
        router=TopK.Config(k=chosen, renormalize=renormalize),
    )


def norm(hf: Json, **fields: Any) -> RMSNorm.Config:
    return RMSNorm.Config(eps=number(hf, "rms_norm_eps", 1e-6, least=0.0), **fields)


def decoder(hf: Json, blocks: Sequence[Layer], *, tied: bool = False, **fields: Any) -> Decoder.Config:
    """The whole tree around a family's blocks. `tied` is the family's default."""
    return Decoder.Config(
        vocab=count(hf, "vocab_size"),
        dim=count(hf, "hidden_size"),
        context=count(hf, "max_position_embeddings", 2048),
        embedding=fields.pop("embedding", Embedding.Config()),
        stack=Stack.Config(layers=list(blocks)),
        norm=fields.pop("norm", norm(hf)),
        head=None if flag(hf, "tie_word_embeddings", tied) else Linear.Config(),
        **fields,
    )
