"""Relufication and activity: what changes, what is told while training, and predictors that find what is active."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.objectives.collected import with_collected
from orchard.objectives.lm import NextToken
from orchard.transforms.activity import Activity, Found, decides, inputs_of, judged, relu_layers, together
from orchard.transforms.relufy import ACTIVITY, Relufy, soft_activity
from tests.transforms.neuron_models import UNITS, built, gated, texts, tree, ungated

IDS = torch.arange(12)[None] * 3 % 40


@pytest.mark.parametrize("kind", [gated("silu"), ungated("gelu")])
def test_only_the_activation_changes(kind: Any) -> None:
    model = built(kind)
    made = Relufy().apply(model)
    assert all(layer.config.activation == "relu" for layer in relu_layers(made).values())
    for (name, one), (same, other) in zip(model.named_parameters(), made.named_parameters(), strict=True):
        assert name == same and torch.equal(one, other) and one.data_ptr() != other.data_ptr()
    assert not torch.allclose(model(IDS), made(IDS))
    assert torch.equal(Relufy().apply(made)(IDS), made(IDS)), "twice is once"


@pytest.mark.parametrize("kind", [gated("silu"), ungated("gelu")])
def test_watched_layers_tell_while_they_learn(kind: Any) -> None:
    relu = Relufy(watched=True)
    model = relu.apply(built(kind)).requires_grad_(True).train()
    context = Context.whole(IDS)
    model(IDS, context)
    assert len(context.collected[ACTIVITY]) == 2
    pressed = with_collected(NextToken.Config(), {ACTIVITY: 5.0}).build()
    batch, optimizer, told = texts(1)[0], torch.optim.Adam(model.parameters(), 5e-3), []
    for _ in range(12):
        loss = pressed(model, batch)
        told.append(float(loss.parts[ACTIVITY] / loss.weight))
        optimizer.zero_grad()
        (loss.value / loss.weight).backward()
        optimizer.step()
    assert told[-1] < 0.8 * told[0]
    plain = relu.finish(model).eval()
    assert not any("Watched" in type(part).__name__ for part in plain.modules())
    assert torch.equal(plain(IDS), model.eval()(IDS))
    quiet = Context.whole(IDS)
    model(IDS, quiet)
    assert ACTIVITY not in quiet.collected, "only in training"


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 100))
def test_activity_does_not_change_with_scale(scale: float) -> None:
    before = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    context = Context.whole(torch.zeros(2, 5))
    one, other = soft_activity(before, context), soft_activity(before * scale, context)
    assert torch.allclose(one, other, atol=1e-4) and 0.4 < float(one) < 0.6


def test_padding_does_not_count() -> None:
    before = torch.full((1, 4, 8), -5.0) + torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    before[:, 2:] = 50.0
    padded = Context(positions=torch.tensor([[0, 1, -1, -1]]))
    assert soft_activity(before, padded) < 0.5 < soft_activity(before, Context.whole(torch.zeros(1, 4)))


def test_a_predictor_of_full_rank_is_exact() -> None:
    model = built(gated(bias=True))
    made = Activity(rank=16, steps=0, recall=0.9999).fit(model, texts())
    told = together(judged(model, made, texts(seed=2)))
    assert told.recall > 0.99 and told.excess < 1.05


def test_recall_is_what_was_asked_for_and_rank_pays() -> None:
    model = built(gated(bias=True))
    low, high = (together(judged(model, Activity(rank=rank, steps=40, recall=0.9).fit(model, texts(8)), texts(4, seed=2)))
                 for rank in (2, 8))  # fmt: skip
    assert low.recall == pytest.approx(0.9, abs=0.04) and high.recall == pytest.approx(0.9, abs=0.04)
    assert high.excess < low.excess and high.active == low.active and high.units == 4 * 4 * 32 * UNITS * 2
    untrained = Activity(rank=2, steps=0, recall=0.9).fit(model, texts(8))
    assert low.excess < together(judged(model, untrained, texts(4, seed=2))).excess, "training helps"


def test_judged_counts_what_layers_really_do() -> None:
    model = built(ungated())
    made = Activity(rank=3, steps=0).fit(model, texts(1))
    path = "stack.layers.1.mlp"
    x = inputs_of(model, [path], texts(1))[path]
    truth = functional.linear(x, *decides(model.get_submodule(path))) > 0
    said = made[path](x) > 0
    found = judged(model, made, texts(1))[path]
    assert found == Found(int(truth.sum()), int((truth & said).sum()), int(said.sum()), truth.numel())
    assert made[path].rank == 3 and made[path].nbytes == 4 * (3 * 16 + 3 * UNITS + UNITS)


def test_ranks_of_single_layers_and_the_same_seed() -> None:
    model = built(gated())
    how = Activity(rank=2, steps=3, ranks={"stack.layers.1.mlp": 5})
    one, other = how.fit(model, texts(1)), how.fit(model, texts(1))
    assert [part.rank for part in one.values()] == [2, 5]
    assert all(torch.equal(one[path].b, other[path].b) for path in one)


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedPair, match="silu"):
        Activity().fit(built(gated("silu")), texts(1))
    with pytest.raises(UnsupportedPair, match="no feed-forward"):
        Relufy()(tree(MoE.Config(hidden_dim=16, experts=4)))
    for bad in ({"rank": 0}, {"recall": 1.0}, {"steps": -1}, {"ranks": {"x": 0}}):
        with pytest.raises(ConfigError):
            Activity(**bad)
    with pytest.raises(ConfigError, match="no texts"):
        Activity().fit(built(gated()), [])
    with pytest.raises(ConfigError, match="at x"):
        Activity(ranks={"x": 4}).fit(built(gated()), texts(1))
    assert isinstance(Relufy()(tree(gated("silu"))).stack.layers[0].mlp, GatedMLP.Config)
