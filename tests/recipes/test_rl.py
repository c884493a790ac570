"""The recipe `grpo`: what it asks for fits together, and a run of it learns and leaves what others can load."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import orchard
from orchard.core.config import BaseConfig
from orchard.core.errors import UsageError
from orchard.objectives import GroupNormal, LeaveOneOut
from orchard.recipes import get
from orchard.train.rollout_rewards import Length, Matches, ValidJson
from tests.tiny import tiny_gguf

SMALL: dict[str, Any] = {"steps": 3, "prompts": 4, "group": 4, "max_tokens": 4, "runner": "together"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf(tmp_path_factory.mktemp("base") / "tiny.gguf"))


def asked(folder: Path) -> str:
    path = folder / "asked.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": f"{n}"}) + "\n" for n in range(6)))
    return str(path)


def test_it_says_what_it_takes_and_survives_being_stored() -> None:
    function = get("grpo")
    doc = inspect.getdoc(function) or ""
    assert all(f"\n{argument}: " in doc for argument in inspect.signature(function).parameters)
    cfg = function("rows.jsonl", reward="regex", pattern=r"(\d+)", field="answer", lag=1)
    assert BaseConfig.from_dict(cfg.to_dict()) == cfg


@pytest.mark.parametrize("rank", [4, None])
def test_a_run_learns_and_leaves_what_can_be_loaded(tmp_path: Path, base: str, rank: int | None) -> None:
    cfg = get("grpo")(
        asked(tmp_path),
        base,
        reward="regex",
        pattern="[a-m]",
        r=rank,
        alpha=8.0,
        lr=2e-2,
        micro=2,
        **SMALL | {"steps": 8},
    )
    report = cfg.build(folder=tmp_path / "run").start()
    series = report.series
    assert series["ratio"] == pytest.approx([1.0] * 8, abs=1e-4) and series["staleness"] == [0.0] * 8
    assert series["kl"][0] == pytest.approx(0, abs=1e-5) and series["kl"][-1] > 1e-4, "the reference stays what it was"
    assert sum(series["reward"][-3:]) > sum(series["reward"][:3])
    if rank is None:
        assert orchard.load(tmp_path / "run" / "model").generate("3", max_tokens=4).usage.output <= 4
        return
    model = orchard.load(base)
    name = model.adapters.load(tmp_path / "run" / "adapter")
    assert model.adapters.model(name).generate("3", max_tokens=4).usage.output <= 4


def test_temperature_lag_and_advantages_reach_every_part(tmp_path: Path, base: str) -> None:
    data = asked(tmp_path)
    cfg: Any = get("grpo")(data, base, advantage="rloo", temperature=0.5, lag=1, kl=0.0, r=2, reward="length", **SMALL)
    assert isinstance(cfg.train.objective.aggregate, LeaveOneOut.Config) and not cfg.reference
    assert cfg.train.source.temperature == cfg.train.objective.temperature == 0.5
    report = cfg.build(folder=tmp_path / "run").start()
    assert report.series["staleness"] == [0.0, 1.0, 1.0] and report.series["ratio"][0] == pytest.approx(1, abs=1e-4)
    plain: Any = get("grpo")(data, advantage="dr-grpo", micro=3)
    assert plain.train.objective.aggregate == GroupNormal.Config(std=False) and plain.train.micro == 24


def test_judges_by_name(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    make = get("grpo")
    rewards = [
        make("x.jsonl", reward="json", schema=str(schema)),
        make("x.jsonl", reward="length", most=40),
        make("x.jsonl", reward="regex", pattern="a"),
    ]
    found = [cfg.train.source.reward for cfg in rewards]  # type: ignore[attr-defined]
    assert found[0] == ValidJson.Config(schema={"type": "object"})
    assert found[1] == Length.Config(most=40, soft=10) and found[2] == Matches.Config(pattern="a")
    wrong: list[dict[str, Any]] = [
        {"reward": "exat"},
        {"reward": "regex"},
        {"pattern": "a"},
        {"reward": "length", "schema": str(schema)},
        {"reward": "json", "schema": str(tmp_path / "none.json")},
        {"advantage": "ppo"},
        {"data": "x.txt"},
    ]
    for arguments in wrong:
        with pytest.raises(UsageError) as said:
            make(**{"data": "x.jsonl"} | arguments)
        assert said.value.hint
