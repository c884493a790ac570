"""What `orchard show --plan` prints: every step, its weights, what runs in torch and why, and what a token costs."""

from __future__ import annotations

from typing import Any

import torch

from orchard.cache.store import Store
from orchard.generate.lowering import lower
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.stack import Block, Stack
from orchard.ops.kernels.packing import matrix_bytes
from orchard.ops.plan.text import describe, table, totals


def model(*mlps: Any, owners: dict[int, int] | None = None) -> Decoder:
    torch.manual_seed(0)
    layers = [
        Block.Config(
            mixer=Attention.Config(
                heads=4, kv_heads=2, head_dim=8, store=Store.Config(owner=(owners or {}).get(layer))
            ),
            mlp=mlp,
        )
        for layer, mlp in enumerate(mlps)
    ]
    made: Decoder = Decoder.Config(vocab=50, dim=32, context=64, stack=Stack.Config(layers=layers)).build()
    return made


def gated() -> GatedMLP.Config:
    return GatedMLP.Config(hidden_dim=40)


def test_every_step_is_described() -> None:
    plan = lower(model(gated(), gated()))
    entries = describe(plan)
    assert [entry["step"] for entry in entries] == [step.kind for step in plan.steps]
    assert [entry["layer"] for entry in entries] == [None, *[0] * 5, *[1] * 6, None]
    first = entries[1]
    assert [matrix["name"] for matrix in first["matrices"]] == [f"stack.layers.0.mixer.{x}.weight" for x in "qkv"]
    assert first["matrices"][0] == {
        "name": "stack.layers.0.mixer.q.weight",
        "shape": [32, 32],
        "format": "f32",
        "bytes": matrix_bytes("f32", 32, 32),
    }
    assert first["bytes"] == sum(matrix["bytes"] for matrix in first["matrices"])


def test_equal_layers_are_told_once() -> None:
    lines = table(lower(model(*[gated()] * 4, GatedMLP.Config(hidden_dim=48))))
    assert "layers 0-3:" in lines and "layer 4:" in lines
    assert sum("mlp.gate.weight" in line for line in lines) == 2
    assert lines[-2] == "28 native steps, 0 in torch"


def test_steps_in_torch_give_their_reasons() -> None:
    made = model(gated(), gated(), gated())
    made.stack.layers[1].mlp.register_forward_hook(lambda module, args, y: y)
    plan = lower(made)
    (entry,) = (entry for entry in describe(plan) if entry["step"] == "torch")
    assert entry["node"] == "stack.layers.1.mlp" and "hooks" in entry["reason"] and entry["layer"] == 1
    lines = table(plan)
    assert any("stack.layers.1.mlp: GatedMLP has hooks" in line for line in lines)
    assert "1 in torch" in lines[-2]
    assert [line for line in lines if line.startswith("layer")] == ["layer 0:", "layer 1:", "layer 2:"]


def test_what_a_token_costs() -> None:
    plan = lower(model(MoE.Config(hidden_dim=16, experts=4)))
    sums = totals(plan)
    expert = 2 * matrix_bytes("f32", 16, 32) + matrix_bytes("f32", 32, 16)
    mixer = 2 * matrix_bytes("f32", 32, 32) + 2 * matrix_bytes("f32", 16, 32)
    vocabulary, router = matrix_bytes("f32", 50, 32), matrix_bytes("f32", 4, 32)
    assert sums["bytes_per_token"] == vocabulary // 50 + mixer + router + 2 * expert + vocabulary
    assert sums["weight_bytes"] == 2 * vocabulary + mixer + router + 4 * expert
    assert sums["store_bytes_per_cached_token"] == 2 * 2 * 8 * 2


def test_borrowed_stores_are_named() -> None:
    lines = table(lower(model(gated(), gated(), owners={1: 0})))
    assert any("bf16 store of layer 0" in line for line in lines)
    assert any("only rows whose scores are wanted" in line for line in lines)
