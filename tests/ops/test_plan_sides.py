"""Side paths that belong to a model's tree (recovery): one first half for all maps of a value, and torch's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.store import Store
from orchard.core.errors import BadFile
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.formats import Int2
from orchard.nn.formats.palette import Palette
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.ops.kernels.native import library, why_not
from orchard.ops.kernels.packing import matrix_bytes
from orchard.ops.plan import steps
from orchard.ops.plan.adapt import adapted
from orchard.ops.plan.check import check
from orchard.ops.plan.early import early_plan
from orchard.ops.plan.file import from_json, to_json
from orchard.ops.plan.reference import Reference
from orchard.transforms.lora import Lora, LoraLinear

DIM, IDS = 64, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def made(r: int = 8, format: Any = None, half: bool = True, alpha: float | None = None, targets: Any = None) -> Decoder:
    torch.manual_seed(1)
    layers = [
        Block.Config(
            mixer=Attention.Config(heads=4, kv_heads=2, head_dim=16, store=Store.Config(owner=owner)),
            mlp=GatedMLP.Config(hidden_dim=96),
        )
        for owner in (None, None, 1)
    ]
    tree = Decoder.Config(vocab=64, dim=DIM, context=512, stack=Stack.Config(layers=layers), head=None).complete()
    if format is not None:
        tree = tree.rewrite(Linear, lambda node: node.clone(format=format), lambda *_: True)
    model: Decoder = tree.build().eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Linear):
            module.assign(torch.randn(module.shape) * 0.2)
    sides = Lora(r=r, alpha=alpha or 2.0 * r, **({} if targets is None else {"targets": targets})).attach(model)
    for module in sides.modules():
        if isinstance(module, LoraLinear):
            for name in ("lora_a", "lora_b"):
                values = torch.randn_like(getattr(module, name)) * 0.1
                setattr(module, name, torch.nn.Parameter(values.half() if half else values, requires_grad=False))
    return sides.eval()


def expected(model: Decoder) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([IDS]))[0].float().numpy()


def run(plan: steps.Plan) -> np.ndarray:
    count = len(IDS)
    return Reference(plan, 1, count).run(IDS, [0] * count, range(count), range(count))


def close(found: np.ndarray, exact: np.ndarray, bound: float) -> bool:
    return bool(np.abs(found - exact).max() < bound * np.abs(exact).max())


def test_maps_of_one_value_share_the_first_half() -> None:
    plan = lower(made(r=8), stores="f32")
    layer = ["linear", "linear", "attend", "linear", "linear", "linear", "linear", "gate", "linear", "linear"]
    assert [step.kind for step in plan.steps[1:11]] == layer
    q_k_v, seconds, _, o, _, gate_up = (step for step in plan.steps[1:7])
    assert isinstance(q_k_v, steps.Linear) and isinstance(seconds, steps.Linear) and isinstance(o, steps.Linear)
    names = [output.matrix.tensor.removeprefix("stack.layers.0.mixer.") for output in q_k_v.outputs]
    assert names == ["q.weight", "q.lora.shared.a.weight", "k.weight", "v.weight"]
    assert q_k_v.norm is not None and q_k_v.outputs[1].matrix.rows == 24
    assert [(output.begin, output.width, output.matrix.cols, output.add) for output in seconds.outputs] == [
        *((0, 24, 8, True), (8, 24, 8, True), (16, 24, 8, True))
    ]
    assert [output.matrix.kind for output in (*seconds.outputs, *o.outputs[1:])] == ["f16"] * 4
    assert isinstance(gate_up, steps.Linear) and gate_up.outputs[1].matrix.rows == 16
    borrowed = plan.steps[-11]
    assert isinstance(borrowed, steps.Linear) and borrowed.outputs[1].matrix.rows == 8  # no keys and values of its own
    assert close(run(plan), expected(made(r=8)), 1e-4)


def test_bytes_are_those_of_half_precision() -> None:
    """No zeros for the others' ranks, and 16 rows rather than 32 for few."""
    plan = lower(made(r=16))
    sides = {name: len(value) for name, value in plan.tensors.items() if ".lora." in name and "layers.0." in name}
    widths = {
        "q": (DIM, 64),
        "k": (DIM, 32),
        "v": (DIM, 32),
        "o": (64, DIM),
        "gate": (DIM, 96),
        "up": (DIM, 96),
        "down": (96, DIM),
    }
    assert sum(sides.values()) == sum(2 * 16 * (cols + rows) for cols, rows in widths.values())
    assert matrix_bytes("f16", 16, 100) == 3200 and matrix_bytes("f16", 17, 100) == 6400 == matrix_bytes("f16", 32, 100)


