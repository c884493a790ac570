"""Routers that look at whole rows (experts that choose tokens, one decision an image), and what routers are trained with."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.config import BaseConfig, Config
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention import Attention
from orchard.nn.attention.bidirectional import BidirectionalAttention
from orchard.nn.moe import ExpertChoice, ImageLevel, MoE, Routing, TopK
from orchard.nn.stack import Block, Stack

DIM, HIDDEN, EXPERTS = 8, 16, 4


def mixture(router: BaseConfig, experts: int = EXPERTS) -> MoE:
    torch.manual_seed(0)
    module: MoE = MoE.Config(dim=DIM, hidden_dim=HIDDEN, experts=experts, router=router).build()
    module.router.gate.assign(torch.randn(experts, DIM))
    for part in (module.gate, module.up, module.down):
        part.assign(torch.randn(part.shape) * 0.4)
    return module


def one(module: MoE, expert: int, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (part.dense()[expert] for part in (module.gate, module.up, module.down))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def context(x: torch.Tensor, valid: torch.Tensor | None = None) -> Context:
    return Context.whole(x[..., 0], valid)


# Experts that choose --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.5, 1.0, 2.0, 4.0])
@torch.no_grad()
def test_each_expert_takes_its_best_tokens_of_each_row(capacity: float) -> None:
    module, x = mixture(ExpertChoice.Config(capacity=capacity)), torch.randn(3, 6, DIM)
    affinity = (x @ module.router.gate.dense().T).softmax(-1)
    want, takes = torch.zeros_like(x), math.ceil(6 * capacity / EXPERTS)
    for row in range(3):
        for expert in range(EXPERTS):
            for token in affinity[row, :, expert].argsort(descending=True)[:takes].tolist():
                want[row, token] += affinity[row, token, expert] * one(module, expert, x[row, token])
    torch.testing.assert_close(module(x, context(x)), want, atol=1e-5, rtol=1e-5)


@given(length=st.integers(1, 40), experts=st.integers(1, 9), share=st.floats(0.05, 1.0), rows=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_every_expert_has_the_same_load_and_none_takes_a_token_twice(
    length: int, experts: int, share: float, rows: int
) -> None:
    router = ExpertChoice.Config(dim=DIM, experts=experts, capacity=share * experts).build()
    routing = router(torch.randn(rows, length, DIM))
    counts = routing.pairs().counts
    assert len(counts) == experts and bool((counts == rows * router.takes(length)).all())
    assert 1 <= router.takes(length) <= length and router.takes(length) >= length * share - 1e-3
    for row in range(rows):
        for taken in routing.tokens[row].tolist():
            assert len(set(taken)) == len(taken)
            assert all(row * length <= token < (row + 1) * length for token in taken)
    assert bool((routing.weights > 0).all())  # without padding nothing is left out


@torch.no_grad()
def test_a_row_is_routed_the_same_alone_in_a_batch_and_with_padding() -> None:
    module, x = mixture(ExpertChoice.Config(capacity=1.5)), torch.randn(3, 10, DIM)
    alone = module(x[1:2, :7], context(x[1:2, :7]))
    valid = torch.arange(10) < torch.tensor([10, 7, 3])[:, None]
    batch = module(x, context(x, valid))
    torch.testing.assert_close(batch[1:2, :7], alone, atol=1e-6, rtol=1e-5)
    assert not batch[~valid].any(), "padding meets no expert"
    front = torch.cat([torch.randn(1, 3, DIM), x[1:2, :7]], 1)  # padding before the text
    before = module(front, context(front, torch.arange(10)[None] >= 3))
    torch.testing.assert_close(before[:, 3:], alone, atol=1e-6, rtol=1e-5)


def test_the_router_that_lets_experts_choose_learns_from_the_result() -> None:
    module, x = mixture(ExpertChoice.Config()), torch.randn(1, 8, DIM)
    step = context(x)
    module(x, step).sum().backward()
    assert module.router.gate.weight.grad.abs().sum() > 0
    assert "moe.balance" not in step.collected and len(step.collected["moe.z"]) == 1


@pytest.mark.parametrize("capacity", [0.0, -1.0, 4.5, math.nan])
def test_an_impossible_capacity_is_refused(capacity: float) -> None:
    with pytest.raises(ConfigError, match="on average"):
        ExpertChoice.Config(dim=DIM, experts=4, capacity=capacity).build()


# One decision a row ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("renormalize", [True, False])
@torch.no_grad()
def test_all_tokens_of_a_row_go_to_the_experts_of_its_mean(k: int, renormalize: bool) -> None:
    module, x = mixture(ImageLevel.Config(k=k, renormalize=renormalize)), torch.randn(3, 5, DIM)
    y = module(x, context(x))
    for row in range(3):
        chances = (module.router.gate.dense() @ x[row].mean(0)).softmax(0)
        best = chances.argsort(descending=True)[:k]
        total = chances[best].sum() if renormalize else 1.0
        want = sum(chances[e] / total * one(module, int(e), x[row]) for e in best)
        torch.testing.assert_close(y[row], want, atol=1e-5, rtol=1e-5)
    routing = module.router(x)
    assert all(len(set(routing.experts.view(3, 5, k)[row].flatten().tolist())) == k for row in range(3))


@torch.no_grad()
def test_padding_does_not_change_the_decision() -> None:
    module, x = mixture(ImageLevel.Config()), torch.randn(2, 6, DIM)
    valid = torch.arange(6) < torch.tensor([6, 4])[:, None]
    batch = module(x, context(x, valid))
    torch.testing.assert_close(batch[1:, :4], module(x[1:, :4], context(x[1:, :4])), atol=1e-6, rtol=1e-5)


def test_a_router_is_taught_groups() -> None:
    module, x = mixture(ImageLevel.Config(renormalize=True)), torch.randn(3, 5, DIM)
    step = context(x)
    step.labels = torch.tensor([2, -1, 0])
    module(x, step)
    (loss,) = step.collected["moe.router"]
    chances = (x.mean(1) @ module.router.gate.dense().T).log_softmax(-1)
    assert float(loss.detach()) == pytest.approx(-float((chances[0, 2] + chances[2, 0]).detach()) / 2, rel=1e-5)
    loss.backward()
    assert module.router.gate.weight.grad.abs().sum() > 0
    mixed = context(x)
    mixed.labels = torch.nn.functional.one_hot(torch.tensor([2, 1, 0]), EXPERTS).float()
    hard = context(x)
    hard.labels = torch.tensor([2, 1, 0])
    with torch.no_grad():
        module(x, mixed), module(x, hard)
    assert float(mixed.collected["moe.router"][0]) == pytest.approx(float(hard.collected["moe.router"][0]), rel=1e-5)


def test_nobody_is_taught_without_labels_and_unknown_groups_teach_nothing() -> None:
    module, x = mixture(ImageLevel.Config()), torch.randn(2, 3, DIM)
    step = context(x)
    module(x, step)
    assert "moe.router" not in step.collected
    step = context(x)
    step.labels = torch.tensor([-1, -1])
    module(x, step)
    assert float(step.collected["moe.router"][0].detach()) == 0
    step.labels = torch.tensor([1, 1, 1])
    with pytest.raises(ConfigError, match="labels of shape"):
        module(x, step)


# Where they fit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", [ExpertChoice.Config(), ImageLevel.Config()])
def test_models_that_write_token_by_token_refuse_routers_that_look_ahead(router: BaseConfig) -> None:
    experts = MoE.Config(hidden_dim=HIDDEN, experts=EXPERTS, router=router)
    causal = Block.Config(mixer=Attention.Config(heads=2, kv_heads=1, head_dim=4), mlp=experts)
    with pytest.raises(UnsupportedPair, match="not written yet") as caught:
        Stack.Config(dim=DIM, layers=[causal]).build()
    assert "TopK" in caught.value.hint
    both = Block.Config(mixer=BidirectionalAttention.Config(heads=2), mlp=experts)
    x = torch.randn(2, 3, DIM)
    assert Stack.Config(dim=DIM, layers=[both]).build()(x, context(x)).shape == x.shape


@pytest.mark.parametrize("router", [ExpertChoice.Config(), ImageLevel.Config()])
def test_rows_that_are_not_whole_are_refused(router: BaseConfig) -> None:
    module, x = mixture(router), torch.randn(1, 4, DIM)
    step = context(x)
    step.documents = torch.tensor([[0, 0, 1, 1]])
    with pytest.raises(UnsupportedPair, match="documents"):
        module(x, step)
    step = context(x)
    step.cache = object()  # type: ignore[assignment]
    with pytest.raises(UnsupportedPair, match="token by token"):
        module(x, step)
    with pytest.raises(UnsupportedPair, match="rows"):
        module.router(x[0])


@pytest.mark.parametrize("router", [TopK.Config(k=1), ExpertChoice.Config(capacity=2.0), ImageLevel.Config(k=2)])
def test_a_mixture_is_written_and_read_with_its_router(router: BaseConfig) -> None:
    cfg = MoE.Config(dim=DIM, hidden_dim=HIDDEN, experts=EXPERTS, router=router)
    assert Config.from_dict(cfg.to_dict()) == cfg
    assert isinstance(Config.from_dict(cfg.to_dict()).build().router, router.builds)
    assert isinstance(cfg.derive(MoE, experts=2).router, type(router)), "a socket keeps what stands in it"


# Losses ---------------------------------------------------------------------------------------------------------------


def test_the_z_loss_is_the_mean_square_of_the_log_of_the_sum() -> None:
    module, x = mixture(TopK.Config()), torch.randn(2, 5, DIM)
    valid = torch.tensor([[True] * 5, [True, True, False, False, False]])
    step = context(x, valid)
    module(x, step)
    (value,) = step.collected["moe.z"]
    scores = (x @ module.router.gate.dense().T)[valid]
    assert float(value.detach()) == pytest.approx(float(scores.exp().sum(-1).log().square().mean().detach()), rel=1e-5)
    value.backward()
    assert module.router.gate.weight.grad.abs().sum() > 0


def test_one_decision_a_row_has_a_balance_over_rows() -> None:
    module = mixture(ImageLevel.Config())
    module.router.gate.assign(torch.eye(EXPERTS, DIM) * 50)
    even = torch.eye(DIM)[:EXPERTS, None].expand(-1, 3, -1)
    step = context(even)
    module(even, step)
    assert float(step.collected["moe.balance"][0].detach()) == pytest.approx(1.0, abs=1e-4)
    same = torch.eye(DIM)[:1, None].expand(4, 3, -1)
    step = context(same)
    module(same, step)
    assert float(step.collected["moe.balance"][0].detach()) == pytest.approx(EXPERTS, abs=1e-3)
    assert isinstance(module.router(same), Routing)
