"""Sequences on a GPU's paged stores, against the plain interpreter of plans: by the torch twins; by the kernels with a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.bench.shapes import Shape, random_plan
from orchard.core.errors import ContextOverflow, UnsupportedPair, UsageError
from orchard.generate.cuda.pages import PagedStores
from orchard.generate.cuda.runner import CudaRunner
from orchard.generate.cuda.slots import CudaSlots
from orchard.generate.protocol import Work
from orchard.ops.kernels.packing import pack_plain
from orchard.ops.kernels.triton.rows import PAGE
from orchard.ops.plan.adapt import adapted
from orchard.ops.plan.check import check
from orchard.ops.plan.reference import Reference
from orchard.ops.plan.steps import Attend, Clip, Experts, Head, Matrix, Norm, Normalise, Plan, StoreSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 3e-3 if DEVICE == "cpu" else 5e-2
"""Keys and values near the middle of two bfloat16 numbers may go either way; with a float32 store the two agree far better."""
SHAPE = Shape(layers=3, width=64, hidden=96, heads=6, kv_heads=2, head=16, vocab=300, context=256)


def make_plan(kind: str = "q8", **changes: Any) -> Plan:
    """A small plan whose scores depend on every part of it: weights large, stores and attention as asked for."""
    plan = random_plan(replace(SHAPE, **changes), "q8" if kind in ("bf16", "f32") else kind, group=32)
    random = np.random.default_rng(3)
    for name, tensor in plan.tensors.items():
        if tensor.dtype == np.uint8:
            size = 64 + 32 * 32 * int(plan_bits(plan, kind)) // 8
            scales = np.full(32, 0.09 * 8 / 2 ** (plan_bits(plan, kind) - 1) / math.sqrt(8), np.float16)
            tensor.reshape(-1, size)[:, :64] = scales.view(np.uint8)
        elif name != "rotary":
            tensor[:] = random.uniform(0.5, 1.5, len(tensor))
    if kind in ("bf16", "f32"):
        plan = dense_plan(plan, kind)
    check(plan)
    return plan


def plan_bits(plan: Plan, kind: str) -> int:
    return {"q4": 4, "q2": 2}.get(kind, 8)


def dense_plan(plan: Plan, kind: str) -> Plan:
    """The same with dense weights of random values."""
    random = np.random.default_rng(4)
    tensors = dict(plan.tensors)

    def of(matrix: Matrix) -> Matrix:
        values = random.normal(size=(matrix.rows, matrix.cols)).astype(np.float32) / math.sqrt(matrix.cols)
        if matrix.tensor != "table":
            tensors[matrix.tensor] = pack_plain(values, kind)
            return replace(matrix, kind=kind, group=1)
        return matrix  # one table for both ends

    steps = []
    for step in plan.steps:
        if hasattr(step, "outputs"):
            step = replace(step, outputs=tuple(replace(out, matrix=of(out.matrix)) for out in step.outputs))
        elif hasattr(step, "up") and hasattr(step, "norm"):
            step = replace(step, gate=of(step.gate), up=of(step.up))
        steps.append(step)
    return replace(plan, steps=steps, tensors=tensors)


def attending(plan: Plan, stores: dict[str, Any], **changes: Any) -> Plan:
    """The same with other attention in every layer."""
    steps = [replace(step, **changes) if isinstance(step, Attend) else step for step in plan.steps]
    made = replace(plan, steps=steps, stores=[replace(spec, **stores) for spec in plan.stores])
    check(made)
    return made


def far(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab, count).tolist()


PLANS = {
    "q8": lambda: make_plan("q8"),
    "q4": lambda: make_plan("q4"),
    "q2": lambda: make_plan("q2"),
    "bf16": lambda: make_plan("bf16"),
    "f32": lambda: make_plan("f32"),
    "window": lambda: attending(make_plan(), {}, window=20, softcap=4.0),
    "ring": lambda: attending(make_plan(), {"keep": 70}),
    "sinks": lambda: attending(make_plan(), {"keep": 16, "sinks": 3}),
    "int8": lambda: attending(make_plan(), {"codec": "int8"}),
    "f32 store": lambda: attending(make_plan(), {"codec": "f32"}),
}


@pytest.mark.parametrize("name", list(PLANS))
def test_the_same_as_the_plain_interpreter(name: str) -> None:
    """Two prompts together, in two cuts; then single tokens; then several at once; then back and another way."""
    plan = PLANS[name]()
    slots, plain = CudaRunner(plan, device=DEVICE).slots(3), Reference(plan, 2, SHAPE.context)
    long, short = ids(130, 1), ids(40, 2)
    for slot, length in ((2, 200), (0, 200)):
        slots.open(slot, length)
    slots.run([Work(2, long[:100], 0, True), Work(0, short[:5], 0, True)])
    found = slots.run([Work(2, long[100:], 1, True), Work(0, short[5:], 3, True)])
    wanted = plain.run([*long, *short], [1] * 130 + [0] * 40, [*range(130), *range(40)], [129, 167, 168, 169])
    assert far(found[0], wanted[:1]) < (2e-5 if name == "f32 store" and DEVICE == "cpu" else NEAR)
    assert far(found[1], wanted[1:]) < NEAR
    assert slots.lengths == [40, 0, 130]
    found = slots.run([Work(0, [7], 1), Work(2, [8], 1)])
    wanted = plain.run([7, 8], [0, 1], [40, 130], [0, 1])
    assert far(np.concatenate(found), wanted) < NEAR
    found = slots.run([Work(0, [9, 10, 11], 2), Work(2, [12], 1)])
    wanted = plain.run([9, 10, 11, 12], [0, 0, 0, 1], [41, 42, 43, 131], [1, 2, 3])
    assert far(np.concatenate(found), wanted) < NEAR
    slots.back(0, 41)
    best = slots.greedy([Work(0, [20]), Work(2, [21])])
    wanted = plain.run([20, 21], [0, 1], [41, 132], [0, 1])
    assert [wanted[row, token] for row, token in enumerate(best)] == pytest.approx(wanted.max(1), abs=0.05)


def test_layers_that_share_a_store_and_narrow_rows() -> None:
    """The last layer reads the store of the first, after rows nobody wants were dropped."""
    plan = make_plan()
    steps = list(plan.steps)
    narrow = steps.pop(-2)
    places = [place for place, step in enumerate(steps) if isinstance(step, Attend)]
    steps[places[2]] = replace(steps[places[2]], k=None, v=None, store=0)
    linear = steps[places[2] - 1]
    steps[places[2] - 1] = replace(linear, outputs=linear.outputs[:1])
    steps.insert(places[2] - 1, narrow)
    plan = replace(plan, steps=steps, stores=plan.stores[:2])
    check(plan)
    slots, plain = CudaRunner(plan, device=DEVICE).slots(2), Reference(plan, 2, 256)
    slots.open(0, 100)
    slots.open(1, 100)
    slots.run([Work(0, ids(20), 0, True)])
    found = slots.run([Work(0, ids(30, 1), 2, True), Work(1, ids(9, 2), 1, True)])
    plain.run(ids(20), [0] * 20, range(20), [19])
    rows = [0] * 30 + [1] * 9, [*range(20, 50), *range(9)]
    wanted = plain.run([*ids(30, 1), *ids(9, 2)], *rows, [28, 29, 38])
    assert far(np.concatenate(found), wanted) < NEAR


def test_steps_that_stand_alone() -> None:
    plan = make_plan()
    plan.tensors["alone"] = np.linspace(0.5, 2, 32, dtype=np.float32)
    extra = [Clip(0, 1.5), Normalise(0, 0, Norm("alone", 1e-5), groups=2, add=True)]
    plan = replace(plan, steps=[*plan.steps[:-2], *extra, *plan.steps[-2:]])
    slots, plain = CudaRunner(plan, device=DEVICE).slots(1), Reference(plan, 1, 64)
    slots.open(0, 50)
    found = slots.run([Work(0, ids(12), 1, True)])
    assert far(found[0], plain.run(ids(12), [0] * 12, range(12), [11])) < NEAR
    head, hidden = plan.steps[-1], slots.hidden(0)
    assert isinstance(head, Head) and hidden is not None
    assert far(hidden, plain.normal(plain.buffers[0][-1], head.norm)) < NEAR


def test_a_beginning_is_shared_and_stays_whole() -> None:
    """A copy goes on in another way, and so does its source after going back: neither sees the other's tokens."""
    plan = make_plan()
    slots = CudaRunner(plan, device=DEVICE).slots(3)
    prompt = ids(150)
    for slot in range(2):
        slots.open(slot, 200)
    slots.run([Work(0, prompt, 0, True)])
    before = slots.free_bytes
    assert slots.copy(0, 1, 140)
    assert slots.free_bytes - before == slots.nbytes(2 * PAGE), "two whole pages are shared"
    assert not slots.copy(0, 1, 100), "the target holds more already"
    found = slots.run([Work(1, [*prompt[140:], 5], 1, True)])[0].copy()
    slots.back(0, 60)
    slots.run([Work(0, ids(80, 9), 0, True)])  # writes to a page that slot 1 has too
    again = slots.run([Work(1, [6], 1)])[0].copy()
    slots.open(2, 200)
    slots.run([Work(2, [*prompt, 5], 0, True)])
    assert far(again, slots.run([Work(2, [6], 1)])[0]) < NEAR
    slots.back(2, 150)
    assert far(found, slots.run([Work(2, [5], 1, True)])[0]) < NEAR
    for slot in range(3):
        slots.close(slot)
    slots.open(0, 200)
    assert slots.free_bytes == before + slots.nbytes(200)
    assert slots.used == slots.nbytes(200)