@pytest.mark.parametrize("change", ["float32", "odd scale", "some", "int2", "palette"])
def test_whatever_they_go_beside(change: str) -> None:
    options: dict[str, Any] = {
        "float32": {"half": False},
        "odd scale": {"alpha": 5.0},
        "some": {"targets": ("q", "v", "up", "down")},
        "int2": {"format": Int2.Config(group=32)},
        "palette": {"format": Palette.Config(bits=4)},
    }[change]
    model = made(**options)
    plan = lower(model, stores="f32")
    kinds = {output.matrix.kind for step in plan.steps if isinstance(step, steps.Linear) for output in step.outputs}
    assert kinds >= {"float32": {"f32"}, "int2": {"q2", "f16"}, "palette": {"p4", "f16"}}.get(change, {"f16"})
    assert close(run(plan), expected(model), 1e-4)
    assert close(run(lower(model, stores="f32", fused=False)), expected(model), 1e-4)


@pytest.mark.skipif(library() is None, reason=why_not())
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("format", [None, Int2.Config(group=32)])
def test_natively(format: Any, level: int) -> None:
    model = made(r=5, format=format)
    native = NativeRunner(lower(model, stores="f32"), threads=2, level=level)
    bound = 0.03 if level == 3 else 5e-3 if format is not None else 1e-4
    assert close(native.scores(IDS), expected(model), bound)
    alone = native.begin([IDS[:4]], length=32)
    alone.read(0, 4)
    whole = native.begin([IDS[:4], IDS[2:5]], length=32)
    whole.read(0, 1)
    whole.read(1, 4)
    assert np.array_equal(alone.first()[0], whole.first()[0])
    for token in IDS[4:]:
        assert np.array_equal(alone.step([token])[0], whole.step([token, 7])[0])


def test_adapters_go_on_top() -> None:
    model = made(r=8)
    plan, random = lower(model, stores="f32"), np.random.default_rng(0)
    side = (random.normal(size=(4, DIM)).astype(np.float32), random.normal(size=(64, 4)).astype(np.float32) * 0.2, 0.5)
    top = adapted(plan, {"stack.layers.0.mixer.q": [side]}, kind="f32")
    twin = made(r=8)
    q: Any = twin.stack.layers[0].mixer.q
    q.assign(q.dense() + torch.from_numpy(side[1] @ side[0] * side[2]))
    assert close(run(top), expected(twin), 1e-4) and not close(run(plan), expected(twin), 1e-2)
    check(early_plan(top, 2))


def test_files_and_faults() -> None:
    plan = lower(made())
    assert from_json(to_json(plan), plan.tensors).steps == plan.steps
    assert "begin" not in str(to_json(lower(made(targets=("o",)))))
    place, step = next(
        (at, step) for at, step in enumerate(plan.steps) if getattr(step, "outputs", [0])[0] and _parted(step)
    )
    for fault in ({"begin": 17}, {"begin": -1}, {"width": 23}, {"begin": None}):
        outputs = (replace(step.outputs[0], **fault), *step.outputs[1:])  # type: ignore[attr-defined]
        changed = replace(plan, steps=[*plan.steps[:place], replace(step, outputs=outputs), *plan.steps[place + 1 :]])  # type: ignore[type-var]
        with pytest.raises(BadFile, match="damaged plan"):
            check(changed)


def _parted(step: Any) -> bool:
    return isinstance(step, steps.Linear) and step.outputs[0].begin is not None


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.lists(st.sampled_from("qkvo"), min_size=1, max_size=4, unique=True), st.booleans())
def test_any_ranks(r: int, names: list[str], half: bool) -> None:
    model = made(r=r, targets=tuple(names), half=half)
    assert close(run(lower(model, stores="f32")), expected(model), 1e-4)
