"""The same tokens alone and in company: mixed batches, arrivals, cancels, lost slots, kept beginnings, variants, guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.codecs import Int8
from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.generate import Engine, Request, Sampling, Stream
from orchard.generate.budget import Thinking
from orchard.generate.constraint import Constraint
from orchard.generate.native import NativeRunner  # noqa: F401 - without native kernels this file is skipped
from orchard.generate.speculative.options import Speculation
from orchard.session.model import load
from orchard.text.tokenizer import Tokenizer
from tests.generate.scheduling import KINDS, all_told, alone, mixed_requests, runner_of, told

Make = Callable[..., Any]


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest, decoder: Make) -> Any:
    return runner_of(request.param, decoder)


@pytest.fixture(scope="module")
def native(decoder: Make) -> Any:
    return runner_of("native", decoder)


def test_thirty_two_at_once(runner: Any, tokenizer: Tokenizer) -> None:
    requests = mixed_requests(32)
    want = all_told(alone(runner, tokenizer, requests))
    engine = Engine(runner, tokenizer)
    assert all_told(engine.answer(requests)) == want
    assert all_told(engine.answer(requests[::-1])) == want[::-1], "beginnings are kept by now"
    assert {finish for _, _, finish, *_ in want} == {"stop", "length"} and len({ids for ids, *_ in want}) > 20
    facts = engine.facts()
    assert facts["waiting"] == facts["running"] == 0 and max(facts["batch_sizes"]) > 16


def test_few_slots(runner: Any, tokenizer: Tokenizer) -> None:
    requests = mixed_requests(12, seed=3)
    want = all_told(alone(runner, tokenizer, requests))
    for slots in (1, 5):
        engine = Engine(runner, tokenizer, slots=slots)
        assert all_told(engine.answer(requests)) == want
        assert max(engine.facts()["batch_sizes"]) <= slots


def test_arriving_at_different_times(runner: Any, tokenizer: Tokenizer) -> None:
    requests = mixed_requests(20, seed=5)
    want = all_told(alone(runner, tokenizer, requests))
    engine, random = Engine(runner, tokenizer, slots=7), np.random.default_rng(1)
    coming, streams, ended = list(enumerate(requests)), dict[int, Stream](), dict[int, Any]()
    while coming or streams:
        if coming and (not streams or random.random() < 0.4):
            place, request = coming.pop()
            streams[place] = engine.stream(request)
        place = int(random.choice(list(streams)))
        if next(streams[place], None) is None:
            ended[place] = told(streams.pop(place).answer)
    assert [ended[place] for place in range(20)] == want
    assert engine.facts()["running"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_lost_slots(kind: str, decoder: Make, tokenizer: Tokenizer) -> None:
    """Memory for less than all: rows lose their slots on the way and are read again."""
    runner = runner_of(kind, decoder)
    random = np.random.default_rng(0)
    lengths, most = ((340, 351, 360, 343, 60), 150) if kind == "native" else ((30, 41, 20, 25, 5), 100)
    requests = [
        Request(tuple(random.integers(0, 256, length).tolist()), most, Sampling(temperature=0.8 * (length % 2)), seed=1)
        for length in lengths
    ]
    want = all_told(alone(runner, tokenizer, requests))
    slots = runner.slots(1)
    slots.open(0, 100)
    limit = 4 * slots.nbytes(448) if kind == "native" else slots.nbytes(400)
    engine = Engine(runner, tokenizer, kv_bytes=limit)
    assert all_told(engine.answer(requests)) == want
    assert engine.facts()["preempted"] > 0 and engine.facts()["kv_bytes"] == 0


STORES: dict[str, Any] = {
    "int8": lambda: Store.Config(codec=Int8.Config()),
    "ring": lambda: Store.Config(policy=Window.Config(window=48, sinks=2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", sorted(STORES))
def test_other_stores(store: str, kind: str, decoder: Make, tokenizer: Tokenizer) -> None:
    runner = runner_of(kind, decoder, stores=[STORES[store], Store.Config])
    requests = mixed_requests(8, seed=2, longest=90 if kind == "torch" else 700)
    want = all_told(alone(runner, tokenizer, requests))
    engine = Engine(runner, tokenizer)
    assert all_told(engine.answer(requests)) == want
    assert all_told(engine.answer(requests)) == want


class Chaos:
    """Does to an engine what may happen to it: arrivals, reading, closing, and slots that are lost for no reason."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.engine = engine
        self.requests = requests
        self.streams: dict[int, Stream] = {}
        self.answers: dict[int, Any] = {}
        self.closed: set[int] = set()

    def arrive(self, place: int) -> None:
        if place not in self.streams:
            self.streams[place] = self.engine.stream(self.requests[place])

    def read(self, place: int, pieces: int) -> None:
        for _ in range(pieces):
            if place in self.streams and next(self.streams[place], None) is None:
                return

    def close(self, place: int) -> None:
        if place in self.streams and place not in self.closed:
            self.streams[place].close()
            self.closed.add(place)

    def lose(self, place: int) -> None:
        scheduler = self.engine._scheduler
        if scheduler._room is not None and scheduler._room.seats:
            scheduler.preempt(scheduler._room.seats[place % len(scheduler._room.seats)])

    def finish(self) -> None:
        for stream in self.streams.values():
            for _ in stream:
                pass


WISHES: list[Request] = mixed_requests(10, seed=11, longest=100, most=16)
ACTIONS = st.tuples(st.sampled_from(["arrive", "read", "close", "lose"]), st.integers(0, 9), st.integers(1, 30))


