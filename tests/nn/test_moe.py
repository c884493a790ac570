"""Mixtures of experts against a loop over tokens, and the balance loss at its known points."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.linear import GroupedLinear
from orchard.nn.mlp import ACTIVATIONS, GatedMLP
from orchard.nn.moe import Experts, MoE, Own, Routing, SharedMLP, TopK
from tests.matrix import axes

DIM, HIDDEN, EXPERTS = 8, 16, 4


def mixture(k: int = 2, renormalize: bool = True, **fields: Any) -> MoE:
    torch.manual_seed(k)
    router = TopK.Config(k=k, renormalize=renormalize)
    module: MoE = MoE.Config(dim=DIM, hidden_dim=HIDDEN, experts=EXPERTS, router=router, **fields).build()
    module.router.gate.assign(torch.randn(EXPERTS, DIM))
    for part in (module.gate, module.up, module.down):
        part.assign(torch.randn(part.shape) * 0.4)
    return module


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.no_grad()
def test_a_mixture_is_a_loop_over_tokens_and_experts(k: int, renormalize: bool, activation: str) -> None:
    module = mixture(k, renormalize, activation=activation)
    x = torch.randn(2, 5, DIM)
    y = module(x, Context.whole(x[..., 0]))
    gate, up, down = (part.dense() for part in (module.gate, module.up, module.down))
    for b in range(2):
        for t in range(5):
            chances = (module.router.gate.dense() @ x[b, t]).softmax(0)
            best = sorted(range(EXPERTS), key=lambda e: -float(chances[e]))[:k]
            total = sum(float(chances[e]) for e in best) if renormalize else 1.0
            want = torch.zeros(DIM)
            for e in best:
                hidden = ACTIVATIONS[activation](gate[e] @ x[b, t]) * (up[e] @ x[b, t])
                want += float(chances[e]) / total * (down[e] @ hidden)
            torch.testing.assert_close(y[b, t], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", axes.formats())
@torch.no_grad()
def test_experts_live_in_any_format(name: str) -> None:
    part = GroupedLinear.Config(format=axes.formats()[name])
    module, plain = mixture(gate=part, up=part, down=part), mixture()
    for key in ("gate", "up", "down"):
        getattr(plain, key).assign(getattr(module, key).dense())
    x = torch.randn(1, 6, DIM)
    torch.testing.assert_close(module(x, Context.whole(x[..., 0])), plain(x, Context.whole(x[..., 0])))


@torch.no_grad()
def test_an_expert_that_nobody_chooses_is_no_problem() -> None:
    module = mixture(k=1)
    module.router.gate.assign(torch.zeros(EXPERTS, DIM).index_fill_(0, torch.tensor([2]), 1.0))
    x = torch.rand(1, 3, DIM)  # positive, so expert 2 always wins
    y = module(x, Context.whole(x[..., 0]))
    hidden = torch.nn.functional.silu(x @ module.gate.dense()[2].T) * (x @ module.up.dense()[2].T)
    torch.testing.assert_close(y, hidden @ module.down.dense()[2].T, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_one_expert_is_a_gated_mlp() -> None:
    one = MoE.Config(dim=DIM, hidden_dim=HIDDEN, experts=1, router=TopK.Config(k=1)).build()
    mlp = GatedMLP.Config(dim=DIM, hidden_dim=HIDDEN).build()
    for key in ("gate", "up", "down"):
        getattr(mlp, key).assign(getattr(one, key).dense()[0])
    x = torch.randn(2, 3, DIM)
    context = Context.whole(x[..., 0])
    torch.testing.assert_close(one(x, context), mlp(x, context))


@torch.no_grad()
def balance(module: MoE, x: torch.Tensor) -> float:
    return float(balance_of(module, x))


def balance_of(module: MoE, x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    context = Context.whole(x[..., 0], valid)
    module(x, context)
    (value,) = context.collected["moe.balance"]
    return value


@pytest.mark.parametrize("k", [1, 2, 4])
def test_balance_is_one_when_all_experts_share_equally(k: int) -> None:
    module = mixture(k)
    module.router.gate.assign(torch.eye(EXPERTS, DIM) * 3)
    ring = torch.stack([torch.eye(DIM)[e] + 0.1 * torch.eye(DIM)[(e + 1) % EXPERTS] for e in range(EXPERTS)])
    assert balance(module, ring[None]) == pytest.approx(1.0, abs=1e-5)


def test_balance_is_one_for_a_router_that_knows_nothing() -> None:
    module = mixture(2)
    module.router.gate.assign(torch.zeros(EXPERTS, DIM))
    assert balance(module, torch.randn(1, 7, DIM)) == pytest.approx(1.0, abs=1e-5)


def test_balance_is_the_number_of_experts_over_k_when_all_choose_alike() -> None:
    module = mixture(1)
    module.router.gate.assign(torch.zeros(EXPERTS, DIM).index_fill_(0, torch.tensor([2]), 50.0))
    assert balance(module, torch.rand(1, 5, DIM) + 0.1) == pytest.approx(EXPERTS, abs=1e-3)


def test_padding_does_not_count_and_the_router_learns_from_the_balance() -> None:
    module, x = mixture(2), torch.randn(1, 1, DIM) + 0.01 * torch.randn(1, 6, DIM)  # alike, so that loads are not even
    valid = torch.tensor([[True, True, True, True, False, False]])
    value = balance_of(module, x, valid)
    assert float(value.detach()) == pytest.approx(balance(module, x[:, :4]), abs=1e-6)
    value.backward()
    assert module.router.gate.weight.grad.abs().sum() > 0


class Elsewhere(Experts):
    """Experts that remember what they were asked for, and leave the first expert out."""

    def __init__(self, inner: Experts) -> None:
        self.inner, self.asked = inner, list[torch.Tensor]()

    def choose(self, routing: Routing, context: Context) -> Routing:
        return replace(routing, weights=routing.weights.masked_fill(routing.experts == 0, 0.0))

    def run(self, tokens: torch.Tensor, counts: torch.Tensor, context: Context) -> torch.Tensor:
        self.asked.append(counts)
        return self.inner.run(tokens, counts, context)


@torch.no_grad()
def test_experts_may_live_elsewhere_and_come_back() -> None:
    module, x = mixture(2), torch.randn(2, 5, DIM)
    context = Context.whole(x[..., 0])
    whole = module(x, context)
    module.experts = elsewhere = Elsewhere(module.experts)
    without = module(x, context)
    assert [int(counts.sum()) for counts in elsewhere.asked] == [20]
    met = (module.router(x).experts == 0).any(-1).view(2, 5)
    assert 0 < int(met.sum()) < 10
    assert torch.equal(without[~met], whole[~met]) and not torch.isclose(without[met], whole[met]).all(-1).any()
    assert copy.deepcopy(module).experts.asked, "a copy is as its original was"
    module.experts = None
    assert torch.equal(module(x, context), whole)


@pytest.mark.parametrize("kind", [GatedMLP, SharedMLP])
@torch.no_grad()
def test_what_is_shared_meets_every_token(kind: type[GatedMLP]) -> None:
    module, plain, x = mixture(2, shared=kind.Config(hidden_dim=12)), mixture(2), torch.randn(2, 5, DIM)
    context = Context.whole(x[..., 0])
    for key in ("gate", "up", "down"):
        getattr(plain, key).assign(getattr(module, key).dense())
        part = getattr(module.shared, key)
        part.assign(torch.randn(part.shape))
    plain.router.gate.assign(module.router.gate.dense())
    gate, up, down = (getattr(module.shared, key).dense() for key in ("gate", "up", "down"))
    beside = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    if kind is SharedMLP:
        module.shared.weigh.assign(torch.randn(1, DIM))
        beside = beside / (1 + (-(x @ module.shared.weigh.dense().T)).exp())
    torch.testing.assert_close(module(x, context), plain(x, context) + beside, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["plain", "packed", "hooked"])
def test_all_experts_at_once_are_the_loop(name: str) -> None:
    part = GroupedLinear.Config(format=axes.formats()["Int8.groups"]) if name == "packed" else GroupedLinear.Config()
    module, x = mixture(2, gate=part, up=part, down=part), torch.randn(1, 30, DIM)
    calls = []
    if name == "hooked":
        module.up.register_forward_hook(lambda _, args, out: calls.append(args[1]))
    own, pairs = module.experts, module.router(x).pairs()
    assert isinstance(own, Own)
    tokens = x.flatten(0, 1)[pairs.source]
    got, want = own.run(tokens, pairs.counts, Context.whole(x[..., 0])), own.loop(tokens, pairs.counts)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert calls == ([0, 1, 2, 3] * 2 if name == "hooked" else [])  # who looks on sees every expert


@torch.no_grad()
def test_a_token_becomes_the_same_alone_and_in_a_batch() -> None:
    module, x = mixture(2), torch.randn(3, 7, DIM)
    whole = module(x, Context.whole(x[..., 0]))
    for row, token in ((0, 0), (1, 4), (2, 6)):
        one = x[row : row + 1, token : token + 1]
        torch.testing.assert_close(
            module(one, Context.whole(one[..., 0]))[0, 0], whole[row, token], atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize("k", [0, 5, -1])
def test_an_impossible_choice_is_refused(k: int) -> None:
    with pytest.raises(ConfigError, match="cannot be chosen"):
        MoE.Config(dim=DIM, hidden_dim=HIDDEN, experts=4, router=TopK.Config(k=k)).complete()


def test_an_mlp_becomes_a_mixture_by_derivation_and_keeps_its_formats() -> None:
    int8 = axes.formats()["Int8.groups"]
    mlp = GatedMLP.Config(hidden_dim=HIDDEN, activation="gelu").set("gate.format", int8)
    cfg = mlp.derive(MoE, experts=3, dim=DIM).complete()
    assert isinstance(cfg.gate, GroupedLinear.Config) and cfg.gate.format == int8 and cfg.activation == "gelu"
    assert cfg.down.count == 3 and cfg.down.out_dim == DIM
    x = torch.randn(1, 2, DIM)
    assert cfg.build()(x, Context.whole(x[..., 0])).shape == x.shape


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        GatedMLP.Config(dim=2, hidden_dim=2, activation="sulu").build()
    assert "silu" in caught.value.hint


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gated_mlp_is_its_formula(activation: str) -> None:
    torch.manual_seed(0)
    mlp = GatedMLP.Config(dim=DIM, hidden_dim=HIDDEN, activation=activation).build()
    x = torch.randn(1, 3, DIM)
    gate, up, down = (part.dense() for part in (mlp.gate, mlp.up, mlp.down))
    for t in range(3):
        want = down @ (ACTIVATIONS[activation](gate @ x[0, t]) * (up @ x[0, t]))
        torch.testing.assert_close(mlp(x, Context.whole(x[..., 0]))[0, t], want, atol=1e-6, rtol=1e-5)
