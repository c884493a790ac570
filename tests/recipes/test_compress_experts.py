"""`compress` with fewer experts: somebody else's mixture, round by round, foreseen, measured and taken up again after Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchard.recipes.compress import Compressed, compress, forecast
from orchard.recipes.compressing.plan import BadPlan, read_plan
from orchard.session.model import load
from orchard.weights.checkpoint import open_checkpoint
from tests.recipes.compressed_models import trained_folder

SMALL: dict[str, Any] = {
    "held": 64,
    "looked": 128,
    "length": 32,
    "rows": 4,
    "dtype": "float32",
    "device": "cpu",
    "tokens": 512,
}
PLAN = ["prune-experts:keep=0.5,rounds=2", "rtn:bits=8"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_folder(tmp_path_factory.mktemp("models") / "mixtral", "mixtral", steps=15)


@pytest.fixture(scope="module")
def made(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Compressed:
    return compress(base, PLAN, tmp_path_factory.mktemp("made") / "small.orchard", **SMALL)


def test_half_of_the_experts_end_to_end(base: Path, made: Compressed) -> None:
    with open_checkpoint(made.path) as checkpoint:
        tree: Any = checkpoint.config()
    assert [block.mlp.experts for block in tree.stack.layers] == [2, 2, 2]
    facts = made.to_dict()["steps"][0]
    assert facts["tokens"] == 512 + 128 and "KL while learning" in _report(made).series
    points = [point[0] for point in facts["curve"]]
    assert points == sorted(points) and points[-1] == facts["tokens"], "one curve over both rounds"
    assert 0 < facts["measured"]["all"]["kl"] < 2
    assert len(load(made.path, device="cpu").generate("Where is the apple?", max_tokens=4).ids) > 0
    _, found = forecast(base, PLAN, **SMALL)
    assert 0 <= found.size.file - made.bytes < 256
    rows = 3 * 2 * 64  # of routers, of two bytes each
    assert found.original.read - found.steps[0].most.read == 2 * rows, "a token reads the same but for those"


def _report(made: Compressed) -> Any:
    from orchard.core.report import Report

    return Report.load(made.to_dict()["report"])


@pytest.mark.long
def test_interrupted_in_any_round_it_goes_on(base: Path, made: Compressed, tmp_path: Path) -> None:
    stops: list[str] = []

    def told(step: int, point: Any) -> None:
        key = f"{len(rounds)}: {step}"
        taken.append(key)
        if key not in stops and step == 1:
            stops.append(key)
            raise KeyboardInterrupt

    def say(line: str) -> None:
        if line.startswith("learning"):
            rounds.append(line)

    target = tmp_path / "small.orchard"
    for _ in range(8):
        rounds: list[str] = []
        taken: list[str] = []
        try:
            again = compress(base, PLAN, target, say=say, told=(told,), **SMALL)
            break
        except KeyboardInterrupt:
            continue
    assert taken[0] == "2: 1", "a round that is done is not done again"
    assert stops == ["1: 1", "2: 1"] and again.path.read_bytes() == made.path.read_bytes()


def test_experts_go_without_learning_and_are_healed_by_the_next_step(base: Path, tmp_path: Path) -> None:
    plan = ["prune-experts:keep=0.5,by=euf,rounds=2,learn=false", "heal"]
    done = compress(base, plan, tmp_path / "healed.orchard", **SMALL)
    first, last = (one["measured"]["all"]["kl"] for one in done.to_dict()["steps"])
    assert done.to_dict()["steps"][0]["tokens"] == 0 and 0 < last < first


def test_plans_that_cannot_be(base: Path) -> None:
    with pytest.raises(BadPlan, match="each token asks 2"):
        forecast(base, ["prune-experts:keep=0.25"], **SMALL)
    with pytest.raises(BadPlan, match="eax"):
        read_plan("prune-experts:by=eax")
    with pytest.raises(BadPlan, match="changes nothing"):
        forecast(base, ["prune-experts:keep=1"], **SMALL)
