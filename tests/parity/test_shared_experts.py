"""A mixture with an expert that every token meets, against transformers' Qwen2-MoE layer."""

from __future__ import annotations

import pytest
import torch

from orchard.core.context import Context
from orchard.nn.moe import MoE, SharedMLP, TopK


@pytest.mark.parametrize("renormalize", [True, False])
@torch.inference_mode()
def test_the_layer_of_qwen2_moe(renormalize: bool) -> None:
    from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    torch.manual_seed(0)
    theirs = Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            hidden_size=32,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=renormalize,
        )
    )
    weights = {name: torch.randn_like(weight) * 0.3 for name, weight in theirs.named_parameters()}
    theirs.load_state_dict(weights)
    ours = MoE.Config(
        dim=32,
        hidden_dim=24,
        experts=8,
        router=TopK.Config(k=3, renormalize=renormalize),
        shared=SharedMLP.Config(hidden_dim=40),
    ).build()
    gate, up = weights["experts.gate_up_proj"].chunk(2, 1)  # [experts, 2 · hidden, dim]
    parts = {"router.gate": "gate", "shared.weigh": "shared_expert_gate"}
    parts |= {f"shared.{name}": f"shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    for mine, name in parts.items():
        ours.get_submodule(mine).assign(weights[f"{name}.weight"])
    ours.gate.assign(gate.contiguous())
    ours.up.assign(up.contiguous())
    ours.down.assign(weights["experts.down_proj"])
    x = torch.randn(2, 9, 32)
    expected = theirs(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    got = ours(x, Context.whole(x[..., 0]))
    assert expected.std() > 0.05 and (got - expected).abs().max() <= 1e-4
    one = ours(x[:1, 4:5], Context.whole(x[:1, 4:5, 0]))
    assert (one - expected[:1, 4:5]).abs().max() <= 1e-4
