"""DoRA in training: it begins as the base, its lengths train, and what it computes is what the paper's formula says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.formats import Int2, Int4, Int8, Plain
from orchard.nn.linear import Linear
from orchard.transforms.lora import Lora, LoraLinear, freeze_base, magnitudes_of, sides_of, with_sides
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from orchard.weights.stored import as_stored
from tests.tiny import tiny_gguf
from tests.transforms.test_lora import IDS, built, scores, tree

FORMATS: dict[str, Any] = {
    "plain": Plain.Config(),
    "int8": Int8.Config(group=8),
    "int4": Int4.Config(group=8, minimum=True),
    "int2": Int2.Config(group=8),
}


def stirred(module: torch.nn.Module, seed: int = 3) -> Any:
    """Trained a little, as it were."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.3)
            if name.endswith("lora_magnitude"):
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
    return module


def by_definition(module: LoraLinear, x: torch.Tensor) -> torch.Tensor:
    """The same by the formula, with the whole matrix, and the length of its rows as if it were a constant."""
    whole = module.dense() + module.scale * module.lora_b @ module.lora_a
    weight = module.lora_magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True).detach()
    return torch.nn.functional.linear(x, weight, module.bias)


def adapted_map(format: str, bias: bool = False, **more: Any) -> LoraLinear:
    torch.manual_seed(0)
    linear: Linear = Linear.Config(in_dim=16, out_dim=12, bias=bias, format=FORMATS[format]).build()
    linear.assign(torch.randn(12, 16))
    if bias:
        torch.nn.init.normal_(linear.bias)  # type: ignore[arg-type]
    return LoraLinear.around(linear, 4, 6, dora=True, **more)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rslora", [False, True])
def test_values_and_gradients_are_those_of_the_formula(format: str, rslora: bool) -> None:
    module = stirred(adapted_map(format, bias=True, rslora=rslora))
    freeze_base(module)
    x = torch.randn(2, 5, 16, requires_grad=True)
    wanted = (x, module.lora_a, module.lora_b, module.lora_magnitude)
    got, want = module(x), by_definition(module, x)
    assert torch.allclose(got, want, atol=1e-5)
    toward = torch.randn_like(got)
    for mine, theirs in zip(torch.autograd.grad(got, wanted, toward), torch.autograd.grad(want, wanted, toward)):
        assert torch.allclose(mine, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_it_begins_as_the_base_bit_for_bit(format: str) -> None:
    cfg = tree().rewrite(Linear, lambda node: node.clone(format=FORMATS[format]))
    model = built(cfg)
    twin = Lora(r=4, dora=True).attach(model)
    assert torch.equal(scores(twin), scores(model)) and torch.equal(scores(twin.train()), scores(model))
    lengths = magnitudes_of(twin)["stack.layers.0.mixer.q"]
    assert np.allclose(lengths, model.stack.layers[0].mixer.q.dense().detach().norm(dim=1), rtol=1e-6)
    assert all(dict(twin.named_parameters())[name] is value for name, value in model.named_parameters())


def test_a_tree_builds_it_and_other_weights_begin_it_again() -> None:
    plain, cfg = built(tree()), Lora(r=4, dora=True)(tree())
    assert BaseConfig.from_dict(cfg.to_dict()) == cfg
    model = built(cfg)  # whose weights were changed after its lengths were measured
    model.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(scores(model), scores(plain))
    stirred(model)
    again = built(cfg)
    again.load_state_dict(model.state_dict())
    assert torch.equal(scores(again), scores(model)) and not torch.equal(scores(model), scores(plain))
    q = model.stack.layers[0].mixer.q
    q.assign(torch.randn(q.shape))
    assert torch.allclose(q.lora_magnitude, q.dense().norm(dim=1))
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in cfg.build().parameters())


