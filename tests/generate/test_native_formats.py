"""Weights in every format that looks values up, or has one scale a row: natively as in torch, and bit for bit in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchard.cache.store import Store
from orchard.core.config import BaseConfig
from orchard.core.errors import UnsupportedPair
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.protocol import Work
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.formats import Int2, Int4
from orchard.nn.formats.blocks import Blocks
from orchard.nn.formats.palette import Palette
from orchard.nn.linear import Embedding, GroupedLinear, Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.stack import Block, Stack
from orchard.ops.kernels.native import library, why_not
from orchard.ops.kernels.packing import pack_plain
from orchard.ops.plan import steps
from orchard.ops.plan.file import from_json, to_json
from orchard.ops.plan.reference import Reference
from tests.generate.test_native_exact import ids_of, read

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())
LEVELS = (0, 1, 2, 3)
FORMATS: dict[str, BaseConfig] = {
    "p4": Palette.Config(bits=4),
    "p2": Palette.Config(bits=2),
    "p4 of 32 rows": Palette.Config(bits=4, rows=32),
    "blocks": Blocks.Config(),
    "q2 by rows": Int2.Config(group=None),
    "q4 by rows": Int4.Config(group=None),
}
EMBEDDINGS = ("p4", "blocks")


def made(name: str, *, experts: bool = False) -> Decoder:
    torch.manual_seed(3)
    mlp: Any = MoE.Config(hidden_dim=64, experts=4) if experts else GatedMLP.Config(hidden_dim=96)
    layers = [
        Block.Config(mixer=Attention.Config(heads=4, kv_heads=2, head_dim=16, store=store), mlp=mlp.clone())
        for store in (Store.Config(), Store.Config(), Store.Config(owner=1))
    ]
    tree = Decoder.Config(vocab=96, dim=64, context=4096, stack=Stack.Config(layers=layers), head=None).complete()
    for kind in (Linear, GroupedLinear) if experts else (Linear,):
        tree = tree.rewrite(
            kind, lambda node: node.clone(format=FORMATS[name].clone()), lambda path, _: "router" not in path
        )
    if name in EMBEDDINGS:
        tree = tree.rewrite(Embedding, lambda node: node.clone(format=FORMATS[name].clone()), lambda *_: True)
    model = tree.build().eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear):
            module.assign(torch.randn(module.shape) * 0.3)
    return model


MODELS: dict[tuple[str, bool], Decoder] = {}


def model_of(name: str, experts: bool = False) -> Decoder:
    if (name, experts) not in MODELS:
        MODELS[name, experts] = made(name, experts=experts)
    return MODELS[name, experts]


def kinds(plan: steps.Plan) -> set[str]:
    return {output.matrix.kind for step in plan.steps if isinstance(step, steps.Linear) for output in step.outputs}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FORMATS)
def test_native_is_torch(name: str, level: int) -> None:
    model, ids = model_of(name), ids_of(96, 70)
    plan = lower(model, stores="f32")
    assert plan.whole and kinds(plan) == {name.split()[0]}
    assert plan.steps[0].matrix.kind == (name if name in EMBEDDINGS else "f32")  # type: ignore[attr-defined]
    with torch.inference_mode():
        exact = model(torch.tensor([ids]))[0].numpy()
    reference = Reference(plan, 1, 70).run(ids, [0] * 70, range(70), range(70))
    assert np.abs(reference - exact).max() < 1e-4 * np.abs(exact).max()
    native = NativeRunner(plan, threads=2, level=level)
    error = np.abs(native.scores(ids) - exact).max(1) / np.abs(exact).max()
    # Prompts in bfloat16; activations in 12 bits (palettes are off by no more than grids are); blocks take them as they are.
    bound = 0.03 if level == 3 else 1e-5 if name == "blocks" else 4e-3
    assert np.median(error) < bound
    run = read(native, ids[:1], [])
    run.first()
    for token in ids[1:20]:
        last = run.step([token])[0].copy()
    assert np.abs(last - exact[19]).max() < 4 * bound * np.abs(exact).max()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FORMATS)
def test_bits_do_not_depend_on_company(name: str, level: int) -> None:
    native = NativeRunner(lower(model_of(name)), threads=2, level=level)
    ids, other = ids_of(96, 90), ids_of(96, 300)[150:]
    first = read(native, ids, []).first().copy()
    for cuts in ([1], [3, 4, 40], [17, 33, 70]):
        assert np.array_equal(read(native, ids, cuts).first(), first)
    alone = read(native, ids, [])
    alone.first()
    each = np.concatenate([alone.step([token]).copy() for token in other[:7]])
    slots = native.slots(20)
    for slot in range(20):
        slots.open(slot, 300)
    slots.run([Work(slot, other[: 5 + slot] if slot else ids, 0, prompt=True) for slot in range(20)])
    found = slots.run(
        [Work(slot, other[:7] if slot == 0 else other[slot : slot + 1], 7 if slot == 0 else 1) for slot in range(20)]
    )
    assert np.array_equal(found[0], each)


@pytest.mark.parametrize("name", ["p4", "p2", "blocks"])
def test_experts(name: str) -> None:
    model, ids = model_of(name, experts=True), ids_of(96, 30)
    plan = lower(model, stores="f32")
    assert plan.whole
    with torch.inference_mode():
        exact = model(torch.tensor([ids]))[0].numpy()
    for level in (0, 2):
        found = NativeRunner(plan, threads=1, level=level).scores(ids)
        assert np.median(np.abs(found - exact).max(1)) < 4e-3 * np.abs(exact).max()


@pytest.mark.parametrize("name", FORMATS)
def test_plans_go_through_files(name: str) -> None:
    plan = lower(model_of(name))
    again = from_json(to_json(plan), plan.tensors)
    assert again.steps == plan.steps
    broken = to_json(plan)
    matrix = broken["steps"][1]["outputs"][0]["matrix"]
    matrix["group"] = 96
    with pytest.raises(Exception, match=r"groups of (its|their) own|bytes, not"):
        from_json(broken, plan.tensors)


def test_a_gpu_says_which_weight_it_cannot_hold() -> None:
    from orchard.ops.kernels.triton.weights import bring, widened

    plan = lower(model_of("p4"))
    matrix = plan.steps[1].outputs[0].matrix  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedPair, match=r"stack\.layers\.0\.mixer\.q\.weight: weights of the kind 'p4'"):
        bring(matrix, plan.tensors[matrix.tensor], torch.device("cpu"))
    halves = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float16).astype(np.float32)
    side = steps.Matrix(tensor="a", kind="f16", rows=20, cols=6)
    packed = pack_plain(halves, "f16")
    assert np.array_equal(bring(side, packed, torch.device("cpu")).data.numpy(), halves)
    wide = widened(side, packed, 3, 10, torch.device("cpu")).data.numpy()
    assert np.array_equal(wide[:, 3:9], halves) and not wide[:, :3].any() and not wide[:, 9:].any()
