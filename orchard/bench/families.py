"""Which families become a plan of native steps and nothing else: a tiny model of each is built and lowered."""

from __future__ import annotations

from typing import Any

WHOLE = ("gemma3", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""These must lower whole; every other family must name the nodes that do not."""

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA = {"sliding_window": 6, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}
_EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "mixtral": _EXPERTS,
    "olmoe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
}


def nodes_in_torch() -> dict[str, list[str]]:
    """Family → the nodes of its plan that run in torch, each with the reason. Empty: the family lowers whole."""
    from orchard.generate.lowering import lower
    from orchard.models.zoo import families
    from orchard.ops.plan.steps import Torch

    found = {}
    for name, family in families().items():
        fields = _COMMON | _EXTRA.get(name.removesuffix("_text"), {})
        # A family of several parts keeps those of its language model one level down.
        model = family.tree({"model_type": name, **fields, "text_config": fields}).build()
        steps = lower(model).steps
        found[name] = [f"{step.node}: {step.reason}" for step in steps if isinstance(step, Torch)]
    return found
