"""How requests share an engine: who waits, who goes first, what ends alone, and what is freed when."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchard.core.errors import OrchardError, UsageError
from orchard.generate import Engine, NumericError, Piece, Request, Sampling
from orchard.generate.native import NativeRunner  # noqa: F401 - without native kernels this file is skipped
from orchard.generate.protocol import State
from orchard.generate.row import Row
from orchard.text.tokenizer import Tokenizer
from tests.generate.scheduling import KINDS, all_told, alone, mixed_requests, runner_of, told

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def native(decoder: Make) -> Any:
    return runner_of("native", decoder)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


def steps(engine: Engine) -> int:
    return int(engine.facts()["steps"])


# Fairness -------------------------------------------------------------------------------------------------------------


def submit(engine: Engine, *requests: Request) -> Any:
    """Requests whose steps the test takes itself."""
    rows = [Row(place, request.seeded(), engine.tokenizer, room=1000) for place, request in enumerate(requests)]
    return engine._scheduler.submit(rows, lambda: False)


def test_a_late_small_request_does_not_wait_for_long_ones(native: Any, tokenizer: Tokenizer) -> None:
    engine = Engine(native, tokenizer, prefill_chunk=64)
    long = submit(engine, *[Request(prompt(1500, seed), 400) for seed in range(4)])
    for _ in range(10):
        engine._scheduler.step()
    assert engine.facts()["running"] == 4 and not long.pieces
    small = submit(engine, Request(prompt(20, 9), 5))
    taken = 0
    while not small.pieces:
        engine._scheduler.step()
        taken += 1
    assert taken <= 2, "the small prompt is read before the rest of the long ones"
    assert not long.pieces


def test_nobody_is_passed_over_for_ever(native: Any, tokenizer: Tokenizer) -> None:
    engine = Engine(native, tokenizer, prefill_chunk=32)
    long = submit(engine, Request(prompt(320), 2))
    turns = 0
    while not long.pieces and turns < 200:
        for _ in range(2 if turns < 10 else turns % 4 != 0):  # always a shorter prompt at hand, of a whole chunk
            submit(engine, Request(prompt(32, turns + 1), 1))
        engine._scheduler.step()
        turns += 1
    assert engine.facts()["running"] > 1, "the others are still many"
    assert turns <= 120, "it gets its share of the calls"


def test_the_higher_priority_goes_first_and_takes_a_slot(native: Any, tokenizer: Tokenizer) -> None:
    engine = Engine(native, tokenizer, slots=1)
    low = Request(prompt(30), 30, seed=1)
    requests = [low, Request(prompt(20, 1), 3, priority=1, seed=2), Request(prompt(20, 2), 3, priority=5, seed=3)]
    ends = [index for index, piece in engine.run(requests) if piece.finish is not None]
    assert ends == [2, 1, 0]
    stream = engine.stream(low)
    first = [next(stream) for _ in range(3)]
    urgent = engine.answer([Request(prompt(25, 3), 4, priority=1, seed=4)])[0]
    assert len(urgent.ids) == 4 and engine.facts()["preempted"] == 1
    ids = tuple(piece.id for piece in [*first, *stream])
    assert ids == alone(native, tokenizer, [low])[0].ids
    later = [engine.stream(low), engine.stream(Request(prompt(9), 3, seed=1))]
    next(later[0])
    assert [piece.finish for piece in later[1]][-1] == "length" and engine.facts()["preempted"] == 1, "equals wait"


def test_a_pausing_consumer_stops_nobody(native: Any, tokenizer: Tokenizer) -> None:
    request = Request(prompt(10), 500, Sampling(temperature=1.0), seed=1)
    (whole,) = alone(native, tokenizer, [request])
    for slots in (2, 1):
        engine = Engine(native, tokenizer, slots=slots)
        idle, busy = engine.stream(request), engine.stream(Request(prompt(12, 1), 300))
        first = next(idle)
        assert len(list(busy)) == 300
        waiting = len(engine._scheduler._batches[0].pieces)
        assert waiting <= 64
        answer = [first, *idle]
        assert tuple(piece.id for piece in answer if piece.id is not None) == whole.ids
        assert idle.answer.text == whole.text


def test_abandoned_streams_do_not_block_an_engine(native: Any, tokenizer: Tokenizer) -> None:
    engine = Engine(native, tokenizer, slots=3)
    forgotten = [engine.stream(Request(prompt(10, seed), 200)) for seed in range(5)]
    for stream in forgotten[:3]:
        next(stream)
    assert len(engine.answer([Request(prompt(10, 9), 150)])[0].ids) == 150
    for stream in forgotten:
        assert len(list(stream)) >= 199


# Freeing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "close", "del", "generator"])
def test_a_slot_is_free_within_one_step(how: str, native: Any, tokenizer: Tokenizer) -> None:
    engine, cancel = Engine(native, tokenizer), threading.Event()
    other = engine.stream(Request(prompt(5), 50))
    next(other)
    stream: Any = engine.stream(Request(prompt(600, 1), 50), cancel=cancel)
    if how == "generator":
        stream = engine.run([Request(prompt(600, 1), 50)] * 3)
    next(stream)
    assert engine.facts()["running"] == (4 if how == "generator" else 2)
    before = steps(engine)
    if how == "cancel":
        cancel.set()
        while next(other, None) is not None and engine.facts()["running"] == 2:
            pass
    elif how == "del":
        del stream
        gc.collect()
    else:
        stream.close()
    assert engine.facts()["running"] == 1 and steps(engine) - before <= 1
    assert len(list(other)) > 40
    assert engine.facts()["kv_bytes"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_many_short_requests_leave_memory_level(kind: str, decoder: Make, tokenizer: Tokenizer) -> None:
    engine = Engine(runner_of(kind, decoder), tokenizer, prefix_bytes=1 << 16)
    count = 2000 if kind == "native" else 160

    def some(number: int, begin: int) -> None:
        for place in range(begin, begin + number, 8):
            engine.answer([Request(prompt(5 + seed % 90, seed), 2) for seed in range(place, place + 8)])

    some(count // 2, 0)
    gc.collect()
    level = resident()
    some(count, count)
    gc.collect()
    assert resident() < 1.02 * level
    facts = engine.facts()
    assert (facts["running"], facts["waiting"], facts["kv_bytes"]) == (0, 0, 0)
    assert facts["requests"] == count + count // 2 and not engine._scheduler._batches


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


# Threads --------------------------------------------------------------------------------------------------------------


def test_eight_threads(native: Any, tokenizer: Tokenizer) -> None:
    requests = mixed_requests(24, seed=7)
    want = all_told(alone(native, tokenizer, requests))
    engine = Engine(native, tokenizer, slots=6)
    found: dict[int, Any] = {}

    def stream(places: range) -> None:
        for place in places:
            with engine.stream(requests[place]) as answer:
                for _ in answer:
                    pass
            found[place] = told(answer.answer)

    threads = [threading.Thread(target=stream, args=(range(begin, 24, 8),)) for begin in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert [found[place] for place in range(24)] == want
    assert engine.facts()["running"] == 0


# What goes wrong --------------------------------------------------------------------------------------------------------


def test_a_rule_that_fails_ends_its_own_request(native: Any, tokenizer: Tokenizer) -> None:
    def failing(scores: np.ndarray, state: State) -> np.ndarray:
        if len(state.output) == 3:
            raise ZeroDivisionError("a rule from outside")
        return scores

    plain = [Request(prompt(9, seed), 8, seed=seed) for seed in range(3)]
    want = all_told(alone(native, tokenizer, plain))
    engine = Engine(native, tokenizer)
    bad = Request(prompt(9), 8, seed=0, rules=(failing,))
    first, broken, second, third = engine.answer([plain[0], bad, plain[1], plain[2]])
    assert all_told([first, second, third]) == want
    assert broken.finish == "error" and broken.ids == first.ids[:3] and "a rule from outside" in str(broken.error)
    other = engine.stream(plain[1])
    next(other)
    with pytest.raises(ZeroDivisionError):  # a single request still raises
        engine.answer([bad])
    assert len(list(other)) == 7 and engine.facts()["running"] == 0 and engine.facts()["errors"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_large_alone(kind: str, decoder: Make, tokenizer: Tokenizer) -> None:
    runner = runner_of(kind, decoder)
    slots = runner.slots(1)
    slots.open(0, 64)
    limit = slots.nbytes(448)
    engine = Engine(runner, tokenizer, kv_bytes=limit)
    small, large = Request(prompt(20), 5, seed=1), Request(prompt(600), 5, seed=1)
    with pytest.raises(UsageError, match=r"no memory for (60\d|512) tokens") as caught:
        engine.answer([large])
    assert "kv_bytes" in caught.value.hint
    good, bad, again = engine.answer([small, large, small])
    assert told(good) == told(again) and len(good.ids) == 5
    assert bad.finish == "error" and "no memory" in str(bad.error)
    with pytest.raises(UsageError, match="no memory"):  # it fits until it grows
        engine.answer([Request(prompt(440), 60, seed=1)])
    assert len(engine.answer([small])[0].ids) == 5 and engine.facts()["kv_bytes"] == 0


def test_broken_numbers_in_a_crowd_of_callers(native: Any, tokenizer: Tokenizer) -> None:
    engine = Engine(native, tokenizer)
    rule = lambda scores, state: scores + np.float32("nan")  # noqa: E731
    other = engine.stream(Request(prompt(9), 20))
    next(other)
    with pytest.raises(NumericError):
        list(engine.stream(Request(prompt(9, 1), 20, rules=(rule,))))
    assert len(list(other)) == 19


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_fails(error: type[BaseException], watched: Make, tokenizer: Tokenizer) -> None:
    """An interrupt ends the one who was driving; a fault of the model ends the request that has it. Others lose nothing."""
    model = watched(context=256)
    requests = [Request(prompt(12, seed), 20, Sampling(temperature=0.9), seed=seed) for seed in range(3)]
    want = all_told(alone(model, tokenizer, requests))
    engine = Engine(model, tokenizer)
    streams = [engine.stream(request) for request in requests]
    pieces: list[list[Piece]] = [[next(stream)] for stream in streams]
    calls = len(model.chunks)

    def trouble() -> None:
        if len(model.chunks) == calls + 5:
            raise error("trouble")

    model.on_hidden = trouble
    broken = []
    for place, stream in enumerate(streams):
        try:
            pieces[place] += list(stream)
        except error:
            broken.append(place)
            stream.close()
    if error is KeyboardInterrupt:
        assert broken == [0]
    else:
        assert broken == [] and engine.facts()["preempted"] >= 3, "it did not happen again when each was run by itself"
    for place in {0, 1, 2} - set(broken):
        assert told(streams[place].answer) == want[place]
    assert engine.facts()["running"] == 0


def test_an_interrupt_in_the_rule_of_somebody_else(native: Any, tokenizer: Tokenizer) -> None:
    def interrupted(scores: np.ndarray, state: State) -> np.ndarray:
        if len(state.output) == 2 and not went_off:
            went_off.append(True)
            raise KeyboardInterrupt
        return scores

    went_off: list[bool] = []
    plain = Request(prompt(9), 12, seed=1)
    (want,) = alone(native, tokenizer, [plain])
    engine = Engine(native, tokenizer)
    first, other, last = (engine.stream(one) for one in (plain, Request(prompt(9, 1), 12, rules=(interrupted,)), plain))
    next(other), next(last)
    with pytest.raises(KeyboardInterrupt):
        list(first)  # drives the others too
    assert len(list(last)) == 11 and last.answer.ids == want.ids
    with pytest.raises(OrchardError, match="an interrupt came"):
        list(other)
    first.close()
    assert engine.facts()["running"] == 0


def test_a_model_that_fails_for_one_request(watched: Make, tokenizer: Tokenizer) -> None:
    model = watched(context=256)
    hidden = model.hidden

    def failing(ids: Any, context: Any) -> Any:
        if 77 in ids.tolist()[0]:
            raise RuntimeError("a fault")
        return hidden(ids, context)

    model.hidden = failing
    requests = [Request((5, 6), 4, seed=1), Request((5, 77), 4, seed=1), Request((9,) * 9, 4, seed=1)]
    answers = Engine(model, tokenizer).answer(requests)
    assert [answer.finish for answer in answers] == ["length", "error", "length"]
    assert answers[1].error == "RuntimeError: a fault"


# Adapters ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_adapters_are_refused_before_any_work(kind: str, decoder: Make, tokenizer: Tokenizer) -> None:
    runner = runner_of(kind, decoder)
    engine = Engine(runner, tokenizer)
    with pytest.raises(UsageError, match="request 1: no adapter called 'nobody'") as caught:
        engine.run([Request((1,)), Request((1,), adapter="nobody")])
    assert "'other'" in caught.value.hint and steps(engine) == 0
    with pytest.raises(UsageError, match="adapter is 3"):
        Request((1,), adapter=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot be a variant"):
        runner.add_variant("wide", type(runner)(*_shape(kind, decoder)))
    runner.drop_variant("other")
    with pytest.raises(UsageError, match="no adapter called 'other'"):
        runner.drop_variant("other")


def _shape(kind: str, decoder: Make) -> tuple[Any, ...]:
    from orchard.generate.lowering import lower

    model = decoder(context=99)
    return (lower(model),) if kind == "native" else (model,)


def test_beginnings_of_variants_are_their_own(native: Any, tokenizer: Tokenizer) -> None:
    engine = Engine(native, tokenizer)
    base, other = Request(prompt(200), 6, seed=1), Request(prompt(200), 6, seed=1, adapter="other")
    want = all_told(alone(native, tokenizer, [base, other]))
    assert want[0] != want[1]
    for _ in range(2):
        assert all_told(engine.answer([base, other])) == want
    assert [answer.usage.cached for answer in engine.answer([base, other])] == [192, 192]


# Beginnings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 26])
def test_a_shared_beginning_is_read_once(prefix_bytes: int, native: Any, tokenizer: Tokenizer) -> None:
    shared = prompt(1024)
    requests = [Request((*shared, *prompt(5, seed)), 3, seed=seed) for seed in range(16)]
    engine = Engine(native, tokenizer, prefix_bytes=prefix_bytes)
    answers = engine.answer(requests)
    assert all_told(answers) == all_told(alone(native, tokenizer, requests))
    assert engine.facts()["prompt_tokens"] == 1024 + 16 * 5
    assert sorted(answer.usage.cached for answer in answers) == [0] + [1024] * 15


@pytest.mark.parametrize("leaves", ["closed", "preempted"])
def test_who_waits_for_a_beginning_reads_it_when_the_other_goes(leaves: str, native: Any, tokenizer: Tokenizer) -> None:
    shared = prompt(1200)
    engine = Engine(native, tokenizer, prefill_chunk=64, prefix_bytes=0)
    first = submit(engine, Request(shared, 5))
    engine._scheduler.step()
    request = Request((*shared[:1000], 7), 4, seed=1)
    second = submit(engine, request)
    engine._scheduler.step()
    assert second.seats[0].leader is first.seats[0] and engine.facts()["running"] == 2
    if leaves == "closed":
        engine._scheduler.close(first)
        assert engine.facts()["running"] == 1
    else:
        engine._scheduler.preempt(first.seats[0])
    pieces = []
    while (piece := engine._scheduler.next(second)) is not None:
        pieces.append(piece[1].id)
    assert tuple(pieces) == alone(native, tokenizer, [request])[0].ids


def test_facts_and_limits_are_checked(native: Any, tokenizer: Tokenizer) -> None:
    for limits in ({"slots": 0}, {"kv_bytes": 0}, {"prefill_chunk": 0}):
        with pytest.raises(UsageError, match=next(iter(limits))):
            Engine(native, tokenizer, **limits)
    for bad in ({"priority": 2**40}, {"speculation": "lookup"}, {"thinking": 64}):
        with pytest.raises(UsageError, match=next(iter(bad))):
            Request((1,), **bad)  # type: ignore[arg-type]
    engine = Engine(native, tokenizer, slots=9)
    assert engine.facts()["steps"] == 0 and engine.facts()["slots"] == 9
    engine.answer([Request(prompt(30), 5), Request(prompt(9, 1), 5)])
    facts = engine.facts()
    assert facts["tokens"] == 10 and facts["prompt_tokens"] == 39 and facts["batch_sizes"] == {2: 4}
