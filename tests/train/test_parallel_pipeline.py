"""Stages of a pipeline train as one process does, with every objective, and are saved and loaded as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from orchard.train.checkpoint import Checkpoints
from orchard.train.world import World
from tests.train.parallel_start import start
from tests.train.pipeline_cases import Case, Run, run

# The largest differences that were seen over 20 steps: 4e-7 of a loss, 2e-6 of a norm (float32).
CLOSE = 1e-4
TWO = {"pipeline": 2}


def together(*asked: list[Any], size: int = 2) -> list[Any]:
    """What the stages say, which is the same on all of them."""
    found = start("pipeline_program", json.dumps(asked), size=size)
    for code, out, said in found:
        assert code == 0 and out, said[-3000:]
    said = [json.loads(out) for _, out, _ in found]
    assert all("error" not in one and one["said"] == said[0]["said"] for one in said), said
    results: list[Any] = said[0]["said"]
    return results


def check(found: dict[str, Any], case: dict[str, Any]) -> None:
    """Against one process that recomputes nothing."""
    expected = run(Case(**{**case, "mesh": {}, "every": 0}), World())
    assert found["differ"] == [], case  # both copies of a tied table have the same bits
    assert found["losses"] == pytest.approx(expected["losses"], abs=CLOSE), case
    assert found["norms"] == pytest.approx(expected["norms"], rel=CLOSE), case
    assert found["weights"] == pytest.approx(expected["weights"], rel=CLOSE), case
    assert found["held out"][0] == pytest.approx(expected["held out"][0], rel=CLOSE, abs=CLOSE), case
    for mine, theirs in zip(found["parts"], expected["parts"], strict=True):
        assert mine == pytest.approx(theirs, rel=CLOSE, abs=CLOSE), case


@pytest.mark.long
@pytest.mark.loopback
def test_two_stages_have_the_losses_of_one_process() -> None:
    """Twenty steps, tied and untied and recomputed; then a few with every objective, which runs on the last stage."""
    twenty: list[dict[str, Any]] = [{"every": 1}, {"kind": "tied", "every": 2}]
    few: list[dict[str, Any]] = [
        {"kind": "moe", "objective": "collected", "every": 1},  # what layers of both stages left is added
        {"objective": "distill"},
        {"objective": "preference", "micro": 2},
        {"objective": "policy", "micro": 2},
        {"kind": "packed lora tied"},
        {"cast": True},
    ]
    asked = [{"mesh": TWO, **one} for one in (*twenty, *({**one, "steps": 2} for one in few))]
    again = {**asked[1], "mesh": {**TWO, "schedule": "gpipe"}, "steps": 4}
    narrow = {"mesh": TWO, "steps": 2, "compute": "bfloat16"}
    *found, other, computed = together(*(["run", one] for one in (*asked, again, narrow)))
    assert found[0]["losses"][-1] < 0.7 * found[0]["losses"][0]  # there was something to learn
    for one, case in zip(found, asked, strict=True):
        check(one, case)
    assert other["losses"] == found[1]["losses"][:4]  # the other order of work gives the same bits
    assert other["norms"] == found[1]["norms"][:4]
    expected = run(Case(steps=2), World())
    assert computed["losses"] == pytest.approx(expected["losses"], rel=0.02)
    assert computed["losses"] != pytest.approx(expected["losses"], abs=1e-6)  # it was not computed in float32


@pytest.mark.loopback
@pytest.mark.long
def test_more_stages_and_data_and_tensors_compose(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"mesh": {"pipeline": 4}, "kind": "moe", "objective": "collected", "steps": 2},
        {"mesh": {"pipeline": 2, "data": 2}, "kind": "tied", "times": 2, "every": 1, "steps": 3},
        {"mesh": {"pipeline": 2, "shard": False, "cuts": [1]}, "times": 2, "steps": 2},
        {"mesh": {"pipeline": 2, "tensor": 2}, "kind": "tied", "steps": 2},
    ]
    *found, (same, other) = together(*(["run", one] for one in asked), ["cut elsewhere", str(tmp_path)], size=4)
    for one, case in zip(found, asked, strict=True):
        check(one, case)
    assert same == "1"
    assert "is the state of another process's shard" in other and "layers.1." in other


@pytest.mark.long
@pytest.mark.loopback
def test_checkpoints_go_from_one_process_to_two_stages_and_back(tmp_path: Path) -> None:
    alone = {"untied": Run(Case(), World()), "tied": Run(Case(kind="tied"), World())}
    for kind in alone:
        alone[kind].go(range(3))
        alone[kind].save(tmp_path / kind / "one", 3)
    found = together(*(["resumed", str(tmp_path / kind), one.case.kind, TWO] for kind, one in alone.items()))
    for (kind, one), two in zip(alone.items(), found, strict=True):
        one.go(range(3, 8))
        assert two["losses"] == pytest.approx(one.curves["losses"][3:], abs=CLOSE)
        back = Run(one.case, World())
        assert back.load(tmp_path / kind / "two") == 6
        joined = load_file(Checkpoints(tmp_path / kind / "two").weights(6))  # from the files of both stages
        mine = dict(back.model.named_parameters())
        assert joined.keys() == mine.keys()
        assert all(torch.equal(joined[name], mine[name]) for name in joined)
        assert back.ema.updates == 6 and back.ema.averages.keys() == mine.keys()
        back.go(range(6, 8))
        assert back.curves["losses"] == pytest.approx(two["losses"][-2:], abs=CLOSE)
        assert back.result()["weights"] == pytest.approx(two["weights"], rel=CLOSE)


@pytest.mark.long
@pytest.mark.loopback
def test_what_goes_wrong_on_one_stage_is_known_on_the_other() -> None:
    """Gradients that are not finite, and then a stage that is killed."""
    numbers = sum(parameter.numel() for _, parameter in Run(Case(kind="tied"), World()).trained)
    asked = [["spoilt", 0], ["spoilt", 1], ["lost", 1]]
    (code, out, said), killed = start("pipeline_program", json.dumps(asked), wait=100)
    assert killed[0] == -9 and code == 0, said[-3000:]
    told = json.loads(out)
    for found, name in zip(told["said"], ["stack.layers.0.mlp.up.weight", "norm.weight"], strict=True):
        assert found["large"] == [pytest.approx(1e30 * numbers**0.5, rel=1e-5)]  # the table is counted once
        assert found["bad"] == [name]
    assert (told["error"], told["ranks"]) == ("WorkerLost", [1])
    assert told["took"] < 30
