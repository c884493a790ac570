"""What layers leave behind is added to any objective, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from orchard.core.batch import PairBatch
from orchard.core.config import Config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.moe import MoE, TopK
from orchard.nn.stack import Block, Stack
from orchard.objectives import Distill, NextToken, Preference, with_collected
from tests.objectives.toys import VOCAB, Toy, assert_same, packed


def test_the_sum_is_the_objective_plus_its_share() -> None:
    model, batch = Toy(), packed([[5, 3], [6]])
    plain = NextToken.Config(chunk=4).build()(model, batch)
    loss = with_collected(NextToken.Config(chunk=4), {"size": 0.3}).build()(model, batch)
    context = Context(positions=batch.positions, documents=batch.documents)
    model.hidden(batch.ids, context)
    (left,) = context.collected["size"]
    assert_same(model, loss.value, plain.value + 0.3 * 14 * left)
    assert float(loss.weight) == 14
    assert float(loss.parts["size"]) == pytest.approx(14 * left.item())
    assert float(loss.parts["loss"]) == float(plain.parts["loss"])


def test_the_model_is_watched_and_the_teacher_is_not() -> None:
    student, teacher, batch = Toy(1), Toy(2), packed([[5]])
    loss = with_collected(Distill.Config(), {"size": 1.0}).build(teacher=teacher)(student, batch)
    context = Context(positions=batch.positions, documents=batch.documents)
    student.hidden(batch.ids, context)
    assert float(loss.parts["size"]) / 5 == pytest.approx(context.collected["size"][0].item())


def test_two_readings_count_as_one() -> None:
    model, one = Toy(), packed([[5]])
    batch = PairBatch(one, one, (torch.zeros(1), torch.zeros(1)))
    loss = with_collected(Preference.Config(), {"size": 1.0}).build()(model, batch)
    single = with_collected(NextToken.Config(), {"size": 1.0}).build()(model, one)
    assert float(loss.parts["size"]) == pytest.approx(float(single.parts["size"]) / 5)


def test_a_mixture_of_experts_leaves_its_balance() -> None:
    torch.manual_seed(0)
    mixture = MoE.Config(hidden_dim=16, experts=4, router=TopK.Config(k=2))
    blocks = [Block.Config(mixer=Attention.Config(heads=2, kv_heads=1, head_dim=8), mlp=mixture) for _ in range(2)]
    model = Decoder.Config(vocab=VOCAB, dim=16, context=32, stack=Stack.Config(layers=blocks)).build()
    cfg = with_collected(NextToken.Config(), {"moe.balance": 0.01})
    objective = Config.from_dict(cfg.to_dict()).build()
    loss = objective(model, packed([[5, 3], [6]]))
    loss.value.backward()
    curves = objective.curves(float(loss.weight), {name: float(total) for name, total in loss.parts.items()})
    assert 0.5 < curves["moe.balance"] < 3 and curves["tokens"] == 14


def test_a_name_that_nothing_left_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match="balance") as caught:
        with_collected(NextToken.Config(), {"balance": 0.1}).build()(Toy(), packed([[3]]))
    assert "size" in caught.value.hint
