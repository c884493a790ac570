"""Two processes that share a model, or only the data, train as one process does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchard.train.world import World
from tests.train.parallel_program import run
from tests.train.parallel_start import start

# The largest differences that were seen: 2e-6 of a loss, 5e-6 of a norm (over 20 steps, float32).
CLOSE = 1e-4


def together(*asked: list[Any]) -> list[dict[str, Any]]:
    found = start("parallel_program", json.dumps(asked))
    for code, _, said in found:
        assert code == 0, said[-3000:]
    results: list[dict[str, Any]] = json.loads(found[0][1])
    return results


def check(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=CLOSE), what
    assert found["norms"] == pytest.approx(expected["norms"], rel=CLOSE), what
    assert found["weights"] == pytest.approx(expected["weights"], rel=CLOSE), what


@pytest.mark.long
@pytest.mark.loopback
def test_twenty_steps_have_the_losses_of_one_process() -> None:
    cases = ["sharded", "kept whole", "tensor"]
    found = together(*([case, "", 0, 20] for case in cases))
    expected = run("alone", "", World(), 0, 20)
    assert expected["losses"][-1] < 0.6 * expected["losses"][0]  # there was something to learn
    for case, each in zip(cases, found, strict=True):
        check(each, expected, case)


@pytest.mark.loopback
@pytest.mark.long
@pytest.mark.parametrize(
    "asked",
    [
        [
            ["sharded", "tied norms", 0, 3],
            ["sharded", "biases moe", 1, 3],
            ["sharded", "packed lora tied", 1, 3],
            ["sharded", "only head", 0, 3],
            ["expert", "moe tied", 1, 6],
        ],
        [
            ["tensor", "tied norms", 0, 3],
            ["tensor", "biases moe", 1, 3],
            ["tensor", "lora tied", 1, 3],
            ["tensor", "only head", 0, 3],
        ],
    ],
    ids=["data and experts", "tensor"],
)
def test_tied_and_adapted_and_frozen_models_train_the_same(asked: list[list[Any]]) -> None:
    """The third entry is how many blocks are recomputed; alone, none is."""
    for (case, kind, _, steps), found in zip(asked, together(*asked), strict=True):
        check(found, run("alone", kind, World(), 0, steps), f"{case}, {kind}")


@pytest.mark.long
@pytest.mark.loopback
def test_spread_models_are_also_read_and_called_and_computed_in_bfloat16() -> None:
    found, half, adapted = together(["checks"], ["bfloat16", "", 0, 4], ["sharded", "narrow lora", 0, 4])
    assert found["name"] == "FSDPDecoder" and found["sharded"]
    assert found["away"] < 1e-5
    assert found["closed"]  # after a pass without gradients, parameters are the shards that are trained
    assert found["twice"] < 1e-5
    assert found["lent"] < 1e-5 and found["left"] == [2, 2]
    assert found["forward"] < 1e-5  # two processes read the same batch: gradients are sums, so twice those of one
    assert found["exchanged"] < 1e-5  # exchanging once a step or after each micro-batch is the same sum
    assert "norm.weight" in found["refused"] and "different weights" in found["refused"]
    expected = run("alone", "", World(), 0, 4)
    assert half["losses"] == pytest.approx(expected["losses"], rel=0.02)
    assert half["losses"] != pytest.approx(expected["losses"], abs=1e-6)  # it was not computed in float32
    narrow = run("alone", "narrow lora", World(), 0, 4)  # float32 side paths beside a bfloat16 base
    assert adapted["losses"] == pytest.approx(narrow["losses"], rel=0.02)