def test_a_checkpoint_loads_with_it(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    with open_checkpoint(path) as checkpoint:
        base = as_stored(checkpoint, checkpoint.config())
        plain = load_decoder(checkpoint, base)
        adapted = load_decoder(checkpoint, Lora(r=2, dora=True)(base))
        short = load_decoder(checkpoint, Lora(r=2, dora=True)(checkpoint.config()), dtype=torch.bfloat16)
        shorter = load_decoder(checkpoint, dtype=torch.bfloat16)
    ids = torch.arange(6)[None] % plain.config.vocab
    with torch.no_grad():
        assert torch.equal(plain(ids), adapted(ids)) and torch.equal(short(ids), shorter(ids))


def test_lengths_train_with_the_rest_and_the_base_does_not() -> None:
    model = built(tree())
    weights = {name: value.clone() for name, value in model.named_parameters()}
    twin = Lora(r=4, alpha=8, dora=True, dropout=0.1).attach(model).train()
    trained = freeze_base(twin)
    maps = [module for module in twin.modules() if isinstance(module, LoraLinear)]
    assert sum(value.numel() for value in trained) == sum(4 * sum(m.shape) + m.shape[0] for m in maps)
    before = {path: value.copy() for path, value in magnitudes_of(twin).items()}
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(twin(IDS)[0], torch.arange(1, 9))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(not np.allclose(value, before[path]) for path, value in magnitudes_of(twin).items())
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())
    twin.eval()
    again = with_sides(model, {path: [side] for path, side in sides_of(twin).items()}, None, magnitudes_of(twin))
    assert torch.allclose(scores(again), scores(twin), atol=1e-5)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(FORMATS)), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_lengths_without_the_sum_are_those_of_the_sum(seed: int, format: str, weight: float, side: float) -> None:
    module = adapted_map(format)
    torch.manual_seed(seed)
    module.assign(torch.randn(12, 16) * weight)
    with torch.no_grad():
        module.lora_b.normal_(std=side)
    whole = module.dense().double() + module.scale * (module.lora_b.double() @ module.lora_a.double())
    size = module.dense().double().norm(dim=1) + (whole - module.dense()).norm(dim=1)
    assert bool(((module.lengths() - whole.norm(dim=1)).abs() <= 1e-3 * size).all())


def test_what_is_remembered_is_forgotten_in_time() -> None:
    """Outside training lengths are measured once, until anything they are made of changes."""
    module = stirred(adapted_map("plain")).eval()
    x = torch.randn(3, 16)

    def right() -> bool:
        with torch.no_grad():
            return torch.allclose(module(x), by_definition(module, x), atol=1e-5)

    first = module.lengths()
    assert right() and module.lengths() is first
    with torch.no_grad():
        module.lora_b.mul_(2)
    assert right() and module.lengths() is not first
    with torch.no_grad():
        module.lora_a.add_(0.1)
        module.weight.mul_(0.5)
    assert right()
    module.lora_b = torch.nn.Parameter(torch.randn(12, 4))
    assert right()
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.lora_b.mul_(3)
    assert right() and torch.allclose(other(x), by_definition(other, x), atol=1e-5)
    module.train()
    module.lora_b.data = module.lora_b.data * 4  # nothing tells of this one
    module.eval()
    assert right()
    module.double()
    x = x.double()
    assert right()


def test_a_row_of_zeros_stays_one_and_is_no_division_by_zero() -> None:
    module = adapted_map("plain")
    weight = module.dense().detach().clone()
    weight[3] = 0
    module.assign(weight)
    freeze_base(module)
    y = module(torch.randn(4, 16))
    y.sum().backward()
    assert torch.equal(y[:, 3], torch.zeros(4))
    assert all(bool(p.grad.isfinite().all()) for p in (module.lora_a, module.lora_b, module.lora_magnitude))  # type: ignore[union-attr]


@torch.no_grad()
def test_a_gain_is_not_rounded_to_bfloat16() -> None:
    module = adapted_map("plain")
    x = torch.randn(200, 16)
    with torch.autocast("cpu", torch.bfloat16):
        before = module(x)
        module.lora_magnitude.mul_(1.01)  # as bfloat16 this is 1.0078
        after = module(x)
    assert before.dtype == after.dtype == torch.bfloat16
    assert abs(float((after.float() / before.float()).nanmean()) - 1.01) < 1e-3


def test_several_side_paths_are_refused_by_name() -> None:
    model = built(tree())
    twin = stirred(Lora(r=2, dora=True, targets="q").attach(model))
    sides, lengths = sides_of(twin), magnitudes_of(twin)
    path = "stack.layers.0.mixer.q"
    with pytest.raises(UnsupportedPair, match=rf"{path}.*DoRA"):
        with_sides(model, {path: [sides[path]] * 2}, None, {path: lengths[path]})
    with pytest.raises(UnsupportedPair, match=rf"{path}.*DoRA"):
        with_sides(twin, {path: [sides[path]]})
    with pytest.raises(ConfigError, match=rf"{path}.*without"):
        with_sides(model, {}, None, {path: lengths[path]})
    with pytest.raises(ConfigError, match=rf"{path}.*\(3,\)"):
        with_sides(model, {path: [sides[path]]}, None, {path: np.ones(3)})
    kept = with_sides(twin, {}, {path: [np.ones(32)]})  # a bias beside it changes nothing about it
    assert magnitudes_of(kept).keys() == lengths.keys()
