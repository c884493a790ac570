"""Mixtures in the native engine: with an expert for all tokens, and with experts that are not weights of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchard.core.config import BaseConfig
from orchard.core.context import Context
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.linear import GroupedLinear, Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import Experts, MoE, SharedMLP
from orchard.nn.stack import Block, Stack
from orchard.ops.kernels import native
from orchard.ops.plan import steps
from orchard.ops.plan.reference import Reference
from orchard.transforms.upcycle import Upcycle

IDS = [3, 17, 40, 8, 8, 91, 22, 5, 60, 33, 12, 71]


def model(mlp: BaseConfig) -> Decoder:
    torch.manual_seed(3)
    mixer = Attention.Config(heads=4, kv_heads=2, head_dim=16)
    blocks = [Block.Config(mixer=mixer.clone(), mlp=mlp.clone()) for _ in range(2)]
    made: Decoder = Decoder.Config(vocab=96, dim=64, context=128, stack=Stack.Config(layers=blocks)).build()
    for module in made.modules():
        if isinstance(module, Linear | GroupedLinear):
            module.assign(torch.randn(module.shape) * 0.2)
    return made.eval().requires_grad_(False)


def check(made: Decoder, plan: steps.Plan) -> None:
    with torch.inference_mode():
        exact = made(torch.tensor([IDS]))[0].numpy()
    many = range(len(IDS))
    if plan.whole:
        reference = Reference(plan, 1, len(IDS)).run(IDS, [0] * len(IDS), many, many)
        assert np.abs(reference - exact).max() < 1e-4 * np.abs(exact).max()
    if native.library() is not None:
        found = NativeRunner(plan, decoder=lambda: made, threads=1, level=1).scores(IDS)
        assert np.abs(found - exact).max() < 1e-3 * np.abs(exact).max()


def in_torch(plan: steps.Plan) -> dict[str, str]:
    return {step.node: step.reason for step in plan.steps if isinstance(step, steps.Torch)}


def test_a_shared_expert_is_native() -> None:
    made = model(MoE.Config(hidden_dim=32, experts=4, shared=GatedMLP.Config(hidden_dim=48)))
    plan = lower(made, stores="f32")
    assert plan.whole and sum(isinstance(step, steps.Experts) for step in plan.steps) == 2
    check(made, plan)


def test_one_that_is_weighed_runs_in_torch_beside_native_experts() -> None:
    made = model(MoE.Config(hidden_dim=32, experts=4, shared=SharedMLP.Config(hidden_dim=48)))
    plan = lower(made, stores="f32")
    assert set(in_torch(plan)) == {f"stack.layers.{layer}.mlp.shared" for layer in range(2)}
    assert sum(isinstance(step, steps.Experts) for step in plan.steps) == 2
    check(made, plan)


@pytest.mark.parametrize("shared", [0.0, 0.5])
def test_an_upcycled_model_is_native_and_says_what_it_said(shared: float) -> None:
    dense = model(GatedMLP.Config(hidden_dim=64))
    mixed = Upcycle(experts=4, k=2, parts=2, shared=shared).apply(dense)
    plan = lower(mixed, stores="f32")
    assert plan.whole
    check(mixed, plan)
    check(dense, plan)


class Doubled(Experts):
    def __init__(self, inner: Experts) -> None:
        self.inner = inner

    def run(self, tokens: torch.Tensor, counts: torch.Tensor, context: Context) -> torch.Tensor:
        return 2 * self.inner.run(tokens, counts, context)


def test_experts_from_elsewhere_are_not_taken_for_the_models_own() -> None:
    made = model(MoE.Config(hidden_dim=32, experts=4))
    mlp: Any = made.stack.layers[1].mlp
    mlp.experts = Doubled(mlp.experts)
    plan = lower(made, stores="f32")
    assert list(in_torch(plan)) == ["stack.layers.1.mlp"] and "Doubled" in in_torch(plan)["stack.layers.1.mlp"]
    check(made, plan)
