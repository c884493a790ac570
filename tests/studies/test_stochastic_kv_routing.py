"""The study of routed keys and values: its models are what they are called, its measures are right, and it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchard.nn.attention import Attention
from orchard.studies import _routing_models as routing
from orchard.studies import stochastic_kv_routing, study
from orchard.studies._afm_ground import Ground, built, tree
from orchard.transforms.retain import Retain

TINY = routing.Size(ground=Ground(dim=32, layers=4, rows=2, length=16, steps=2, held_out=4), tuned=1.0, sets=3)


def test_models_are_what_they_are_called() -> None:
    found = routing.models(TINY, 0)
    owners = {name: [node.store.owner for _, node in model.config.find(Attention)] for name, model in found.items()}
    assert owners.pop("cla") == [None, 0, None, 2] and owners.pop("shallow") == [None, None]
    assert owners == {name: [None] * 4 for name in ("base", "rcla", "tuned", "longer")}
    weights = {name: model.stack.layers[3].mixer.q.weight for name, model in found.items() if name != "shallow"}
    assert len({float(weight.detach().sum()) for weight in weights.values()}) == 5, "each learnt something else"
    loss = routing.losses(found, TINY, 0)
    assert {name: list(each) for name, each in loss.items()} == {
        **{name: ["100", "50", "25"] for name in ("base", "rcla", "tuned")},
        "cla": ["50", "25"],
        "shallow": ["100"],
        "longer": ["100"],
    }


def test_bytes_and_decoding_are_held_against_what_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(tree(TINY.ground), 0, "x")
    off, apart = routing.exactness(model, TINY, 0)
    assert off == 0 and apart < 1e-5
    monkeypatch.setattr(Retain, "apply", lambda self, model: model)  # one that drops nothing is seen
    assert routing.exactness(model, replace(TINY, sets=6), 0)[0] > 0


def test_claims_are_judged_by_what_is_lost() -> None:
    loss = {
        "base": {"100": 1.0, "50": 2.0, "25": 3.0},
        "rcla": {"100": 1.02, "50": 1.2, "25": 1.6},
        "cla": {"50": 1.1, "25": 2.0},
        "shallow": {"100": 1.3},
        "tuned": {"100": 1.05, "50": 1.4, "25": 2.2},
        "longer": {"100": 0.99},
    }
    values = {name: getattr(value, "value", value) for name, value in stochastic_kv_routing.compared(loss).items()}
    wanted = {"d50": 0.2, "d25": 0.3, "tuned_d50": 0.4, "tuned_d25": 0.6, "over_base": 1.02, "cla_over_25": 1.25}
    wanted |= {"over_shallow": 1.2 / 1.3, "tuned_d25_over_cla": 1.2, "tuned_d50_over_shallow": 4 / 3}
    assert {name: values[name] for name in wanted} == pytest.approx(wanted)


def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stochastic_kv_routing.SCALES, "small", TINY)
    report = study("stochastic-kv-routing")
    verdicts = {claim.id: claim.passed for claim in report.claims}
    assert verdicts["bytes"] and verdicts["decode"]
    assert verdicts.keys() == {claim.id for claim in stochastic_kv_routing.CLAIMS}
