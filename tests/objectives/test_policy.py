"""Advantages and policy gradients against loops over answers and tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.batch import IGNORED, GroupBatch
from orchard.core.errors import ConfigError, UsageError
from orchard.objectives import Baseline, GroupNormal, LeaveOneOut, PolicyGradient
from orchard.objectives.logprobs import token_log_probs
from tests.objectives.toys import Toy, assert_adds_up, assert_same, assert_slope, packed, part, plain_scores

REWARDS = st.lists(st.tuples(st.integers(0, 2), st.floats(-3, 3)), min_size=1, max_size=9)


@given(REWARDS)
def test_advantages_are_the_formulas(rows: list[tuple[int, float]]) -> None:
    groups = torch.tensor([g * 7 - 3 for g, _ in rows])
    rewards = torch.tensor([r for _, r in rows], dtype=torch.float64)
    normal = GroupNormal.Config(eps=0.01).build()(rewards, groups)
    centred = GroupNormal.Config(std=False).build()(rewards, groups)
    alone = LeaveOneOut.Config().build()(rewards, groups)
    for i, (group, reward) in enumerate(rows):
        mates = [r for g, r in rows if g == group]
        others = [r for j, (g, r) in enumerate(rows) if g == group and j != i]
        mean = sum(mates) / len(mates)
        std = math.sqrt(sum((r - mean) ** 2 for r in mates) / len(mates))
        assert float(centred[i]) == pytest.approx(reward - mean, abs=1e-9)
        assert float(normal[i]) == pytest.approx((reward - mean) / (std + 0.01), abs=1e-9)
        want = reward - sum(others) / len(others) if others else 0.0
        assert float(alone[i]) == pytest.approx(want, abs=1e-9)


def test_several_objectives_before_or_after_comparing() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 100.0], [0.5, 0.0]])
    groups = torch.zeros(3, dtype=torch.long)
    weights = [2.0, 0.5]
    joined = GroupNormal.Config(objectives=weights).build()(rewards, groups)
    torch.testing.assert_close(joined, GroupNormal.Config().build()(rewards @ torch.tensor(weights), groups))
    apart = GroupNormal.Config(objectives=weights, each=True).build()(rewards, groups)
    one, two = (GroupNormal.Config().build()(rewards[:, i], groups) for i in (0, 1))
    torch.testing.assert_close(apart, 2.0 * one + 0.5 * two)
    torch.testing.assert_close(Baseline.Config(value=0.25).build()(rewards[:, 0], groups), rewards[:, 0] - 0.25)
    with pytest.raises(UsageError, match="3 weights for 2"):
        GroupNormal.Config(objectives=[1.0, 2.0, 3.0]).build()(rewards, groups)


def sampled(lengths: list[int], *, weighted: bool = False, shift: float = 0.4) -> GroupBatch:
    """Answers after prompts of one token, by a sampler that is not the model; two groups."""
    batch = packed([[length] for length in lengths], weighted=weighted)
    batch.targets[:, 0] = IGNORED
    make = torch.Generator().manual_seed(4)
    with torch.no_grad():
        behaviour = token_log_probs(Toy(), batch) + shift * torch.randn(batch.ids.shape, generator=make)
    behaviour[batch.targets == IGNORED] = float("nan")  # whatever a sampler leaves there
    rewards = torch.randn(len(lengths), generator=make, dtype=torch.float64)
    return GroupBatch(batch, behaviour, rewards, torch.arange(len(lengths)) % 2)


def reference(model: Toy, other: Toy, data: GroupBatch, cfg: PolicyGradient.Config) -> tuple[torch.Tensor, float]:
    advantage = cfg.aggregate.build()(data.rewards, data.groups)
    batch, value, weight = data.batch, torch.zeros((), dtype=torch.float64), 0.0
    for b in range(len(batch.ids)):
        places = [t for t in range(batch.ids.shape[1]) if batch.targets[b, t] != IGNORED]
        if not places:
            continue
        new = [plain_scores(model, batch)[b, t].log_softmax(0)[batch.targets[b, t]] for t in places]
        near = [plain_scores(other, batch)[b, t].log_softmax(0)[batch.targets[b, t]].detach() for t in places]
        logs = [n - data.behaviour[b, t] for n, t in zip(new, places)]
        if cfg.ratio == "sequence":
            logs = [sum(logs) / len(logs)] * len(logs)  # type: ignore[list-item]
        losses, shares = [], []
        for log, n, o, t in zip(logs, new, near, places):
            ratio, a = log.exp(), advantage[b]
            low = 0 if cfg.clip_low is None else 1 - cfg.clip_low
            high = math.inf if cfg.clip_high is None else 1 + cfg.clip_high
            loss = -torch.minimum(ratio * a, ratio.clamp(low, high) * a)
            losses.append(loss + cfg.kl * ((o - n).exp() - (o - n) - 1))
            shares.append(1.0 if batch.weights is None else float(batch.weights[b, t]))
        total = sum(s * x for s, x in zip(shares, losses))
        if cfg.normalize == "sequence":
            value, weight = value + total / sum(shares), weight + 1
        else:
            value = value + total
            weight += sum(shares) if cfg.normalize == "token" else (cfg.length or 0)
    return value, weight


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["token", "sequence", "constant"]),
    st.sampled_from([(0.2, 0.2), (0.2, 0.28), (None, None), (None, 3.0)]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_value_and_gradient_are_the_formulas(
    lengths: list[int], ratio: str, normalize: str, clip: Any, kl: float, chunk: int | None, weighted: bool
) -> None:
    model, other, data = Toy(), Toy(3), sampled(lengths, weighted=weighted)
    cfg = PolicyGradient.Config(
        ratio=ratio, normalize=normalize, clip_low=clip[0], clip_high=clip[1], kl=kl, chunk=chunk, aggregate=Baseline.Config(),
        length=7 if normalize == "constant" else None,
    )  # fmt: skip
    loss = cfg.build(reference=other)(model, data)
    value, weight = reference(model, other, data, cfg)
    assert float(loss.weight) == pytest.approx(weight)
    if weight:
        assert_same(model, loss.value, value, tolerance=1e-6)  # token weights are float32
    assert all(p.grad is None for p in other.parameters())
    assert all(torch.isfinite(total) for total in loss.parts.values())


@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_finite_differences_and_whole_groups_add_up(normalize: str) -> None:
    model, data = Toy(), sampled([5, 3, 4, 2], shift=0.1)
    objective = PolicyGradient.Config(normalize=normalize, kl=0.1, chunk=3).build(reference=Toy(3))
    assert_slope(model, lambda: objective(model, data).value)

    def some(rows: list[int]) -> GroupBatch:
        return GroupBatch(part(data.batch, rows), data.behaviour[rows], data.rewards[rows], data.groups[rows])

    pieces = [objective(model, some(rows)) for rows in ([0, 2], [1, 3])]
    assert_adds_up(model, objective(model, data), pieces)


def test_on_policy_it_is_reinforce() -> None:
    """At a ratio of one the gradient is that of -A log p, clipped or not."""
    model, data = Toy(), sampled([5, 3, 4, 2])
    with torch.no_grad():
        own = token_log_probs(model, data.batch)
    data = GroupBatch(data.batch, own, data.rewards, data.groups)
    objective = PolicyGradient.Config().build()
    loss = objective(model, data)
    advantage = GroupNormal.Config().build()(data.rewards, data.groups)
    plain = -(advantage[:, None] * token_log_probs(model, data.batch)).sum()
    assert_same(model, loss.value - loss.value.detach(), plain - plain.detach())
    curves = objective.curves(float(loss.weight), {name: float(total) for name, total in loss.parts.items()})
    assert curves["ratio"] == pytest.approx(1) and curves["clipped"] == 0 and curves["behaviour_kl"] == 0
    assert curves["rows"] == 4 and curves["entropy"] > 0


@pytest.mark.parametrize(("behaviour", "reward", "clipped", "value"), [
    (-2000.0, 1.0, 3, -3 * 1.2),  # far likelier than it was, and good: nothing more to gain
    (2000.0, -1.0, 3, 3 * 0.8),  # far less likely, and bad
    (2000.0, 1.0, 0, 0.0),  # far less likely, and good: follows the ratio, which is nothing
])  # fmt: skip
def test_what_the_clip_takes_has_no_gradient_and_far_off_data_no_infinity(
    behaviour: float, reward: float, clipped: int, value: float
) -> None:
    model, data = Toy(), sampled([4])
    far = GroupBatch(data.batch, torch.full_like(data.behaviour, behaviour), torch.tensor([reward]), data.groups)
    loss = PolicyGradient.Config(aggregate=Baseline.Config()).build()(model, far)
    loss.value.backward()
    assert float(loss.parts["clipped"]) == clipped
    assert loss.value.item() == pytest.approx(value, abs=1e-6)
    assert all(p.grad is None or p.grad.abs().max() < 1e-6 for p in model.parameters())


def test_a_bad_answer_that_became_likelier_is_not_clipped() -> None:
    model, data = Toy(), sampled([4])
    near = torch.where(data.batch.targets == IGNORED, 0, token_log_probs(model, data.batch).detach() - 1)
    worse = GroupBatch(data.batch, near, torch.tensor([-1.0]), data.groups)
    loss = PolicyGradient.Config(aggregate=Baseline.Config()).build()(model, worse)
    loss.value.backward()
    assert float(loss.parts["clipped"]) == 0 and loss.value.item() == pytest.approx(3 * math.e)
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(UsageError, match="kl"):
        PolicyGradient.Config(kl=0.1).build()
    with pytest.raises(ConfigError, match="length"):
        PolicyGradient.Config(normalize="constant").build()
    with pytest.raises(ConfigError, match="sentence"):
        PolicyGradient.Config(ratio="sentence").build()
