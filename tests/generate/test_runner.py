"""The engine on a runner without torch, one that reuses its memory as meanly as the protocol allows."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from collections.abc import Sequence

import numpy as np
import pytest

from orchard.generate import Engine, Request, Sampling
from orchard.generate.protocol import Runner, Use, Work
from orchard.generate.row import Row
from orchard.generate.torch_forward import TorchRunner, runner_of
from orchard.text.tokenizer import Tokenizer


class Counting:
    """Every sequence wants the token after its last one. Old scores turn to NaN with the next call."""

    def __init__(self, vocab: int, context: int = 64) -> None:
        self.config = types.SimpleNamespace(vocab=vocab, context=context)
        self.lengths: list[int] = []

    def slots(self, count: int) -> CountingSlots:
        return CountingSlots(self, count)


class CountingSlots:
    goes_back = True
    copies = False

    def __init__(self, runner: Counting, count: int) -> None:
        self.count = count
        self.lengths = [0] * count
        self.runner = runner
        self.given: list[np.ndarray] = []

    def open(self, slot: int, length: int, use: Use | None = None, variant: str | None = None) -> int:
        assert self.lengths[slot] == 0
        self.runner.lengths.append(length)
        return 0

    def copy(self, source: int, target: int, tokens: int) -> bool:
        return False

    def run(self, work: Sequence[Work]) -> list[np.ndarray]:
        for old in self.given:
            old[:] = np.nan
        assert len({one.prompt for one in work}) == 1 and len({one.slot for one in work}) == len(work)
        self.given = [self._scores(one) for one in work]
        return self.given

    def _scores(self, one: Work) -> np.ndarray:
        vocab = self.runner.config.vocab
        self.lengths[one.slot] += len(one.tokens)
        out = np.tile(np.linspace(-3, 0, vocab, dtype=np.float32), (one.wanted, 1))  # no two alike
        last = np.asarray(one.tokens)[len(one.tokens) - one.wanted :]
        out[np.arange(one.wanted), (last + 1) % vocab] = 20
        return out

    def back(self, slot: int, tokens: int) -> None:
        self.lengths[slot] = tokens

    def hold(self, slot: int, tokens: int) -> None:
        return None

    def hidden(self, slot: int) -> None:
        return None

    def close(self, slot: int) -> None:
        self.lengths[slot] = 0

    def nbytes(self, length: int) -> int:
        return 0


def test_a_runner_without_torch(tokenizer: Tokenizer) -> None:
    runner = Counting(tokenizer.vocab_size)
    engine = Engine(runner, tokenizer, prefill_chunk=3)
    requests = [
        Request(ids=(3, 4, 5), max_tokens=4, logprobs=2),
        Request(ids=(10,), max_tokens=7, sampling=Sampling(repetition_penalty=1.1)),
        Request(ids=(90,) * 9, max_tokens=2, sampling=Sampling(temperature=0.5, top_k=3), seed=1),
    ]
    pieces = list(engine.run(requests))
    answers = engine.answer(requests)
    assert [answer.ids for answer in answers] == [(6, 7, 8, 9), tuple(range(11, 18)), (91, 92)]
    assert "".join(piece.text for index, piece in pieces if index == 1) == answers[1].text
    assert answers[0].logprobs is not None
    assert all(entry.logprob == pytest.approx(0, abs=1e-4) for entry in answers[0].logprobs), "read before it is reused"
    assert sorted(runner.lengths) == sorted([7, 8, 11] * 2)


def test_no_limit_makes_a_pass_longer_than_the_context(tokenizer: Tokenizer) -> None:
    runner = Counting(tokenizer.vocab_size, context=40)
    answers = Engine(runner, tokenizer).answer([Request(ids=(1, 2), max_tokens=2**24), Request(ids=(1,), max_tokens=1)])
    assert sorted(runner.lengths) == [2, 40] and [len(answer.ids) for answer in answers] == [38, 1]


def test_a_torch_model_is_wrapped_and_a_runner_is_not(scripted: object, tokenizer: Tokenizer) -> None:
    runner, model = Counting(5), scripted([1])  # type: ignore[operator]
    assert isinstance(runner, Runner) and runner_of(runner) is runner and Engine(runner, tokenizer).model is runner
    wrapped = Engine(model, tokenizer).model
    assert isinstance(wrapped, TorchRunner) and wrapped.model is model and isinstance(wrapped, Runner)
    assert runner_of(wrapped) is wrapped and wrapped.config is model.config
    scores = wrapped.begin([(1, 2)], length=3)
    scores.read(0, 2)
    first = scores.first()
    assert isinstance(first, np.ndarray) and first.dtype == np.float32 and first.shape == (1, tokenizer.vocab_size)


def test_a_token_costs_the_same_at_the_end_of_a_long_answer(tokenizer: Tokenizer) -> None:
    vocab, steps, parts = tokenizer.vocab_size, 4000, 8
    scores = np.linspace(0, 1, vocab, dtype=np.float32)[::-1].copy()
    scores[97] = 5  # "a": one character, and no end token
    times = np.full((3, parts), np.inf)
    for turn in range(3):
        row = Row(0, Request(ids=(1,), max_tokens=2**24, seed=1), tokenizer, room=steps + 1)
        for part in range(parts):
            begun = time.perf_counter()
            for _ in range(steps // parts):
                row.take(scores)
            times[turn, part] = time.perf_counter() - begun
    best = times.min(0)
    assert best[-1] < 3 * best[1], f"seconds per {steps // parts} tokens: {best}"


def test_an_answer_without_torch_in_a_fresh_interpreter() -> None:
    code = """
import sys, types
import numpy as np
from orchard.generate import Engine, Request, Sampling

class Same:
    config = types.SimpleNamespace(vocab=9, context=50)
    goes_back = True
    copies = False
    def slots(self, count):
        self.count, self.lengths = count, [0] * count
        return self
    def open(self, slot, length, use=None, variant=None): return 0
    def run(self, work):
        for one in work: self.lengths[one.slot] += len(one.tokens)
        return [np.arange(9, dtype=np.float32)[None].repeat(one.wanted, 0) for one in work]
    def copy(self, source, target, tokens): return False
    def hold(self, slot, tokens): return None
    def close(self, slot): self.lengths[slot] = 0
    def nbytes(self, length): return 0

class Letters:
    eos_ids = frozenset()
    skipped_ids = frozenset()
    def token_text(self, token_id): return "abcdefghi"[token_id]
    spelling = types.SimpleNamespace(kind="byte-level", bytes_of=str.encode, strip_start=0)

greedy = Request(ids=(1,), max_tokens=3)
sampled = Request(ids=(1, 2), max_tokens=5, sampling=Sampling(temperature=1, top_p=0.9, repetition_penalty=1.1), logprobs=2)
texts = [answer.text for answer in Engine(Same(), Letters()).answer([greedy, sampled])]
assert texts[0] == "iii" and len(texts[1]) == 5, texts
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
