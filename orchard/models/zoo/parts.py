"""Pieces that the families' config functions share: reading a Hugging Face config, old spelling or new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.config import BaseConfig
from orchard.core.errors import BadFile, UnsupportedFormat
from orchard.models.language.decoder import Decoder
from orchard.nn.attention import Attention, Rotary, scaling
from orchard.nn.linear import Embedding, Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, TopK
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack

Json = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
LIMIT = 1 << 24  # No real dimension is larger; a damaged one must not make us allocate.


def count(hf: Json, name: str, default: int | None = None) -> int:
    """A positive whole number from the config."""
    value = hf.get(name, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < LIMIT:
        raise BadFile(f"{name} is {value!r}, which makes no model", hint="the file is damaged or of another kind")
    return value


def number(hf: Json, name: str, default: float | None = None) -> float | None:
    value = hf.get(name, default)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
        raise BadFile(f"{name} is {value!r}, not a number", hint="the file is damaged")
    return float(value)


def activation(hf: Json) -> str:
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise UnsupportedFormat(f"activation {name!r} is not known", hint="known: " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def layer_kinds(hf: Json, default: Callable[[int], str]) -> list[str]:
    """Each layer's kind of attention: as listed, or by the family's rule."""
    layers = count(hf, "num_hidden_layers")
    if layers > 4096:
        raise BadFile(f"{layers} layers make no model", hint="the file is damaged")
    kinds = hf.get("layer_types") or [default(i) for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
        raise UnsupportedFormat(
            f"layer_types {sorted(set(map(str, kinds)))} for {layers} layers", hint="known: full, sliding"
        )
    return list(kinds)


def rotary(hf: Json, kind: str = FULL) -> Rotary.Config:
    """Rotary positions from `rope_parameters` (perhaps one entry per kind of layer) or the older separate fields."""
    given: Json = hf.get("rope_parameters") or {}
    given = given.get(kind) or given
    older: Json = hf.get("rope_scaling") or {}
    if kind == SLIDING and "rope_local_base_freq" in hf:
        older = {"rope_theta": hf["rope_local_base_freq"]}
    elif hf.get("rope_theta") is not None:
        older = {"rope_theta": hf["rope_theta"], **older}
    merged: Json = {**older, **given}
    return Rotary.Config(
        theta=float(merged.get("rope_theta", 10_000.0)),
        fraction=float(merged.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0),
        scaling=_scaling(merged, hf),
    )


def _scaling(given: Json, hf: Json) -> BaseConfig | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    original = given.get("original_max_position_embeddings") or hf.get("max_position_embeddings")
    if kind == "linear":
        return scaling.Linear.Config(factor=float(given["factor"]))
    if kind == "llama3":
        return scaling.Llama3.Config(
            factor=float(given["factor"]),
            low=float(given["low_freq_factor"]),
            high=float(given["high_freq_factor"]),
            original=int(original or 8192),
        )
    if kind == "yarn":
        gain = given.get("attention_factor")
        return scaling.Yarn.Config(
            factor=float(given["factor"]),
            original=int(original or 0),
            fast=float(given.get("beta_fast") or 32),
            slow=float(given.get("beta_slow") or 1),
            gain=None if gain is None else float(gain),
        )
    if kind == "factors":
        return scaling.Factors.Config(factors=tuple(float(x) for x in given["factors"]))
    raise UnsupportedFormat(f"rotary scaling {kind!r} is not known", hint="known: linear, llama3, yarn")


def attention(
    hf: Json, *, kind: str = FULL, bias: bool = False, o_bias: bool = False, **fields: Any
) -> Attention.Config:
    """An attention config; `fields` set what the family does differently."""
    heads = count(hf, "num_attention_heads")
    window = count(hf, "sliding_window") if kind == SLIDING else None
    store = Store.Config() if window is None else Store.Config(policy=Window.Config(window=window))
    return Attention.Config(
        heads=heads,
        kv_heads=count(hf, "num_key_value_heads", heads),
        head_dim=count(hf, "head_dim", count(hf, "hidden_size") // heads),
        q=Linear.Config(bias=bias),
        k=Linear.Config(bias=bias),
        v=Linear.Config(bias=bias),
        o=Linear.Config(bias=o_bias),
        rotary=rotary(hf, kind),
        window=window,
        store=store,
        **fields,
    )


def mlp(hf: Json, *, bias: bool = False) -> GatedMLP.Config:
    return GatedMLP.Config(
        hidden_dim=count(hf, "intermediate_size"),
        activation=activation(hf),
        gate=Linear.Config(bias=bias),
        up=Linear.Config(bias=bias),
        down=Linear.Config(bias=bias),
    )


def mixture(hf: Json, *, hidden_dim: int, renormalize: bool) -> MoE.Config:
    experts = hf.get("num_experts", hf.get("num_local_experts"))
    return MoE.Config(
        hidden_dim=hidden_dim,
        experts=count({"experts": experts}, "experts"),
        activation=activation(hf),
        router=TopK.Config(k=count(hf, "num_experts_per_tok"), renormalize=renormalize),
    )


def norm(hf: Json, **fields: Any) -> RMSNorm.Config:
    return RMSNorm.Config(eps=number(hf, "rms_norm_eps", 1e-6) or 0.0, **fields)


def decoder(hf: Json, blocks: list[Block.Config], *, tied: bool = False, **fields: Any) -> Decoder.Config:
    """The whole tree around a family's blocks. `tied` is the family's default."""
    tie = hf.get("tie_word_embeddings")
    return Decoder.Config(
        vocab=count(hf, "vocab_size"),
        dim=count(hf, "hidden_size"),
        context=count(hf, "max_position_embeddings", 2048),
        embedding=fields.pop("embedding", Embedding.Config()),
        stack=Stack.Config(layers=blocks),
        norm=fields.pop("norm", norm(hf)),
        head=None if (tied if tie is None else tie) else Linear.Config(),
        **fields,
    )