def test_many_steps_are_as_many_single_ones() -> None:
    slots = CudaRunner(make_plan(), device=DEVICE).slots(4)
    for slot in range(4):
        slots.open(slot, 90)
    slots.run([Work(slot, ids(20 + slot % 2, slot % 2), 0, True) for slot in range(4)])
    singles = [[5], [6]]
    for _ in range(9):
        best = slots.greedy([Work(0, singles[0][-1:]), Work(1, singles[1][-1:])])
        for tokens, token in zip(singles, best):
            tokens.append(token)
    assert slots.greedy_many([Work(2, [5]), Work(3, [6])], 9) == [tokens[1:] for tokens in singles]
    assert slots.lengths == [29, 30, 29, 30]
    again = slots.run([Work(slot, [7], 1) for slot in (1, 3)])
    assert far(again[0], again[1]) < 1e-5
    with pytest.raises(UsageError):
        slots.greedy_many([Work(2, [5])], 70)


def test_variants_run_on_the_same_stores() -> None:
    plan = make_plan("q8")
    random = np.random.default_rng(0)
    side = random.normal(size=(4, 64)).astype(np.float32), random.normal(size=(96, 4)).astype(np.float32), 0.5
    other = adapted(plan, {"1.attn_q": [side]})
    runner = CudaRunner(plan, device=DEVICE)
    runner.add_variant("other", runner.adapted(other))
    slots = runner.slots(2)
    slots.open(0, 50)
    slots.open(1, 50, variant="other")
    found = slots.run([Work(0, ids(20), 1, True), Work(1, ids(20), 1, True)])
    for place, each in enumerate((plan, other)):
        wanted = Reference(each, 1, 64).run(ids(20), [0] * 20, range(20), [19])
        assert far(found[place], wanted) < NEAR
    assert far(found[0], found[1]) > 3 * NEAR
    assert not slots.copy(0, 1, 20), "keys and values belong to a variant"
    runner.drop_variant("other")
    assert (
        far(slots.run([Work(1, [3], 1)])[0], Reference(other, 1, 64).run([*ids(20), 3], [0] * 21, range(21), [20]))
        < NEAR
    )
    slots.close(1)
    with pytest.raises(UsageError, match="no adapter called 'other'"):
        slots.open(1, 50, variant="other")


