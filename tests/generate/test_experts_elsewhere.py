"""Experts in a file: bit for bit what the same model gives with everything in memory, whatever the budget and the order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchard.cache.experts import POLICIES, BudgetTooSmall, Records, RecordsUnreadable, Resident, policy_named
from orchard.cache.experts.misses import Misses, misses_named
from orchard.cache.experts.prefetch import History, NextGates, Nothing, Prefetcher, Threshold
from orchard.core.errors import UnsupportedPair
from orchard.generate.experts import ExpertsProgram
from orchard.generate.experts_file import expert_steps, without_experts, write_experts
from orchard.generate.experts_trace import Recorder
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.protocol import Work
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.formats import Int4, Int8, Plain
from orchard.nn.linear import GroupedLinear, Linear
from orchard.nn.moe import MoE, TopK
from orchard.nn.stack import Block, Stack
from orchard.ops.kernels.native import library, why_not
from orchard.ops.plan.steps import Plan

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())
FORMATS: dict[str, Any] = {"f32": Plain.Config(), "q8": Int8.Config(group=32, half=True), "q4": Int4.Config(group=32)}
LAYERS, EXPERTS, K = 3, 6, 2


def decoder(name: str = "q4") -> Decoder:
    torch.manual_seed(5)
    mlp = MoE.Config(hidden_dim=64, experts=EXPERTS, router=TopK.Config(k=K))
    layers = [
        Block.Config(mixer=Attention.Config(heads=4, kv_heads=2, head_dim=16), mlp=mlp.clone()) for _ in range(LAYERS)
    ]
    tree = Decoder.Config(vocab=96, dim=64, context=256, stack=Stack.Config(layers=layers), head=None).complete()
    tree = tree.rewrite(GroupedLinear, lambda node: node.clone(format=FORMATS[name].clone()))
    model = tree.build().eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear):
            module.assign(torch.randn(module.shape) * 0.3)
    return model


@pytest.fixture(scope="module", params=list(FORMATS))
def plan(request: pytest.FixtureRequest) -> Plan:
    return lower(decoder(request.param))


@pytest.fixture(scope="module")
def path(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("experts") / "experts"
    write_experts(found, plan, {"model": "tiny"})
    return found


def elsewhere(
    plan: Plan,
    path: Path,
    slots: int,
    policy: str = "least-stale",
    prefetcher: Prefetcher | None = None,
    misses: Misses | None = None,
    threads: int = 1,
) -> NativeRunner:
    records = Records.open(path)
    resident = Resident(records, slots * records.record_bytes, policy_named(policy), working_set=K)
    program = ExpertsProgram(without_experts(plan), resident, prefetcher=prefetcher, misses=misses, threads=threads)
    return NativeRunner(program.plan, program=program)


def answers(runner: NativeRunner, steps: int = 6) -> list[np.ndarray]:
    """Two prompts of different lengths read in pieces, then tokens for both together."""
    slots = runner.slots(2)
    prompts = [list(range(1, 41)), list(range(50, 57))]
    found = []
    for slot, prompt in enumerate(prompts):
        slots.open(slot, 100)
        for at in range(0, len(prompt), 16):
            part = prompt[at : at + 16]
            found.append(slots.run([Work(slot, part, int(at + 16 >= len(prompt)), prompt=True)])[0].copy())
    last = [3, 4]
    for _ in range(steps):
        scores = slots.run([Work(slot, (token,), 1) for slot, token in enumerate(last)])
        found += [table.copy() for table in scores]
        last = [int(table[-1].argmax()) for table in scores]
    return found


@pytest.fixture(scope="module")
def whole(plan: Plan) -> list[np.ndarray]:
    return answers(NativeRunner(plan, threads=1))


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return len(left) == len(right) and all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("slots", [K, 5, LAYERS * EXPERTS])
@pytest.mark.parametrize("threads", [1, 2])
def test_bit_identical_at_any_budget(plan: Plan, path: Path, whole: list[np.ndarray], slots: int, threads: int) -> None:
    runner = elsewhere(plan, path, slots, threads=threads)
    assert same(answers(runner), whole)
    assert runner.plan.elsewhere
    assert not any("mlp.gate" in name for name in runner.plan.tensors)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_bit_identical_with_any_policy(plan: Plan, path: Path, whole: list[np.ndarray], policy: str) -> None:
    assert same(answers(elsewhere(plan, path, 7, policy)), whole)


@pytest.mark.parametrize("prefetcher", [Nothing(), NextGates(2, extra=1), History(1), Threshold(1, 0.2)])
def test_bit_identical_with_any_prefetcher(
    plan: Plan, path: Path, whole: list[np.ndarray], prefetcher: Prefetcher
) -> None:
    runner = elsewhere(plan, path, 8, prefetcher=prefetcher)
    assert same(answers(runner), whole)
    counters = runner.program.resident.counters  # type: ignore[attr-defined]
    assert (counters.prefetched > 0) == (prefetcher.lookahead > 0)


def test_what_is_in_memory_is_not_read_again(plan: Plan, path: Path) -> None:
    runner = elsewhere(plan, path, LAYERS * EXPERTS, prefetcher=Nothing())
    answers(runner)
    records = runner.program.resident.records  # type: ignore[attr-defined]
    assert 0 < records.reads <= LAYERS * EXPERTS
    before = records.reads
    answers(runner)
    assert records.reads == before


@pytest.mark.parametrize("name", ["substitute", "skip"])
def test_lossy_misses_read_less_and_change_little(plan: Plan, path: Path, whole: list[np.ndarray], name: str) -> None:
    exact = elsewhere(plan, path, 10, prefetcher=Nothing())
    lossy = elsewhere(plan, path, 10, prefetcher=Nothing(), misses=misses_named(name))
    answers(exact)
    found = answers(lossy)
    assert all(np.isfinite(table).all() for table in found)
    assert not same(found, whole)
    counters = lossy.program.resident.counters  # type: ignore[attr-defined]
    assert getattr(counters, "substituted" if name == "substitute" else "skipped") > 0
    assert counters.reads < exact.program.resident.counters.reads  # type: ignore[attr-defined]


def test_a_lost_file_harms_one_call_only(plan: Plan, path: Path, whole: list[np.ndarray], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(path.read_bytes())
    runner = elsewhere(plan, mine, K)
    data = mine.read_bytes()
    os.truncate(mine, 8192)
    with pytest.raises(RecordsUnreadable):
        answers(runner)
    mine.write_bytes(data)
    assert same(answers(runner), whole)


def test_records_of_another_model_and_small_budgets_are_refused(plan: Plan, path: Path) -> None:
    records = Records.open(path)
    with pytest.raises(BudgetTooSmall):
        Resident(records, K * records.record_bytes - 1, working_set=K)
    other = lower(_wider())
    with pytest.raises(UnsupportedPair, match="does not hold"):
        ExpertsProgram(without_experts(other), Resident(records, 1 << 30))


def _wider() -> Decoder:
    mlp = MoE.Config(hidden_dim=96, experts=EXPERTS)
    blocks = [Block.Config(mixer=Attention.Config(heads=4, kv_heads=2, head_dim=16), mlp=mlp) for _ in range(LAYERS)]
    stack = Stack.Config(layers=blocks)
    model: Decoder = Decoder.Config(vocab=96, dim=64, context=256, stack=stack, head=None).build()
    return model


@pytest.fixture
def recorded(plan: Plan, path: Path) -> Iterator[tuple[NativeRunner, Recorder]]:
    runner = elsewhere(plan, path, 8, prefetcher=NextGates(1))
    recorder = Recorder(expert_steps(plan), lookahead=2)
    runner.program.recorder = recorder  # type: ignore[attr-defined]
    yield runner, recorder


def test_a_trace_is_what_was_chosen(recorded: tuple[NativeRunner, Recorder]) -> None:
    runner, recorder = recorded
    answers(runner, steps=6)
    trace = recorder.trace("tiny")
    assert trace.chosen.shape == (12, LAYERS, K)  # six passes of two tokens; the prompts drop rows
    assert trace.passes.tolist() == sorted([*range(6)] * 2)
    assert (trace.ahead[:, 0, 0] >= 0).all() and (trace.ahead[:, 0, 1] == -1).all()
    assert (trace.ahead[:, 1:, :1] >= 0).all()
    assert np.allclose(trace.scores.sum(-1), 1, atol=1e-5)
    assert (np.diff(trace.ahead_scores[:, 1:, 0], axis=-1) <= 0).all()
