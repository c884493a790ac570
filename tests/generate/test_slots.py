"""Slots: sequences that come and go, grow, are copied and go back, and what each is given by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.codecs import Int8
from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.context import Context
from orchard.core.errors import UsageError
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.protocol import Use, Work
from orchard.generate.torch_forward import TorchRunner
from tests.generate.test_native_runner import Twice, small

IDS = np.random.default_rng(0).integers(0, 96, 3000).tolist()
STORES: dict[str, Any] = {
    "plain": lambda: Store.Config(),
    "int8": lambda: Store.Config(codec=Int8.Config()),
    "ring": lambda: Store.Config(policy=Window.Config(window=48, sinks=2)),
    "int8 ring": lambda: Store.Config(codec=Int8.Config(), policy=Window.Config(window=48, sinks=2)),
}


@pytest.fixture(scope="module", params=sorted(STORES))
def native(request: pytest.FixtureRequest) -> NativeRunner:
    return NativeRunner(lower(small(STORES[request.param](), Store.Config(), window=70)), threads=1)


@pytest.fixture(scope="module")
def plain() -> NativeRunner:
    return NativeRunner(lower(small(Store.Config(), Store.Config())), threads=1)


def read(slots: Any, slot: int, ids: Sequence[int], cuts: Sequence[int] = ()) -> np.ndarray:
    """Scores after a prompt, from where the slot stands."""
    at = slots.lengths[slot]
    for cut in [*[cut for cut in cuts if at < cut < len(ids)], len(ids)]:
        (scores,) = slots.run([Work(slot, ids[at:cut], int(cut == len(ids)), prompt=True)])
        at = cut
    return scores[0].copy()


def alone(runner: Any, ids: Sequence[int], more: Sequence[int] = ()) -> np.ndarray:
    """Scores after a prompt and an answer that have the slots to themselves, and memory for all tokens at once."""
    slots = runner.slots(1)
    slots.open(0, len(ids) + len(more) + 1)
    scores = read(slots, 0, ids)
    for token in more:
        scores = slots.run([Work(0, (token,), 1)])[0][0].copy()
    return scores


def test_sequences_of_all_lengths_in_one_call(native: NativeRunner) -> None:
    slots = native.slots(5)
    lengths = [3, 700, 64, 1300, 511]
    for slot, length in enumerate(lengths):
        slots.open(slot, length + 40)
        read(slots, slot, IDS[slot : slot + length], [100, 612])
    for turn in range(3):
        found = slots.run([Work(slot, (IDS[turn],), 1) for slot in range(5)])
    for slot, length in enumerate(lengths):
        assert np.array_equal(found[slot][0], alone(native, IDS[slot : slot + length], IDS[:3])), length


def test_growing_past_its_memory_changes_nothing(native: NativeRunner) -> None:
    slots = native.slots(2)
    slots.open(1, 1200)
    read(slots, 1, IDS[:40])
    before = slots.used
    for start in range(40, 640, 60):
        scores = slots.run([Work(1, IDS[start : start + 60], 1)])[0]
    assert np.array_equal(scores[0], alone(native, IDS[:40], IDS[40:640]))
    assert before < slots.used <= slots.nbytes(640) + 4096
    assert slots.nbytes(10) < slots.nbytes(600) <= slots.nbytes(1100)
    slots.close(1)
    assert slots.used == 0


def test_many_tokens_of_an_answer_at_once(native: NativeRunner) -> None:
    slots = native.slots(2)
    for slot in (0, 1):
        slots.open(slot, 900)
        read(slots, slot, IDS[:50])
    both = [Work(0, IDS[100:660], 3), Work(1, IDS[100:103], 1)]
    first, second = slots.run(both)
    assert first.shape == (3, 96) and slots.lengths == [610, 53]
    assert np.array_equal(second[0], alone(native, IDS[:50], IDS[100:103]))
    for place in range(3):
        assert np.array_equal(first[place], alone(native, IDS[:50], IDS[100 : 658 + place]))


def test_going_back(native: NativeRunner) -> None:
    slots = native.slots(1)
    slots.open(0, 300)
    read(slots, 0, IDS[:90])
    slots.run([Work(0, (5, 6, 7), 1)])
    slots.run([Work(0, (1, 2, 3, 4), 4)])
    slots.back(0, 91)
    assert slots.lengths == [91]
    assert np.array_equal(slots.run([Work(0, (8,), 1)])[0][0], alone(native, IDS[:90], (5, 8)))
    for bad in (-1, 93):
        with pytest.raises(ValueError, match="cannot go back"):
            slots.back(0, bad)


@pytest.mark.parametrize("tokens", [1, 31, 64, 200, 599])
def test_a_copied_beginning(tokens: int, native: NativeRunner) -> None:
    slots = native.slots(3)
    slots.open(0, 700)
    read(slots, 0, IDS[:600])
    slots.open(2, 1500)
    done = slots.copy(0, 2, tokens)
    assert done or native.plan.stores[0].keep, "only rings may have lost it"
    if not done:
        assert slots.lengths[2] == 0
    other = [*IDS[:tokens], *IDS[2000:2060]]
    assert np.array_equal(read(slots, 2, other), alone(native, other))
    assert np.array_equal(slots.run([Work(0, (9,), 1)])[0][0], alone(native, IDS[:600], (9,)))


def test_what_cannot_be_copied(plain: NativeRunner) -> None:
    slots = plain.slots(3)
    slots.open(0, 100)
    read(slots, 0, IDS[:50])
    slots.run([Work(0, (1, 2), 1)])
    slots.open(1, 60)
    assert not slots.copy(0, 1, 51), "answers are not copied"
    assert slots.copy(0, 1, 40) and not slots.copy(0, 1, 40)
    slots.open(2, 30)
    assert not slots.copy(0, 2, 40), "longer than it may get"
    with pytest.raises(ValueError, match="not free"):
        slots.open(2, 30)
    with pytest.raises(ValueError, match="is free"):
        plain.slots(1).run([Work(0, (1,), 1)])


def test_kept_beginnings(native: NativeRunner) -> None:
    slots = native.slots(2)
    slots.open(0, 400)
    read(slots, 0, IDS[:200])
    held = slots.hold(0, 192)
    assert held is not None and held.ids == tuple(IDS[:192]) and native.fits(held)
    assert slots.hold(0, 201) is None and slots.hold(0, 0) is None
    assert slots.open(1, 900, Use(held, 192)) == 192 == slots.lengths[1]
    other = [*IDS[:192], *IDS[900:1000]]
    assert np.array_equal(read(slots, 1, other), alone(native, other))
    again = slots.hold(1, 256)
    assert again is not None and again.ids == tuple(other[:256])


def test_variants_share_slots(plain: NativeRunner) -> None:
    torch.manual_seed(9)
    other = NativeRunner(lower(small(Store.Config(), Store.Config(), heads=4)), threads=1)
    plain.add_variant("other", other)
    slots = plain.slots(3)
    names = [None, "other", None]
    for slot, name in enumerate(names):
        slots.open(slot, 200, variant=name)
    found = slots.run([Work(slot, IDS[: 20 + slot], 1, prompt=True) for slot in range(3)])
    found = [scores.copy() for scores in found]
    more = slots.run([Work(slot, (7, 8), 2) for slot in (2, 1, 0)])
    for slot, name in enumerate(names):
        runner = plain if name is None else other
        assert np.array_equal(found[slot][0], alone(runner, IDS[: 20 + slot]))
        assert np.array_equal(more[2 - slot][1], alone(runner, IDS[: 20 + slot], (7, 8)))
    assert not slots.copy(0, 1, 10)
    with pytest.raises(UsageError, match="no adapter called 'x'"):
        plain.slots(1).open(0, 9, variant="x")
    plain.drop_variant("other")


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_what_the_head_read(kind: str) -> None:
    model = small(Store.Config(), Store.Config(), Store.Config(owner=1))
    runner: Any = (
        NativeRunner(lower(model, stores="f32"), threads=1, level=2) if kind == "native" else TorchRunner(model)
    )
    slots = runner.slots(2)
    slots.open(0, 60)
    slots.open(1, 60)
    assert slots.hidden(0) is None
    slots.run([Work(1, IDS[5:9], 1, prompt=True), Work(0, IDS[:30], 1, prompt=True)])
    for slot, ids in ((0, IDS[:30]), (1, IDS[5:9])):
        with torch.inference_mode():
            exact = model.hidden(torch.tensor([ids]), Context.whole(torch.tensor([ids])))[0, -1].numpy()
        found = slots.hidden(slot)
        assert found is not None and found.dtype == np.float32
        assert np.abs(found - exact).max() < 1e-3 * np.abs(exact).max()
    slots.run([Work(0, (3, 4), 2)])
    with torch.inference_mode():
        whole = torch.tensor([[*IDS[:30], 3, 4]])
        exact = model.hidden(whole, Context.whole(whole))[0, -1].numpy()
    found = slots.hidden(0)
    assert found is not None and np.abs(found - exact).max() < 1e-3 * np.abs(exact).max()
    assert slots.hidden(1) is None


def test_a_plan_with_torch_steps() -> None:
    tree = small(Store.Config(), Store.Config(), Store.Config()).config
    tree.stack.layers[1].mlp = Twice.Config()
    torch.manual_seed(5)
    model = tree.build().eval().requires_grad_(False)
    runner = NativeRunner(lower(model), decoder=lambda: model, threads=1)
    slots = runner.slots(3)
    for slot in range(3):
        slots.open(slot, 60)
    slots.run([Work(slot, IDS[slot : slot + 9], 1, prompt=True) for slot in range(3)])
    slots.run([Work(1, (4, 5, 6), 3)])
    slots.back(1, 10)
    found = slots.run([Work(slot, (5,), 1) for slot in (2, 1, 0)])
    assert np.array_equal(found[1][0], alone(runner, IDS[1:10], (4, 5)))
    assert np.array_equal(found[0][0], alone(runner, IDS[2:11], (5,)))
    assert slots.hold(0, 9) is None and not slots.copy(0, 1, 5)


@pytest.mark.parametrize("store", ["plain", "ring"])
def test_torch_slots(store: str) -> None:
    runner = TorchRunner(small(STORES[store](), Store.Config()))
    slots = runner.slots(2)
    slots.open(0, 80)
    slots.open(1, 90)
    slots.run([Work(0, IDS[:20], 1, prompt=True), Work(1, IDS[:3], 0, prompt=True)])
    first, second = slots.run([Work(0, (1, 2, 3), 2), Work(1, (4,), 1)])
    assert np.array_equal(first[1], alone(runner, IDS[:20], (1, 2, 3))) and first.shape == (2, 96)
    assert np.array_equal(second[0], alone(runner, IDS[:3], (4,)))
    assert slots.goes_back == (store == "plain") and slots.nbytes(100) > 0
    if slots.goes_back:
        slots.back(0, 21)
        assert np.array_equal(slots.run([Work(0, (2,), 1)])[0][0], alone(runner, IDS[:20], (1, 2)))
    slots.close(0)
    assert slots.lengths == [0, 4] and not slots.copy(1, 0, 2) and slots.hold(1, 2) is None


ACTIONS = st.tuples(
    st.sampled_from(["open", "read", "write", "back", "copy", "close"]), st.integers(0, 3), st.integers(1, 700)
)


@settings(max_examples=40)
@given(actions=st.lists(ACTIONS, max_size=25))
def test_any_history_gives_what_the_tokens_give(actions: list[tuple[str, int, int]]) -> None:
    native = NATIVE.setdefault(0, NativeRunner(lower(small(Store.Config(), Store.Config())), threads=1))
    slots = native.slots(4)
    prompts: dict[int, list[int]] = {}
    answers: dict[int, list[int]] = {}
    for action, slot, number in actions:
        if action == "open" and slot not in prompts:
            slots.open(slot, 2900)
            prompts[slot], answers[slot] = [], []
        elif slot not in prompts:
            continue
        elif action == "read" and not answers[slot] and len(prompts[slot]) < 1400:
            slots.run([Work(slot, IDS[number : 2 * number], 0, prompt=True)])
            prompts[slot] += IDS[number : 2 * number]
        elif action == "write" and prompts[slot] and len(answers[slot]) < 900:
            slots.run([Work(slot, IDS[: number // 20 + 1], 1)])
            answers[slot] += IDS[: number // 20 + 1]
        elif action == "back" and answers[slot]:
            answers[slot] = answers[slot][: number % len(answers[slot])]
            slots.back(slot, len(prompts[slot]) + len(answers[slot]))
        elif action == "copy":
            other = (slot + 1) % 4
            done = other in prompts and slots.copy(slot, other, number)
            if done:
                prompts[other], answers[other] = prompts[slot][:number], []
        elif action == "close":
            slots.close(slot)
            del prompts[slot], answers[slot]
    assert slots.lengths == [len(prompts.get(slot, [])) + len(answers.get(slot, [])) for slot in range(4)]
    live = [slot for slot in sorted(prompts) if prompts[slot]]
    found = slots.run([Work(slot, (11,), 1) for slot in live]) if live else []
    for slot, scores in zip(live, found, strict=True):
        fresh = native.slots(1)
        fresh.open(0, 2900)
        fresh.run([Work(0, prompts[slot], 0, prompt=True)])
        assert np.array_equal(fresh.run([Work(0, [*answers[slot], 11], 1)])[0][0], scores[0])


NATIVE: dict[int, NativeRunner] = {}
