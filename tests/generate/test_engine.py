"""The engine against plain recomputation, alone and in batches, over every kind of store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from orchard.cache.codecs import Int8
from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.context import Context
from orchard.generate import Answer, Engine, Request, Sampling
from orchard.generate.protocol import State
from orchard.models.language.decoder import Decoder
from orchard.text.tokenizer import Tokenizer

PROMPTS = [(5, 17, 3, 99, 42), (7,), (200, 201, 202, 203, 204, 205, 206, 1, 2, 3, 4)]
KINDS: dict[str, list[Callable[[], Store.Config]]] = {
    "plain": [Store.Config, Store.Config, Store.Config],
    "int8": [partial(Store.Config, codec=Int8.Config())] * 3,
    "window": [partial(Store.Config, policy=Window.Config(window=5, sinks=2))] * 3,
    "window-int8": [partial(Store.Config, codec=Int8.Config(), policy=Window.Config(window=5, sinks=2))] * 3,
    "shared": [Store.Config, partial(Store.Config, owner=0), partial(Store.Config, owner=0)],
    "mixed": [
        Store.Config,
        partial(Store.Config, policy=Window.Config(window=4, sinks=1)),
        partial(Store.Config, owner=1),
    ],
}


@torch.no_grad()
def greedy_from_scratch(model: Decoder, prompt: tuple[int, ...], count: int, *, stores: bool) -> tuple[int, ...]:
    """The whole sequence through the model for every new token: no step ever sees an older step's state."""
    ids = list(prompt)
    for _ in range(count):
        whole = torch.tensor([ids])
        context = Context.whole(whole)
        if stores:
            context = Context(positions=context.positions, cache=model.cache(batch=1, length=len(ids)))
        ids.append(int(model(whole, context)[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


_EXPECTED: dict[str, list[tuple[int, ...]]] = {}


@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_recomputation(
    kind: str, chunk: int, decoder: Callable[..., Decoder], tokenizer: Tokenizer
) -> None:
    model = decoder(stores=KINDS[kind])
    one, many = Engine(model, tokenizer, prefill_chunk=chunk), Engine(model, tokenizer, prefill_chunk=3 * chunk)
    limits = [20, 12, 20]
    if kind not in _EXPECTED:
        stores = kind not in ("plain", "shared")
        _EXPECTED[kind] = [
            greedy_from_scratch(model, prompt, limit, stores=stores) for prompt, limit in zip(PROMPTS, limits)
        ]
    expected = _EXPECTED[kind]
    requests = [Request(ids=prompt, max_tokens=limit) for prompt, limit in zip(PROMPTS, limits)]
    assert len(set(expected[0])) > 3, "a model that repeats itself would prove little"
    assert [one.answer([request])[0].ids for request in requests] == expected
    assert [answer.ids for answer in many.answer(requests)] == expected


def sampled(seed: int, prompt: tuple[int, ...], **sampling: float) -> Request:
    rules = Sampling(**{"temperature": 0.9, "top_k": 200, "top_p": 0.95, **sampling})  # type: ignore[arg-type]
    return Request(ids=prompt, max_tokens=16, sampling=rules, seed=seed)


def test_a_sampled_answer_is_the_same_alone_and_in_company(
    decoder: Callable[..., Decoder], tokenizer: Tokenizer
) -> None:
    engine = Engine(decoder(), tokenizer, prefill_chunk=7)
    requests = [sampled(seed, PROMPTS[seed % 3], min_p=0.01 * seed) for seed in range(9)]
    alone = [engine.answer([request])[0] for request in requests]
    assert engine.answer(requests) == alone
    assert engine.answer(requests[::-1]) == alone[::-1]
    assert engine.answer(requests[2:5]) == alone[2:5]
    assert len({answer.ids for answer in alone}) == 9


def test_seeds(decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> None:
    engine = Engine(decoder(), tokenizer)
    request = Request(ids=(1, 2, 3), max_tokens=12, sampling=Sampling(temperature=1.0))
    first, second = engine.answer([request, request])
    assert first.seed != second.seed and first.ids != second.ids
    again = Request(ids=(1, 2, 3), max_tokens=12, sampling=Sampling(temperature=1.0), seed=first.seed)
    assert engine.answer([again]) == [first]
    torch.manual_seed(0)  # the global generator has no say, and is left alone
    before = torch.get_rng_state()
    assert engine.answer([again]) == [first]
    assert torch.equal(before, torch.get_rng_state())


def test_text_and_pieces_agree_with_decoding_all_at_once(decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> None:
    engine = Engine(decoder(), tokenizer)
    requests = [sampled(seed, PROMPTS[seed % 3]) for seed in range(6)]
    texts, ids = [""] * 6, [[] for _ in range(6)]  # type: ignore[var-annotated]
    ended: set[int] = set()
    for index, piece in engine.run(requests):
        assert index not in ended, "nothing comes after the last piece"
        texts[index] += piece.text
        ids[index] += [] if piece.id is None else [piece.id]
        if piece.finish is not None:
            ended.add(index)
    assert ended == set(range(6))
    assert texts == [tokenizer.decode(each) for each in ids]
    answers = engine.answer(requests)
    assert [answer.text for answer in answers] == texts
    assert [answer.usage.output for answer in answers] == [len(each) for each in ids]
    assert [answer.usage.input for answer in answers] == [len(request.ids) for request in requests]


def test_logprobs_are_the_models_own(decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> None:
    model = decoder()
    engine = Engine(model, tokenizer)
    request = Request(
        ids=PROMPTS[0],
        max_tokens=10,
        seed=3,
        logprobs=4,
        sampling=Sampling(temperature=1.5, top_k=50, repetition_penalty=1.3),
    )
    other = Request(ids=PROMPTS[1], max_tokens=4, logprobs=0)
    answer, plain, none = engine.answer([request, other, Request(ids=(1,), max_tokens=2)])
    with torch.no_grad():
        logs = model(torch.tensor([request.ids + answer.ids]))[0].log_softmax(-1)[len(request.ids) - 1 : -1]
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.ids) == 10
    for place, (entry, row) in enumerate(zip(answer.logprobs, logs)):
        assert entry.id == answer.ids[place]
        assert entry.logprob == pytest.approx(row[entry.id].item(), abs=1e-4)
        best = row.topk(4)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert plain.logprobs is not None and [entry.top for entry in plain.logprobs] == [()] * 4
    assert none.logprobs is None


def test_an_end_token_ends_one_row_and_is_not_shown(decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.eos_ids

    class EndAfter:
        """A rule from outside: the seam that grammars, budgets and biases use."""

        def __init__(self, count: int) -> None:
            self.count = count

        def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
            out = scores.copy()
            out[end] = 1e9 if len(state.output) == self.count else float("-inf")
            return out

    model = decoder()
    engine = Engine(model, tokenizer)
    requests = [
        Request(ids=PROMPTS[0], max_tokens=9, rules=(EndAfter(4),), logprobs=1),
        Request(ids=PROMPTS[1], max_tokens=9, rules=(EndAfter(0),)),
        Request(ids=PROMPTS[2], max_tokens=9),
    ]
    pieces = list(engine.run(requests))
    last = [piece for index, piece in pieces if index == 0][-1]
    assert (last.id, last.finish) == (None, "stop") and last.logprob is not None and last.logprob.id == end
    short, empty, whole = engine.answer(requests)
    assert short.ids == greedy_from_scratch(model, PROMPTS[0], 4, stores=False)
    assert short.logprobs is not None and len(short.logprobs) == 4
    assert empty == Answer(text="", ids=(), finish="stop", usage=empty.usage, seed=empty.seed)
    assert whole.ids == greedy_from_scratch(model, PROMPTS[2], 9, stores=False) and whole.finish == "length"


@pytest.mark.parametrize("kind", ["plain", "window"])
def test_a_long_answer_ends_with_the_context(kind: str, decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> None:
    model = decoder(stores=KINDS[kind], context=24)
    answers = Engine(model, tokenizer).answer(
        [Request(ids=(9,) * 20, max_tokens=1000), Request(ids=(9,) * 23, max_tokens=5), Request(ids=(1,), max_tokens=8)]
    )
    assert [(len(answer.ids), answer.finish) for answer in answers] == [(4, "length"), (1, "length"), (8, "length")]
    assert answers[0].ids == greedy_from_scratch(model, (9,) * 20, 4, stores=kind != "plain")


def test_bfloat16(decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> None:
    model = decoder().to(torch.bfloat16)
    (answer,) = Engine(model, tokenizer).answer([Request(ids=(1, 2), max_tokens=5, logprobs=1)])
    assert len(answer.ids) == 5 and answer.logprobs is not None and answer.logprobs[0].logprob < 0