def test_what_cannot_be_is_refused() -> None:
    plan = make_plan()
    runner = CudaRunner(plan, device=DEVICE)
    slots = runner.slots(2, kv_bytes=4 * runner.slots(1).nbytes(PAGE))
    with pytest.raises(ContextOverflow):
        slots.open(0, 257)
    slots.open(0, 3 * PAGE)
    with pytest.raises(UsageError, match="not free"):
        slots.open(0, 10)
    with pytest.raises(UsageError, match="no memory"):
        slots.open(1, 2 * PAGE)
    slots.open(1, PAGE)
    for work in (Work(1, [], 0), Work(1, [1] * (PAGE + 1), 1), Work(1, [1], 2), Work(1, [SHAPE.vocab], 1)):
        with pytest.raises(UsageError):
            slots.run([work])
    slots.close(0)
    with pytest.raises(UsageError, match="not open"):
        slots.run([Work(0, [1], 1)])
    with pytest.raises(UsageError):
        slots.back(1, 5)
    with pytest.raises(UsageError, match="no memory for stores"):
        runner.slots(1, kv_bytes=10)


def test_steps_without_a_kernel_are_named() -> None:
    plan = make_plan()
    table = Matrix("x", "q8", 96, 64, group=32, count=4)
    router = Matrix("r", "f32", 4, 64)
    plan = replace(plan, steps=[*plan.steps[:-2], Experts(0, router, table, table, table, 2, 0), *plan.steps[-2:]])
    with pytest.raises(UnsupportedPair, match="experts"):
        CudaRunner(plan, device=DEVICE)


