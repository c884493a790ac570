"""Upcycling: a dense model becomes a mixture that begins as what it was, and learns from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.formats import Int8
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.recipes.compressing.plan import BadPlan, read_plan
from orchard.transforms.rtn import Rtn
from orchard.transforms.upcycle import Upcycle
from tests.transforms.ptq_models import HIDDEN, rows, tree


def model(layers: int = 3, kind: str = "llama") -> Any:
    torch.manual_seed(1)
    made = tree(kind, layers).build()
    for weight in made.parameters():
        weight.data.mul_(2)  # so that MLPs have something to say
    return made


@torch.no_grad()
def away(one: Any, other: Any) -> float:
    ids = rows(3, 12).to("cpu").ids
    return float((one(ids) - other(ids)).abs().max())


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("layers", ["all", "second", (2,)])
@pytest.mark.parametrize("shared", [0.0, 0.5])
def test_copies_say_what_the_dense_model_said(k: int, layers: str | Sequence[int], shared: float) -> None:
    dense = model()
    mixed = Upcycle(experts=4, k=k, layers=layers, shared=shared).apply(dense)
    mixtures = [i for i, block in enumerate(mixed.stack.layers) if isinstance(block.mlp, MoE)]
    assert mixtures == {"all": [0, 1, 2], "second": [1]}.get(layers if isinstance(layers, str) else "", [2])
    assert away(mixed, dense) < 1e-5
    assert mixed.config == Upcycle(experts=4, k=k, layers=layers, shared=shared)(dense.config)


@pytest.mark.parametrize(("experts", "k", "parts"), [(8, 2, 2), (8, 4, 4), (8, 8, 4), (12, 8, 4), (16, 16, 16)])
def test_slices_say_it_too_where_whole_copies_are_chosen(experts: int, k: int, parts: int) -> None:
    dense = model(1)
    mixed = Upcycle(experts=experts, k=k, parts=parts).apply(dense)
    mlp: Any = mixed.stack.layers[0].mlp
    assert mlp.gate.shape == (experts, HIDDEN // parts, 64) and mlp.down.shape == (experts, 64, HIDDEN // parts)
    assert away(mixed, dense) < 2e-5
    half = Upcycle(experts=experts, k=k, parts=parts, shared=0.25).apply(dense)
    assert away(half, dense) < 2e-5


def test_a_copy_in_part_is_not_the_whole() -> None:
    dense = model(1)
    assert away(Upcycle(experts=8, k=3, parts=2).apply(dense), dense) > 1e-3  # so that the tests above can fail


def test_noise_takes_experts_apart_and_the_seed_says_how() -> None:
    dense = model(2)
    before = {name: weight.clone() for name, weight in dense.state_dict().items()}
    noisy = Upcycle(experts=4, noise=0.05).apply(dense)
    assert 1e-4 < away(noisy, dense) < 1.0
    gate, spread = (
        noisy.stack.layers[0].mlp.gate.dense().detach(),
        dense.stack.layers[0].mlp.gate.dense().detach().std(),
    )
    assert float((gate[0] - gate[1]).std()) == pytest.approx(0.05 * 2**0.5 * float(spread), rel=0.1)
    again, other = (Upcycle(experts=4, noise=0.05, seed=seed).apply(dense) for seed in (0, 1))
    assert away(noisy, again) == 0 < away(noisy, other)
    assert all(torch.equal(weight, before[name]) for name, weight in dense.state_dict().items()), "it stays as it was"


def test_a_mixture_learns_from_where_it_begins() -> None:
    mixed = Upcycle(experts=4, k=2, noise=0.01).apply(model(2))
    optimiser = torch.optim.Adam(mixed.parameters(), lr=3e-3)
    losses = []
    for step in range(8):
        batch = rows(8, 16, seed=step).to("cpu")
        context = Context.whole(batch.ids)
        scores = mixed.scores(mixed.hidden(batch.ids, context))[:, :-1]
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch.ids[:, 1:].flatten())
        (loss + 0.01 * sum(context.collected["moe.balance"]) + 0.001 * sum(context.collected["moe.z"])).backward()
        optimiser.step()
        if step == 0:
            routers = [block.mlp.router.gate.weight.grad for block in mixed.stack.layers]
            assert all(float(slope.abs().sum()) > 0 for slope in routers)
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    gate = mixed.stack.layers[0].mlp.gate.weight
    assert not torch.allclose(gate[0], gate[1], atol=1e-3)


def test_what_was_not_trained_is_not_trained_afterwards() -> None:
    dense = model(2)
    dense.embedding.weight.requires_grad_(False)
    mixed = Upcycle(layers=(0,)).apply(dense)
    assert not mixed.embedding.weight.requires_grad and mixed.stack.layers[0].mlp.gate.weight.requires_grad


def test_bfloat16_stays_bfloat16() -> None:
    dense = model(1).bfloat16()
    mixed = Upcycle(experts=2, k=1, noise=0.01, shared=0.5).apply(dense)
    assert {weight.dtype for weight in mixed.parameters()} == {torch.bfloat16}
    assert torch.isfinite(mixed(rows(2, 5).to("cpu").ids)).all()


def test_packing_comes_afterwards() -> None:
    dense = model(1)
    packed = Rtn(bits=8, group=32).apply(Upcycle(experts=2, k=1).apply(dense))
    assert isinstance(packed.stack.layers[0].mlp.gate.format, Int8) and away(packed, dense) < 0.1
    with pytest.raises(UnsupportedPair, match="packed") as caught:
        Upcycle().apply(Rtn(bits=8, group=32).apply(dense))
    assert "afterwards" in caught.value.hint


@pytest.mark.parametrize(
    "settings",
    [
        {"experts": 1, "k": 1},
        {"experts": 4, "k": 5},
        {"k": 0},
        {"experts": 6, "parts": 4},
        {"parts": 0},
        {"shared": 1.0},
        {"shared": -0.1},
        {"noise": -1.0},
        {"noise": float("nan")},
        {"layers": "odd"},
    ],
)
def test_settings_that_make_no_mixture_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Upcycle(**settings)


def test_layers_that_cannot_become_mixtures_are_refused_by_name() -> None:
    for layers in ((3,), (-1,), ()):
        with pytest.raises(ConfigError, match="layer"):
            Upcycle(layers=layers)(tree(layers=3).complete())
    with pytest.raises(ConfigError, match="slices"):
        Upcycle(experts=6, parts=3)(tree().complete())
    with pytest.raises(UnsupportedPair, match=r"stack\.layers\[0\]\.mlp is a MoE"):
        Upcycle()(tree("moe").complete())
    biased = tree().rewrite(GatedMLP, lambda mlp: mlp.clone(down=Linear.Config(bias=True)))
    with pytest.raises(UnsupportedPair, match="bias"):
        Upcycle()(biased.complete())


def test_a_plan_names_it() -> None:
    (step,) = read_plan(["upcycle:experts=4,k=2,layers=second,noise=0.02"]).steps
    assert step.transform == Upcycle(experts=4, k=2, layers="second", noise=0.02) and step.lessons is not None
    with pytest.raises(BadPlan, match="experts"):
        read_plan(["upcycle:experts=4,k=9"])