@settings(max_examples=25)
@given(actions=st.lists(ACTIONS, max_size=40), slots=st.integers(1, 4))
def test_whatever_happens(native: Any, tokenizer: Tokenizer, actions: list[tuple[str, int, int]], slots: int) -> None:
    want = KNOWN.setdefault("answers", all_told(alone(native, tokenizer, WISHES)) if not KNOWN else [])
    engine = Engine(native, tokenizer, slots=slots)
    chaos = Chaos(engine, WISHES)
    for action, place, count in actions:
        if action == "read":
            chaos.read(place, count)
        else:
            getattr(chaos, action)(place)
    chaos.finish()
    for place, stream in chaos.streams.items():
        if place in chaos.closed and stream.answer.finish == "cancelled":
            assert want[place][0][: len(stream.answer.ids)] == stream.answer.ids
        else:
            assert told(stream.answer) == want[place]
    facts = engine.facts()
    assert (facts["running"], facts["waiting"], facts["kv_bytes"]) == (0, 0, 0)


KNOWN: dict[str, list[Any]] = {}


@pytest.mark.parametrize("length", [0, 3])
def test_guesses_change_nothing(length: int, runner: Any, tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(4)
    phrase = tuple(random.integers(0, 256, 12).tolist())
    plain = [
        Request(
            phrase * 4 + (place,),
            40,
            Sampling(temperature=0.6 * (place % 2)),
            seed=place,
            logprobs=0 if place else None,
        )
        for place in range(4)
    ]
    plain += [request for request in mixed_requests(8, seed=9) if request.constraint is not None]
    guessed = [Request(**{**vars(request), "speculation": Speculation("lookup", length=length)}) for request in plain]
    want = all_told(alone(runner, tokenizer, plain))
    engine = Engine(runner, tokenizer)
    assert all_told(engine.answer(guessed)) == want
    assert all_told(engine.answer([guessed[0], plain[1], *guessed[2:]])) == want
    assert all_told(alone(runner, tokenizer, guessed)) == want
    assert engine.facts()["speculation"]["lookup"]["guessed"] > 0


def test_guesses_and_lost_slots(native: Any, tokenizer: Tokenizer) -> None:
    phrase = tuple(range(40, 60))
    plain = [Request(phrase * 17 + (place,), 300, seed=place) for place in range(3)]
    guessed = [Request(**{**vars(request), "speculation": Speculation("lookup", length=5)}) for request in plain]
    slots = native.slots(1)
    engine = Engine(native, tokenizer, kv_bytes=3 * slots.nbytes(448))
    assert all_told(engine.answer(guessed)) == all_told(alone(native, tokenizer, plain))
    facts = engine.facts()
    assert facts["preempted"] > 0
    assert facts["speculation"]["lookup"]["kept"] > 0, "a tiny model goes round in circles sooner or later"


def test_thinking_budgets(runner: Any, tokenizer: Tokenizer) -> None:
    """The rule comes with the end of the prompt, stays through a lost slot, and a constraint waits for the thoughts to end."""
    marks = {"begin": tuple(tokenizer.encode("[")), "end": tuple(tokenizer.encode("the]"))}
    requests = [
        Request(
            (7, 8, 9 + budget),
            30,
            Sampling(temperature=1.0),
            seed=budget,
            thinking=Thinking(**marks, most=budget),
            constraint=Constraint.choices(["band", "end"]) if budget % 2 else None,
        )
        for budget in (0, 3, 6)
    ]
    want = alone(runner, tokenizer, requests)
    for answer, budget in zip(want, (0, 3, 6), strict=True):
        thoughts = answer.ids[1:].index(marks["end"][-1])  # nothing ends them before their time, or the mark is whole
        assert answer.ids[0] == marks["begin"][0] and thoughts <= budget + len(marks["end"])
    assert want[1].text.endswith(("the]band", "the]end")) and want[1].finish == "stop"
    engine = Engine(runner, tokenizer)
    streams = [engine.stream(request) for request in requests]
    for stream in streams:
        next(stream)
    for seat in list(engine._scheduler._room.seats):  # type: ignore[union-attr]
        engine._scheduler.preempt(seat)
    for stream in streams:
        list(stream)
    assert [told(stream.answer) for stream in streams] == all_told(want)


@pytest.mark.real
def test_the_default_model(smollm2: Path) -> None:
    model = load("smollm2")
    encode = model.tokenizer.encode
    story = "A fox and a crow met by the river, and talked about the weather and the price of cheese. " * 4
    samplings = [Sampling(), Sampling(temperature=0.8, top_p=0.9), Sampling(temperature=1.0, repetition_penalty=1.1)]
    plain = [
        Request(tuple(encode(story + "They agreed that" * (place % 2))), 12, samplings[place % 3], seed=place)
        for place in range(6)
    ]
    plain.append(Request(tuple(encode("A colour:")), 12, seed=7, constraint=Constraint.choices(["red", "green"])))
    want = all_told(alone(model.runner, model.tokenizer, plain))
    engine = Engine(model.runner, model.tokenizer)
    guessed = [replace(request, speculation=Speculation("lookup", length=3)) for request in plain[:3]]
    assert all_told(engine.answer([*guessed, *plain[3:]])) == want, "cold, together, some with guesses"
    streams = [engine.stream(request) for request in plain]
    for stream in streams:
        next(stream)
    for seat in list(engine._scheduler._room.seats)[::2]:  # type: ignore[union-attr]
        engine._scheduler.preempt(seat)
    for stream in streams:
        list(stream)
    assert [told(stream.answer) for stream in streams] == want, "hot, one by one, half of them read again"
    assert engine.facts()["preempted"] >= 3 and streams[0].answer.usage.cached > 0
