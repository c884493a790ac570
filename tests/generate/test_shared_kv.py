"""Layers that read the store of an earlier one: prompts stop there, and no answer, score or byte changes for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.codecs import Int8
from orchard.cache.store import Store
from orchard.generate import Engine, Request, Sampling
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.prefix import GRAIN
from orchard.generate.protocol import Work
from orchard.generate.speculative import Speculation
from orchard.generate.torch_forward import TorchRunner
from orchard.models.language.decoder import Decoder
from orchard.ops.kernels.native import library, why_not
from orchard.ops.plan import steps
from orchard.ops.plan.text import table, totals
from orchard.text.tokenizer import Tokenizer
from tests.generate.scheduling import all_told, alone, mixed_requests, runner_of
from tests.generate.test_native_exact import ids_of, read
from tests.generate.test_native_runner import small

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())
Make = Callable[..., Any]
OWN = {"plain": partial(Store.Config), "int8": partial(Store.Config, codec=Int8.Config())}
LEVELS = (0, 1, 2, 3)


def stores(codec: str, own: int = 2, shared: int = 2) -> list[Callable[[], Store.Config]]:
    """`own` layers that keep something, then some that read the last of these."""
    return [*[OWN[codec]] * own, *[partial(OWN[codec], owner=own - 1)] * shared]


def model(codec: str, **layers: int) -> Decoder:
    return small(*(store() for store in stores(codec, **layers)))


# Bits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("codec", sorted(OWN))
def test_a_token_gets_the_same_bits_in_any_cut_and_company(codec: str, level: int) -> None:
    native = NativeRunner(lower(model(codec)), threads=2, level=level)
    ids, other = ids_of(native.plan.vocab, 3 * GRAIN), ids_of(native.plan.vocab, 400)[200:]
    whole = read(native, ids, [])
    first = whole.first().copy()
    for cuts in ([1], [3, 4, 40, 191], [64], [17, 33, 70, 130]):
        assert np.array_equal(read(native, ids, cuts).first(), first), cuts
    slots = native.slots(3)
    for slot in range(3):
        slots.open(slot, 300)
    slots.run([Work(0, ids[:50], 0, prompt=True), Work(1, other, 1, prompt=True)])
    found = slots.run([Work(2, other[:7], 7, prompt=True), Work(0, ids[50:], 1, prompt=True)])
    assert np.array_equal(found[1], first)
    steps = [whole.step([token]).copy() for token in (5, 6, 7, 8)]
    slots.run([Work(0, (5,), 0), Work(1, (3, 3, 3), 3)])  # a token whose scores nobody wants
    found = slots.run([Work(1, (4,), 1), Work(0, (6, 7, 8), 2)])  # as a guess is checked: scores of several
    assert np.array_equal(found[1], np.concatenate(steps[2:]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("codec", sorted(OWN))
def test_scores_of_a_whole_prompt_are_those_of_its_beginnings(codec: str, level: int) -> None:
    """Scores of every place (`echo`): nothing is left out then, and each is what the prompt up to there would have given."""
    native = NativeRunner(lower(model(codec)), threads=1, level=level)
    ids = ids_of(native.plan.vocab, 70)
    all_of_them = native.scores(ids)
    for length in (1, 2, 33, 69, 70):
        assert np.array_equal(read(native, ids[:length], []).first()[0], all_of_them[length - 1])


@pytest.mark.parametrize("codec", sorted(OWN))
def test_kept_beginnings(codec: str) -> None:
    from orchard.generate.protocol import Use

    native = NativeRunner(lower(model(codec)), threads=1)
    ids = ids_of(native.plan.vocab, 4 * GRAIN)
    held = read(native, ids[: 3 * GRAIN], [50]).hold(0, 3 * GRAIN)
    assert held is not None and native.fits(held)
    cold, hot = read(native, ids, []), read(native, ids, [201], Use(held, 2 * GRAIN))
    assert hot.starts == [2 * GRAIN] and np.array_equal(cold.first(), hot.first())
    assert np.array_equal(cold.step([7]), hot.step([7]))
    own = NativeRunner(lower(model(codec, own=4, shared=0)), threads=1)
    all_layers = read(own, ids[: 3 * GRAIN], []).hold(0, 3 * GRAIN)
    assert all_layers is not None
    assert 2 * (held.nbytes - 8 * 3 * GRAIN) == all_layers.nbytes - 8 * 3 * GRAIN


@settings(max_examples=15)
@given(st.lists(st.integers(1, 199), max_size=5), st.sampled_from(sorted(OWN)))
def test_any_cut(cuts: list[int], codec: str) -> None:
    if codec not in NATIVE:
        NATIVE[codec] = NativeRunner(lower(model(codec)), threads=1)
    ids = ids_of(NATIVE[codec].plan.vocab, 200)
    assert np.array_equal(read(NATIVE[codec], ids, cuts).first(), read(NATIVE[codec], ids, []).first())


NATIVE: dict[str, NativeRunner] = {}


# Engines --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.parametrize("codec", sorted(OWN))
def test_many_requests(kind: str, codec: str, decoder: Make, tokenizer: Tokenizer) -> None:
    runner = runner_of(kind, decoder, stores=stores(codec, own=1))
    requests = mixed_requests(10, seed=2, longest=90)
    want = all_told(alone(runner, tokenizer, requests))
    engine = Engine(runner, tokenizer, slots=6)
    assert all_told(engine.answer(requests)) == want
    assert all_told(engine.answer(requests)) == want, "beginnings are kept by now"


@pytest.mark.parametrize("kind", ["lookup", "draft", "early"])
@pytest.mark.parametrize("codec", sorted(OWN))
def test_guesses_change_no_token(kind: Any, codec: str, decoder: Make, tokenizer: Tokenizer) -> None:
    runner = runner_of("native", decoder, stores=stores(codec, own=1))
    draft = runner_of("native", decoder, stores=stores(codec, own=1, shared=1))
    requests = [
        Request(tuple(b"the and the and then " * 3), 30, Sampling(temperature=heat), seed=seed)
        for seed, heat in enumerate((0.0, 0.8, 0.0))
    ]
    want = all_told(alone(runner, tokenizer, requests))
    engine = Engine(runner, tokenizer, draft=draft)
    guessed = [replace(one, speculation=Speculation(kind=kind, length=4)) for one in requests]
    assert all_told(engine.answer(guessed)) == want
    assert engine.facts()["speculation"][kind]["guessed"] > 0


def test_logprobs_of_a_prompt(decoder: Make, tokenizer: Tokenizer) -> None:
    made = decoder(stores=stores("plain", own=1), context=256)
    ids = tuple(b"the band and the other band")
    native = Engine(NativeRunner(lower(made, stores="f32"), threads=1, level=2), tokenizer)
    in_torch = Engine(TorchRunner(made), tokenizer)
    found = [
        engine.answer([Request(ids, 3, seed=1, prompt_logprobs=0)])[0].prompt_logprobs for engine in (native, in_torch)
    ]
    with torch.inference_mode():
        scores = made(torch.tensor([ids]))[0].log_softmax(-1)
    exact = [float(scores[place, token]) for place, token in enumerate(ids[1:])]
    for answered in found:
        assert answered is not None
        assert np.abs(np.array([one.logprob for one in answered]) - exact).max() < 1e-3


# Work and bytes -------------------------------------------------------------------------------------------------------


def test_rows_are_dropped_right_after_the_last_store_was_filled() -> None:
    plan = lower(model("int8", own=2, shared=3))
    kinds = [step.kind for step in plan.steps]
    attends = [place for place, step in enumerate(plan.steps) if isinstance(step, steps.Attend)]
    assert kinds.index("narrow") == attends[1] + 1 and len(attends) == 5
    assert [plan.steps[place].store for place in attends] == [0, 1, 1, 1, 1]  # type: ignore[attr-defined]


def test_torch_leaves_out_what_nobody_asks_for() -> None:
    made = model("plain", own=2, shared=2)
    seen: list[list[int]] = [[] for _ in made.stack.layers]
    for layer, lengths in zip(made.stack.layers, seen, strict=True):
        layer.mlp.register_forward_pre_hook(lambda _, args, lengths=lengths: lengths.append(args[0].shape[1]))
    slots = TorchRunner(made).slots(1)
    slots.open(0, 64)
    ids = ids_of(96, 40)
    slots.run([Work(0, ids[:20], 0, prompt=True)])
    last = slots.run([Work(0, ids[20:], 1, prompt=True)])[0].copy()
    slots.run([Work(0, (1, 2), 2)])
    assert seen == [[20, 20, 1, 1]] * 2 + [[1, 1, 1]] * 2
    with torch.inference_mode():
        exact = made(torch.tensor([ids]))[0, -1].numpy()
    assert np.abs(last[0] - exact).max() < 1e-4 * np.abs(exact).max()


@pytest.mark.parametrize("codec", sorted(OWN))
def test_eleven_of_thirty_layers_leave_nineteen_thirtieths(codec: str) -> None:
    whole, shared = model(codec, own=30, shared=0), model(codec, own=19, shared=11)
    plans = [lower(one) for one in (whole, shared)]
    per_token = [totals(plan)["store_bytes_per_cached_token"] for plan in plans]
    assert 30 * per_token[1] == 19 * per_token[0]
    runners = [NativeRunner(plan, threads=1) for plan in plans]
    kept = [runner.program.stores(1, 0).bytes(64) for runner in runners]
    memory = [runner.program.stores(1, 0).memory(512) for runner in runners]
    torch_bytes = [one.cache(batch=1, length=64).nbytes for one in (whole, shared)]
    for of_all, of_some in (kept, memory, torch_bytes):
        assert 30 * of_some == 19 * of_all
    line = next(line for line in table(plans[1]) if "keys and values" in line)
    assert line == f"keys and values: {per_token[1]:,} bytes per token, in 19 of 30 layers"
