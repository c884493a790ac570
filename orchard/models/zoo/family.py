"""What a family consists of: how its config becomes a tree, and what its tensors are called elsewhere.

Patterns use `{i}` for the layer and `{e}` for the expert. Orchard keeps a layer's experts in one tensor; a pattern with `{e}`
means that the other side keeps one tensor per expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchard.core.errors import BadFile, OrchardError
from orchard.models.language.decoder import Decoder
from orchard.models.zoo.fields import table

_LAYER = re.compile(r"stack\.layers\.(\d+)\.")
_TRACK = re.compile(r"tracks\.\d+\.layers\.\d+\.")
"""A layer inside of a layer of tracks: other files have no such thing, so it keeps its name."""

HF_KEYS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    **{f"mixer.{x}.{w}": f"self_attn.{x}_proj.{w}" for x in "qkvo" for w in ("weight", "bias")},
    "mixer.q_norm.weight": "self_attn.q_norm.weight",
    "mixer.k_norm.weight": "self_attn.k_norm.weight",
    "mixer_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"mlp.{x}.{w}": f"mlp.{x}_proj.{w}" for x in ("gate", "up", "down") for w in ("weight", "bias")},
}
GGUF_KEYS = {
    "embedding.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    **{f"mixer.{x}.{w}": f"attn_{x}.{w}" for x in "qkv" for w in ("weight", "bias")},
    "mixer.o.weight": "attn_output.weight",
    "mixer.o.bias": "attn_output.bias",
    "mixer.q_norm.weight": "attn_q_norm.weight",
    "mixer.k_norm.weight": "attn_k_norm.weight",
    "mixer_norm.weight": "attn_norm.weight",
    "mixer_out_norm.weight": "post_attention_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "mlp_out_norm.weight": "post_ffw_norm.weight",
    **{f"mlp.{x}.{w}": f"ffn_{x}.{w}" for x in ("gate", "up", "down") for w in ("weight", "bias")},
    "mlp.router.gate.weight": "ffn_gate_inp.weight",
}
GGUF_EXPERT_KEYS = {f"mlp.{x}.weight": f"ffn_{x}_exps.weight" for x in ("gate", "up", "down")}


@dataclass(frozen=True)
class Family:
    """One family. Everything but the config function has a default that fits most."""

    name: str
    make: Callable[[dict[str, Any]], Decoder.Config]
    gguf: str
    """The architecture's name in GGUF files; empty where they have none."""
    hf_keys: Mapping[str, str] = field(default_factory=dict)
    """What differs from `HF_KEYS`, for names inside a layer (without the layer's prefix)."""
    hf_expert_keys: Mapping[str, str] = field(default_factory=dict)
    pairs_neighbours: bool = False
    """GGUF files of this family keep rotary channel pairs side by side: rows of q and k are reordered."""
    adds_norm_offset: bool = False
    """GGUF files of this family keep norm weights with the offset already added."""
    nested: str = ""
    """The field of the config that holds the text model's own fields, where they are not at the top."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a config that leaves a field out means by it, where the shared parts would assume something else."""
    unread: tuple[str, ...] = ()
    """How names of tensors start that are no part of the text model."""

    def fields(self, hf: dict[str, Any]) -> dict[str, Any]:
        """The text model's own fields of a config, with the family's defaults for what it leaves out."""
        return {**self.defaults, **(table(hf, self.nested) if self.nested else hf)}

    def tree(self, hf: dict[str, Any]) -> Decoder.Config:
        """The config tree, or a typed error when the numbers in `hf` make no model."""
        try:
            return self.make(self.fields(hf))
        except OrchardError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # a check is missing: still typed
            what = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            raise BadFile(f"the {self.name} config is not usable: {what}", hint="the file is damaged") from error

    def hf_name(self, ours: str, *, mixture: bool) -> str:
        """The Hugging Face name of one of our tensors; `mixture`: its layer's MLP is a mixture."""
        special = {**self.hf_keys, **(self.hf_expert_keys if mixture else {})}
        return _translate(ours, {**HF_KEYS, **special}, "model.layers.{i}.")

    def gguf_name(self, ours: str, *, mixture: bool) -> str:
        return _translate(ours, {**GGUF_KEYS, **(GGUF_EXPERT_KEYS if mixture else {})}, "blk.{i}.")


def _translate(ours: str, keys: Mapping[str, str], prefix: str) -> str:
    match = _LAYER.match(ours)
    if match is None:
        return keys[ours]
    rest = ours[match.end() :]
    track = _TRACK.match(rest)
    inner = track.group() if track is not None else ""
    return prefix.format(i=match.group(1)) + inner + keys[rest[len(inner) :]]
