"""The study of routed keys and values: its models are what they are called, its measures are right, and it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.recipes.shapes import llama, words_of
from orchard.session.build import Built
from orchard.session.save import save_built
from orchard.studies import _routing_models as routing
from orchard.studies import _routing_smollm2 as smollm2
from orchard.studies import stochastic_kv_routing, study
from orchard.studies._afm_ground import Ground, built, tree
from orchard.text.byte_tokens import VOCAB, byte_tokenizer
from orchard.transforms.retain import Retain

TINY = routing.Size(ground=Ground(dim=32, layers=4, rows=2, length=16, steps=2, held_out=4), tuned=1.0, sets=2)


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
    assert stochastic_kv_routing.reasons(stochastic_kv_routing.compared(loss), TINY) == {}
    loss["rcla"]["100"], loss["base"]["50"], loss["tuned"]["100"] = 1.1, 0.9, 1.2
    why = stochastic_kv_routing.reasons(stochastic_kv_routing.compared(loss), TINY)
    assert "1.100 of the base's" in why["whole"] and "1.200 of the base's" in why["tuned-whole"]
    assert not {"deep", "tuned-deep"} & why.keys(), "these hold"
    assert "too little to need them" in why["half"]


def test_it_runs_on_models_that_are_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Decoder] = {}
    make = routing.models

    def kept(size: routing.Size, seed: int) -> dict[str, Decoder]:
        seen.update(make(size, seed))
        return seen

    monkeypatch.setitem(stochastic_kv_routing.SCALES, "small", TINY)
    monkeypatch.setattr(routing, "models", kept)
    report = study("stochastic-kv-routing")
    verdicts = {claim.id: claim.passed for claim in report.claims}
    assert verdicts["bytes"] and verdicts["decode"]
    assert verdicts.keys() == {claim.id for claim in stochastic_kv_routing.CLAIMS}
    owners = {name: [node.store.owner for _, node in model.config.find(Attention)] for name, model in seen.items()}
    assert owners.pop("cla") == [None, 0, None, 2] and owners.pop("shallow") == [None, None]
    assert owners == {name: [None] * 4 for name in ("base", "rcla", "tuned", "longer")}
    weights = {name: model.stack.layers[3].mixer.q.weight for name, model in seen.items() if name != "shallow"}
    assert len({float(weight.detach().sum()) for weight in weights.values()}) == 5, "each learnt something else"
    kinds = [(name, rate) for name, rate, _ in report.series["model, percent kept, loss"]]
    whole = [(name, rate) for name in ("base", "rcla", "tuned") for rate in (100, 50, 25)]
    assert sorted(kinds) == sorted([*whole, ("cla", 50), ("cla", 25), ("shallow", 100), ("longer", 100)])


def test_a_model_of_the_library_is_cut_and_routed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    four = llama("1m", 64, vocab=VOCAB)
    four = four.set("stack.layers", [layer.clone() for layer in four.stack.layers[:4]])
    family, words = words_of(four.complete())
    save_built(Built(four.build(), family, words), byte_tokenizer(), None, tmp_path / "four", None)
    small = {"held": 16, "looked": 16, "length": 16, "rows": 2, "dtype": "float32", "device": "cpu"}
    assert smollm2.plan(str(tmp_path / "four"))[1] == "retain:layers=[0],fit=false"
    found = smollm2.cut_and_routed(128, 0, str(tmp_path / "four"), **small)
    assert list(found) == ["as_is_50", "as_is_25", "routed_100", "routed_50", "routed_25"]
    assert all(ratio > 0 for ratio in found.values()) and found["as_is_50"] != found["routed_50"]
    assert not smollm2.there("nobody-has-this")
