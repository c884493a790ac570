"""What a step can be told: rates of single parameters, and what is entered around its passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from orchard.objectives.lm import NextToken
from orchard.train.clip import Clip
from orchard.train.optim import AdamW
from orchard.train.optim.groups import Rules
from orchard.train.step import Step
from tests.train.parallel_program import batches, build


def test_parameters_have_the_rate_of_the_first_pattern_that_matches() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    rules = Rules.Config(rates={"a.*": 0.5, "*.weight": 2.0})
    optimizer = AdamW.Config(lr=0.1, rules=rules).build(named_parameters=list(model.named_parameters()))
    rates = {name: group["initial_lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates == pytest.approx(
        {"a.weight": 0.05, "a.bias": 0.05, "b.weight": 0.2, "b.bias": 0.1, "norm.weight": 0.2, "norm.bias": 0.1}
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moved = {name: float((before[name] - p.detach()).abs().max()) for name, p in model.named_parameters()}
    assert moved["b.bias"] == pytest.approx(0.1, rel=1e-3) and moved["a.bias"] == pytest.approx(0.05, rel=1e-3)


def test_all_passes_of_a_step_are_inside_and_the_update_is_not() -> None:
    model, told = build(), list[str]()
    parameter = next(model.parameters())

    @contextmanager
    def around() -> Iterator[None]:
        told.append("in")
        before = parameter.detach().clone()
        yield
        assert parameter.grad is not None and torch.equal(before, parameter)
        told.append("out")

    optimizer = AdamW.Config(lr=0.1).build(named_parameters=list(model.named_parameters()))
    step = Step(
        model,
        NextToken.Config().build(),
        optimizer,
        lambda number: 1.0,
        Clip.Config().build(),
        micro=2,
        dtype="float32",
        seed=0,
        around=around,
    )
    batch, before = batches(1)[0], parameter.detach().clone()
    step(batch, 0)
    assert told == ["in", "out"]
    assert not torch.equal(before, parameter)
