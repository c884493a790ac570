"""Cancelling, closing, overflow, broken numbers, and what a step costs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.errors import ContextOverflow, UsageError
from orchard.generate import Engine, NumericError, Request, Sampling
from orchard.text.tokenizer import Tokenizer

Make = Callable[..., Any]


def test_cancel_stops_within_one_token_and_frees_the_stores(watched: Make, tokenizer: Tokenizer) -> None:
    model, cancel = watched(), threading.Event()
    pieces = Engine(model, tokenizer).run([Request(ids=(1, 2, 3)), Request(ids=(4,))], cancel=cancel)
    seen = [next(pieces) for _ in range(5)]
    calls = len(model.chunks)
    cancel.set()
    rest = list(pieces)
    assert len(model.chunks) == calls
    assert [index for index, _ in rest] == [1, 0, 1]  # the token already chosen, then one last piece each
    assert [piece.finish for _, piece in rest] == [None, "cancelled", "cancelled"]
    assert [piece.id for _, piece in rest][1:] == [None, None]
    ids = [piece.id for index, piece in [*seen, *rest] if index == 0 and piece.id is not None]
    assert "".join(piece.text for index, piece in [*seen, *rest] if index == 0) == tokenizer.decode(ids)
    assert model.caches[0]() is None


def test_cancel_before_and_while_reading_the_prompt(watched: Make, tokenizer: Tokenizer) -> None:
    model, cancel = watched(), threading.Event()
    cancel.set()
    engine = Engine(model, tokenizer, prefill_chunk=4)
    (answer,) = engine.answer([Request(ids=(1,) * 30)], cancel=cancel)
    assert (answer.ids, answer.text, answer.finish, model.chunks) == ((), "", "cancelled", [])
    cancel.clear()
    model.on_hidden = cancel.set
    (answer,) = engine.answer([Request(ids=(1,) * 30)], cancel=cancel)
    assert (answer.ids, answer.finish, model.chunks) == ((), "cancelled", [(1, 4)])
    # An event that is cleared again does not bring a half-read prompt to the head.
    cancel.clear()
    model.on_hidden = lambda: cancel.set() if len(model.chunks) == 3 else cancel.clear()
    (answer,) = engine.answer([Request(ids=(1,) * 30)], cancel=cancel)
    assert answer.finish == "cancelled"


def test_closing_frees_the_stores_at_once(watched: Make, tokenizer: Tokenizer) -> None:
    model = watched()
    pieces = Engine(model, tokenizer).run([Request(ids=(1, 2, 3))] * 3)
    assert model.caches == [], "nothing is made before the first piece is asked for"
    next(pieces)
    assert model.caches[0]() is not None
    calls = len(model.chunks)
    pieces.close()
    assert model.caches[0]() is None and len(model.chunks) == calls
    assert list(pieces) == []


def test_finished_runs_leave_nothing(watched: Make, tokenizer: Tokenizer) -> None:
    model = watched()
    Engine(model, tokenizer).answer([Request(ids=(1, 2), max_tokens=3), Request(ids=(3,), max_tokens=2)])
    assert model.caches[0]() is None


def test_inference_mode_stays_inside(watched: Make, tokenizer: Tokenizer) -> None:
    model, inside = watched(), []
    model.on_hidden = lambda: inside.append(torch.is_inference_mode_enabled())
    for _ in Engine(model, tokenizer, prefill_chunk=2).run([Request(ids=(1, 2, 3), max_tokens=4, logprobs=1)] * 2):
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        weight = torch.ones(2, requires_grad=True)
        (weight * 2).sum().backward()
        assert weight.grad is not None
    assert inside and all(inside)


@pytest.mark.parametrize(("tokens", "over"), [(64, 1), (65, 2), (1000, 937)])
def test_overflow_gives_the_counts_before_any_work(tokens: int, over: int, watched: Make, tokenizer: Tokenizer) -> None:
    model = watched(context=64)
    requests = [Request(ids=(1,)), Request(ids=(1,) * tokens)]
    with pytest.raises(ContextOverflow) as caught:
        Engine(model, tokenizer).run(requests)  # at the call, not at the first piece
    assert (caught.value.tokens, caught.value.limit) == (tokens, 64)
    assert f"request 1 by at least {over:,} " in caught.value.hint
    assert model.caches == [] and model.chunks == []
    with pytest.raises(ContextOverflow):
        Engine(model, tokenizer).stream(requests[1])


def test_one_bad_request_rejects_the_list(watched: Make, tokenizer: Tokenizer) -> None:
    model = watched()
    engine = Engine(model, tokenizer)
    with pytest.raises(UsageError, match="request 1: token id 9999 is outside the vocabulary of 262"):
        engine.answer([Request(ids=(1,)), Request(ids=(2, 9999))])
    with pytest.raises(UsageError, match="263 alternatives"):
        engine.answer([Request(ids=(1,), logprobs=263)])
    with pytest.raises(UsageError, match="prefill_chunk"):
        Engine(model, tokenizer, prefill_chunk=0)
    assert model.chunks == []
    assert engine.answer([]) == []
    (most,) = engine.answer([Request(ids=(261,), logprobs=262, max_tokens=1)])
    assert most.logprobs is not None and len(most.logprobs[0].top) == 262


def broken_at(model: Any, call: int, bad: float) -> Any:
    """The model, with one bad score in one call of its head."""
    score = model.scores

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        out = score(hidden)
        if len(model.scored) == call:
            out[0, 7] = bad
        return out

    model.scores = broken
    return model


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_scores_end_one_answer_alone(
    bad: float, temperature: float, watched: Make, tokenizer: Tokenizer
) -> None:
    request = Request(ids=(1, 2), max_tokens=6, sampling=Sampling(temperature=temperature), seed=1, logprobs=0)
    with pytest.raises(NumericError, match=r"scores are broken after 2 new tokens: (1|0) of 262 are NaN") as caught:
        Engine(broken_at(watched(), 3, bad), tokenizer).answer([request])
    assert caught.value.code == "numeric" and caught.value.hint

    (whole,) = Engine(watched(), tokenizer).answer([request])
    model = broken_at(watched(), 8, bad)  # the second of three rows, in the third step
    first, broken, last = Engine(model, tokenizer).answer([request] * 3)
    for other in (first, last):
        assert (other.ids, other.text, other.finish, other.error) == (whole.ids, whole.text, "length", None)
    assert (broken.finish, broken.ids, broken.usage.output) == ("error", whole.ids[:2], 2)
    assert broken.text == tokenizer.decode(broken.ids)
    assert broken.logprobs is not None and [entry.id for entry in broken.logprobs] == list(broken.ids)
    assert broken.error is not None and "after 2 new tokens" in broken.error and "load the model again" in broken.error
    assert model.scored == [(1, 32)] * (3 * 3 + 2 * 3), "the broken row leaves the stores"
    assert model.caches[0]() is None


def test_a_stream_and_a_run_of_one_raise_broken_scores(watched: Make, tokenizer: Tokenizer) -> None:
    stream = Engine(broken_at(watched(), 3, float("nan")), tokenizer).stream(Request(ids=(1, 2)))
    said = [next(stream), next(stream)]
    with pytest.raises(NumericError):
        next(stream)
    stream.close()
    assert stream.answer.ids == tuple(piece.id for piece in said), "what was said is not lost"
    with pytest.raises(NumericError):
        list(Engine(broken_at(watched(), 1, float("nan")), tokenizer).run([Request(ids=(1, 2))]))


def test_all_answers_may_break(watched: Make, tokenizer: Tokenizer) -> None:
    rule = lambda scores, state: scores + np.float32("nan")  # noqa: E731
    answers = Engine(watched(), tokenizer).answer([Request(ids=(1,), rules=(rule,))] * 2)
    assert [(answer.finish, answer.ids) for answer in answers] == [("error", ())] * 2
    assert all("no token to choose" in str(answer.error) for answer in answers)


def test_rules_that_leave_nothing_are_an_error(watched: Make, tokenizer: Tokenizer) -> None:
    rules = (lambda scores, state: np.full_like(scores, float("-inf")),)
    for temperature in (0.0, 1.0):
        request = Request(ids=(1,), rules=rules, sampling=Sampling(temperature=temperature, top_p=0.5, top_k=3))
        with pytest.raises(NumericError, match="no token to choose"):
            Engine(watched(), tokenizer).answer([request])


def test_a_step_sees_what_is_cached_not_what_could_be(watched: Make, tokenizer: Tokenizer) -> None:
    model = watched(context=1024)
    requests = [Request(ids=tuple(range(70)), max_tokens=70), Request(ids=(5, 6), max_tokens=100)]
    Engine(model, tokenizer, prefill_chunk=64).answer(requests)
    assert sorted(model.lengths) == [128, 192], "each sequence has stores of its own length"
    assert model.chunks[0] == (1, 2), "the short prompt first, as both do not go into one chunk"
    assert Counter(model.chunks) == {(1, 2): 1, (1, 64): 1, (1, 6): 1, (1, 1): 69 + 99}, "finished rows are gone"
    longest = [64, 70, *range(71, 71 + 69), 2, *range(3, 3 + 99)]
    assert Counter(model.views) == Counter(-(-length // 64) * 64 for length in longest)
    assert model.scored == [(1, 32)] * 170, "only the last token goes through the head"


def test_a_window_bounds_the_view(watched: Make, tokenizer: Tokenizer) -> None:
    model = watched(context=512, stores=[partial(Store.Config, policy=Window.Config(window=16, sinks=4))] * 2)
    Engine(model, tokenizer, prefill_chunk=8).answer([Request(ids=(3,) * 100, max_tokens=50)])
    assert max(model.views) == 16 + 4 + 8 and model.views[-1] == 20


def test_no_memory_is_said_in_words(watched: Make, tokenizer: Tokenizer) -> None:
    model = watched()
    engine = Engine(model, tokenizer)
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")):
        model.cache = lambda error=error, **_: (_ for _ in ()).throw(error)
        with pytest.raises(UsageError, match="no memory for 1 sequences of 64 tokens"):
            engine.answer([Request(ids=(1,), max_tokens=63)])
    model.cache = lambda **_: (_ for _ in ()).throw(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        engine.answer([Request(ids=(1,))])
