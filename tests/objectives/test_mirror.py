"""Mirror descent with leave-one-out advantages against the formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.batch import IGNORED, GroupBatch
from orchard.core.errors import ConfigError, UnsupportedPair, UsageError
from orchard.objectives import LeaveOneOut, MirrorDescent, PolicyGradient
from orchard.objectives.logprobs import token_log_probs
from orchard.objectives.mirror import moved
from tests.objectives.toys import Toy, assert_adds_up, assert_same, assert_slope, packed


def sampled(lengths: list[int], shift: float = 0.4) -> GroupBatch:
    batch = packed([[length] for length in lengths])
    batch.targets[:, 0] = IGNORED
    make = torch.Generator().manual_seed(4)
    with torch.no_grad():
        behaviour = token_log_probs(Toy(), batch) + shift * torch.randn(batch.ids.shape, generator=make)
    behaviour[batch.targets == IGNORED] = float("nan")
    rewards = torch.randn(len(lengths), generator=make, dtype=torch.float64)
    return GroupBatch(batch, behaviour, rewards, torch.arange(len(lengths)) % 2)


def test_it_is_the_formula_and_its_gradient() -> None:
    model, other, data, (gamma, beta) = Toy(1), Toy(2), sampled([4, 3, 5, 2]), (0.3, 0.2)
    objective = MirrorDescent.Config(gamma=gamma, beta=beta).build(reference=other)
    counted = data.batch.targets != IGNORED
    new, near = (token_log_probs(each, data.batch) for each in (model, other))
    old = torch.where(counted, data.behaviour, 0)
    worth = data.rewards - beta * (old.sum(-1) - near.detach().sum(-1))
    advantage = [
        worth[i] - torch.stack([worth[j] for j in range(4) if j != i and j % 2 == i % 2]).mean() for i in range(4)
    ]
    ratio = (new - old).exp()
    wanted = -(ratio * torch.stack(advantage)[:, None]) + gamma * (ratio * ratio.log() - ratio + 1)
    found = objective(model, data)
    assert_same(model, found.value, (wanted * counted).sum())
    assert_slope(model, lambda: objective(model, data).value)
    assert found.weight == counted.sum() and found.parts["step_kl"] >= 0
    curves = objective.curves(float(found.weight), {name: float(part) for name, part in found.parts.items()})
    assert curves["reference_kl"] == pytest.approx(float((old.sum(-1) - near.detach().sum(-1)).mean()))


def test_without_gamma_and_beta_it_is_an_unclipped_policy_gradient() -> None:
    model, data = Toy(1), sampled([4, 3, 5, 2])
    plain = PolicyGradient.Config(aggregate=LeaveOneOut.Config(), clip_low=None, clip_high=None).build()
    assert_same(model, MirrorDescent.Config(gamma=0).build()(model, data).value, plain(model, data).value)


def test_groups_add_up_over_micro_batches() -> None:
    model, data = Toy(1), sampled([4, 3, 5, 2])
    data = GroupBatch(data.batch, data.behaviour, data.rewards, torch.tensor([0, 0, 1, 1]))
    objective = MirrorDescent.Config(beta=0.1).build(reference=Toy(3))
    assert_adds_up(model, objective(model, data), [objective(model, data.part(at, at + 2)) for at in (0, 2)])


@given(st.floats(-30, 30))
def test_having_moved_is_never_a_gain(log: float) -> None:
    assert float(moved(torch.tensor(log, dtype=torch.float64))) >= 0
    assert float(moved(torch.tensor(0.0))) == 0


def test_its_mean_is_the_divergence() -> None:
    one, other = (torch.randn(7, generator=torch.Generator().manual_seed(s)).double().log_softmax(0) for s in (1, 2))
    wanted = (other.exp() * (other - one)).sum()  # of the new policy from the old one, which wrote
    torch.testing.assert_close((one.exp() * moved(other - one)).sum(), wanted)


def test_what_it_refuses() -> None:
    with pytest.raises(UsageError, match="beta is above 0"):
        MirrorDescent.Config(beta=0.1).build()
    with pytest.raises(ConfigError, match="gamma is -1"):
        MirrorDescent.Config(gamma=-1.0).build()
    data = sampled([4, 3])
    several = GroupBatch(data.batch, data.behaviour, torch.randn(2, 2), data.groups)
    with pytest.raises(UnsupportedPair, match="several objectives"):
        MirrorDescent.Config(beta=0.1).build(reference=Toy())(Toy(), several)
