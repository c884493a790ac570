"""LoRA with every weight format, mixer and MLP: identical at first, trained where it should be, and lowered alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchard.generate.lowering import lower
from orchard.models.language import Decoder
from orchard.nn.linear import Embedding, GroupedLinear, Linear
from orchard.nn.stack import Block, Stack
from orchard.ops.plan.adapt import adapted
from orchard.ops.plan.reference import Reference
from orchard.transforms.lora import Lora, freeze_base, sides_of, with_sides
from tests.matrix import axes

IDS = [3, 7, 1, 9, 22, 14, 5]
FORMATS, MIXERS, MLPS = axes.formats(), axes.mixers(), axes.mlps()
# Every format with every MLP, and every mixer once: side paths meet the mixers only in their linear maps.
CASES = [(packed, "Attention.attention", mlp) for packed in FORMATS for mlp in MLPS]
CASES += [("Plain", mixer, "GatedMLP.gated") for mixer in MIXERS]


def model_of(packed: str, mixer: str, mlp: str) -> Decoder:
    torch.manual_seed(0)
    layers = [Block.Config(mixer=MIXERS[mixer].clone(), mlp=MLPS[mlp].clone()) for _ in range(2)]
    cfg: Any = Decoder.Config(vocab=23, dim=axes.DIM, context=32, stack=Stack.Config(layers=layers), head=None)
    for kind in (Linear, GroupedLinear):  # a plan needs a native table
        if cfg.find(kind):
            cfg = cfg.rewrite(kind, lambda node: node.clone(format=FORMATS[packed]))
    model: Decoder = cfg.build().eval()
    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear | Embedding):
            module.assign(torch.randn(module.shape) * 0.35)
    return model


@torch.no_grad()
def scores(model: Decoder) -> torch.Tensor:
    return model(torch.tensor([IDS]))[0]


@pytest.mark.parametrize(("packed", "mixer", "mlp"), CASES)
def test_lora_composes(packed: str, mixer: str, mlp: str) -> None:
    model = model_of(packed, mixer, mlp)
    twin = Lora(r=3, alpha=4).attach(model)
    assert torch.equal(scores(twin), scores(model))
    trained = freeze_base(twin)
    with torch.no_grad():
        for parameter in trained:
            parameter.normal_(std=0.3)
    twin(torch.tensor([IDS])).square().sum().backward()
    assert trained and all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in trained)
    want = scores(twin)
    assert (want - scores(model)).abs().max() > 1e-2
    sides = {path: [side] for path, side in sides_of(twin).items()}
    assert torch.allclose(scores(with_sides(model, sides)), want, atol=1e-5)
    plan = lower(model, stores="f32")
    if plan.whole:  # a format of narrow groups runs in torch
        count = len(IDS)
        for made in (adapted(plan, sides, kind="f32"), lower(twin, stores="f32")):
            got = Reference(made, 1, count).run(IDS, [0] * count, range(count), range(count))
            assert np.abs(got - want.numpy()).max() < 1e-3


def test_some_cases_lower() -> None:
    assert lower(model_of("Plain", "Attention.attention", "GatedMLP.gated")).whole
