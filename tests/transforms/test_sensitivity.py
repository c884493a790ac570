"""What rounding costs: estimates against the truth, fallbacks, records that are stored and read again."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch

from orchard.core.errors import BadFile, UsageError
from orchard.nn.formats import Int2, Int4, Int8, Plain
from orchard.transforms.mixed import Mixed
from orchard.transforms.ptq import NotFinite, holders
from orchard.transforms.sensitivity import Sensitivity, few, kind_of, sensitivity
from orchard.transforms.sensitivity_fisher import Rounded, divergences
from orchard.transforms.sensitivity_trial import Trial
from tests.transforms.ptq_models import rows, trained

TEXTS = tuple(rows(32, 16, seed=seed) for seed in range(4))
CHOICES = (Int2.Config(group=32), Int4.Config(group=32))


def true_cost(model: Any, path: str, format: Any) -> float:
    other = Mixed({path: format}).apply(model)
    ids = torch.cat([batch.to("cpu").ids for batch in TEXTS])
    one, two = model(ids).log_softmax(-1), other(ids).log_softmax(-1)
    return float((one.exp() * (one - two)).sum(-1).mean())


@pytest.mark.parametrize("kind", ["llama", "shared"])
def test_estimates_follow_the_truth(kind: str) -> None:
    model = trained(kind)
    paths = list(holders(model.config.complete(), "all-linear"))
    rounded = {path: Rounded(model.get_submodule(path), CHOICES) for path in paths}
    guesses, truths = [], []
    for path, found in divergences(model, TEXTS, rounded).items():
        for format, guess in zip(CHOICES, found, strict=True):
            guesses.append(guess)
            truths.append(true_cost(model, path, format))
    off = np.log(guesses) - np.log(truths)
    assert np.corrcoef(np.log(guesses), np.log(truths))[0, 1] > 0.9
    assert abs(off.mean()) < np.log(2) and off.std() < np.log(2)


def test_a_trial_is_the_truth() -> None:
    model = trained("shared")  # layer 1 reads what layer 0 keeps
    trial = Trial(model, TEXTS)
    assert trial.tokens == 4 * 32 * 16
    for path in ("stack.layers.0.mixer.k", "stack.layers.1.mlp.down", "embedding", "head"):
        format = Int2.Config(group=32)
        packed = format.build().pack(model.get_submodule(path).dense())
        for _ in range(2):  # one measurement leaves nothing behind for the next
            assert trial.divergence(path, format, packed) == pytest.approx(true_cost(model, path, format), rel=1e-3)


def test_mixtures_have_costs_too() -> None:
    found = sensitivity(trained("moe", steps=3), TEXTS, CHOICES, measured=0)
    two, four = found.options["stack.layers.0.mlp.gate"]
    assert 0 < four.cost < two.cost and not four.measured
    assert found.correlation is None and found.checks == 0


def test_options_sizes_and_progress() -> None:
    model = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told: list[float] = []
    choices = (*CHOICES, Int8.Config(half=True), Plain.Config())
    found = sensitivity(model, TEXTS, choices, told.append, targets=("all-linear", "embedding"))
    assert sum(told) == pytest.approx(1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(found.options) == 15
    for path, options in found.options.items():
        costs = [option.cost for option in options]
        assert costs == sorted(costs, reverse=True) and costs[-1] == 0, path
        sizes = [option.nbytes for option in options]
        assert sizes == sorted(sizes)
    assert all(option.measured for option in found.options["embedding"])
    assert found.weights == sum(parameter.numel() for parameter in model.parameters())
    assert found.rest == sum(p.nbytes for name, p in model.named_parameters() if "norm" in name or "head" in name)
    assert found.tokens == 4 * 32 * 16
    assert found.correlation is not None and found.correlation > 0.9 and found.checks >= 14
    picked = {path: options[0].format for path, options in found.options.items()}
    nbytes, cost = found.total(picked)
    assert nbytes == sum(
        module.nbytes for module in Mixed(picked).apply(model).modules() if hasattr(module, "nbytes")
    ) - (model.head.nbytes)
    assert cost == pytest.approx(sum(options[0].cost for options in found.options.values()))
    assert "embedding" in str(found) and "correlate" in str(found)


def test_formats_that_do_not_fit_are_replaced_and_named() -> None:
    found = sensitivity(trained(), TEXTS, (Int4.Config(group=48), Int4.Config(group=32)), targets="q", measured=0)
    (option,) = found.options["stack.layers.0.mixer.q"]  # both become the same
    assert option.format == Int4.Config(group=32) and "groups of 48 do not divide" in option.note


def test_stored_and_read_again() -> None:
    found = sensitivity(trained(), TEXTS[:1], CHOICES, targets=("q", "down"))
    again = Sensitivity.from_json(found.to_json())
    assert again == found and str(again) == str(found)


@pytest.mark.parametrize("fault", ["no json", "list", "version", "cost", "kind", "missing"])
def test_damaged_records_are_refused(fault: str) -> None:
    data: Any = sensitivity(trained(), TEXTS[:1], CHOICES, targets="q", measured=0).to_dict()
    first = data["options"]["stack.layers.0.mixer.q"][0]
    if fault == "version":
        data["version"] = 9
    elif fault == "cost":
        first["cost"] = float("nan")
    elif fault == "kind":
        first["format"]["kind"] = "os:system"
    elif fault == "missing":
        del data["weights"]
    text = {"no json": "{", "list": "[1]"}.get(fault, json.dumps(data))
    with pytest.raises(BadFile, match="no record of sensitivity"):
        Sensitivity.from_json(text)


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="formats to choose from"):
        sensitivity(trained(), TEXTS, ())
    with pytest.raises(UsageError, match="there are none"):
        sensitivity(trained(), (), CHOICES)
    broken = copy.deepcopy(trained())
    broken.stack.layers[0].mixer_norm.weight[0] = torch.nan
    with pytest.raises(NotFinite, match=r"what rounding .* costs is no number"):
        sensitivity(broken, TEXTS, CHOICES)
    found = sensitivity(trained(), TEXTS[:1], CHOICES, targets="q", measured=0)
    with pytest.raises(UsageError, match="was not tried"):
        found.total({"stack.layers.0.mixer.q": Int8.Config()})


def test_few_rows_come_from_everywhere() -> None:
    assert [len(batch) for batch in few(TEXTS, 64)] == [1] * 4
    assert len(few(TEXTS, 1)) == 1 and len(few(TEXTS, 10**9)) == 128
    assert kind_of("stack.layers.12.mixer.q") == "mixer.q" and kind_of("embedding") == "embedding"