def test_a_missing_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no device"):
        CudaRunner(make_plan())


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["open", "close", "share", "own"]), st.integers(0, 3), st.integers(0, 3))))
def test_pages_are_never_lost_nor_given_twice(actions: list[tuple[str, int, int]]) -> None:
    """After any order of coming, going, sharing and writing, every page is free or has owners, and who wrote last is alone."""
    stores = PagedStores([StoreSpec(0, 1, 1, codec="f32")], 4, 4 * PAGE, 10, torch.device("cpu"))
    lengths: dict[int, int] = {}
    for action, slot, other in actions:
        try:
            if action == "open" and slot not in lengths:
                stores.open(slot, (other + 1) * PAGE)
                lengths[slot] = other + 1
            elif action == "close" and slot in lengths:
                stores.close(slot)
                del lengths[slot]
            elif action == "share" and slot != other and slot in lengths and other in lengths:
                stores.share(slot, other, min(lengths[slot], lengths[other]) * PAGE - 1)
            elif action == "own" and slot in lengths:
                stores.own(slot, 0, lengths[slot] * PAGE)
                mine = set(stores.table[slot, : lengths[slot]].tolist())
                theirs = {page for o in lengths if o != slot for page in stores.table[o, : lengths[o]].tolist()}
                assert not mine & theirs
        except UsageError:
            pass  # no memory, and nothing has happened
        used = {page for s in lengths for page in stores.table[s, : lengths[s]].tolist()}
        assert 0 not in used
        assert stores.free == 9 - len(used)
        assert stores.shared == sum(lengths.values()) - len(used)


def test_slots_is_what_the_engine_asks_for() -> None:
    from orchard.generate.protocol import Slots

    def takes(slots: Slots) -> None: ...

    made: CudaSlots = CudaRunner(make_plan(), device=DEVICE).slots(1)
    takes(made)
    wanted = [name for name in vars(Slots) if not name.startswith("_")]
    assert wanted and all(hasattr(made, name) for name in wanted)
