"""What blocks give, held against what a teacher's give: no distance to itself, a slope for what learns, refusals by name."""

from __future__ import annotations

import copy

import pytest
import torch

from orchard.core.batch import Batch
from orchard.core.blocks import layers_of
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.objectives import Distill
from orchard.objectives.states import listening


def decoder(layers: int = 3, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    blocks = [
        Block.Config(mixer=Attention.Config(heads=2, kv_heads=1, head_dim=8), mlp=GatedMLP.Config(hidden_dim=24))
        for _ in range(layers)
    ]
    made: Decoder = Decoder.Config(vocab=20, dim=16, context=32, stack=Stack.Config(layers=blocks)).build()
    return made


def batch(rows: int = 2, length: int = 6) -> Batch:
    ids = torch.arange(rows * length).view(rows, length) % 20
    positions = torch.arange(length).expand(rows, -1).clone()
    positions[-1, -2:] = -1
    documents = torch.where(positions < 0, -1, 0)
    return Batch(ids=ids, targets=torch.where(positions < 0, -100, ids), positions=positions, documents=documents)


def test_a_model_is_at_no_distance_from_itself_and_a_change_is_seen_from_its_block_on() -> None:
    teacher = decoder().eval()
    student = copy.deepcopy(teacher)
    objective = Distill.Config(states=2.0).build(teacher=teacher)
    assert float(objective(student, batch()).parts["states"]) == 0
    with torch.no_grad():
        student.stack.layers[1].mlp.down.weight.mul_(1.5)
    loss = objective(student, batch())
    plain = Distill.Config().build(teacher=teacher)(student, batch())
    assert float(loss.value) == pytest.approx(float(plain.value + 2 * loss.parts["states"]))
    by_hand = []
    with listening(teacher) as theirs, listening(student) as mine, torch.no_grad():
        objective(student, batch())
    real = batch().positions >= 0
    for one, other in zip(mine[:3], theirs[:3], strict=True):
        by_hand.append(float((((one - other).square().sum(-1)) / other.square().sum(-1))[real].mean()))
    assert by_hand[0] == 0 < by_hand[1]
    assert float(loss.parts["states"] / loss.weight) == pytest.approx(sum(by_hand) / 3, rel=1e-5)


def test_blocks_before_the_first_that_learns_are_not_counted_and_get_no_slope() -> None:
    teacher = decoder(seed=1).eval().requires_grad_(False)
    student = decoder(seed=2).requires_grad_(False)
    student.stack.layers[2].requires_grad_(True)
    loss = Distill.Config(states=1.0).build(teacher=teacher)(student, batch())
    loss.value.backward()
    learnt = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert learnt and all(name.startswith("stack.layers.2.") for name in learnt)
    assert all(not block._forward_hooks for model in (student, teacher) for block in layers_of(model))


def test_other_blocks_and_a_wrong_factor_are_refused() -> None:
    with pytest.raises(UnsupportedPair, match="a student of 2 blocks"):
        Distill.Config(states=1.0).build(teacher=decoder(3))(decoder(2), batch())
    with pytest.raises(ConfigError, match="states"):
        Distill.Config(states=-1.0).build(teacher=decoder())
