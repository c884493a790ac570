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
from orchard.generate.protocol import Runner
from orchard.generate.row import Row
from orchard.generate.torch_forward import TorchRunner, runner_of
from orchard.text.tokenizer import Tokenizer


class Counting:
    """Every sequence wants the token after its last one. Old scores turn to NaN with the next call."""

    def __init__(self, vocab: int, context: int = 64) -> None:
        self.config = types.SimpleNamespace(vocab=vocab, context=context)
        self.lengths: list[int] = []

    def begin(self, prompts: Sequence[Sequence[int]], *, length: int, held: Sequence[object] = ()) -> CountingPass:
        self.lengths.append(length)
        return CountingPass(self.config.vocab, prompts)


class CountingPass:
    def __init__(self, vocab: int, prompts: Sequence[Sequence[int]]) -> None:
        self.lengths = [len(prompt) for prompt in prompts]
        self.longest = max(self.lengths)
        self.starts = [0] * len(prompts)
        self.vocab = vocab
        self._prompts = prompts
        self._read = 0
        self._memory = np.empty((len(prompts), vocab), np.float32)
        self._given: list[np.ndarray] = []

    def read(self, start: int, stop: int) -> None:
        assert start == self._read
        self._read = stop

    def first(self) -> np.ndarray:
        assert self._read >= self.longest
        return self._scores([prompt[-1] for prompt in self._prompts])

    def step(self, ids: Sequence[int]) -> np.ndarray:
        assert len(ids) == len(self.lengths)
        self.lengths = [length + 1 for length in self.lengths]
        return self._scores(ids)

    def extend(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        self.lengths = [length + len(ids) - 1 for length, ids in zip(self.lengths, tokens, strict=True)]
        return self.step([ids[-1] for ids in tokens])

    def hold(self, row: int, tokens: int) -> None:
        return None

    def keep(self, rows: Sequence[int]) -> None:
        self._memory[:] = np.nan
        self.lengths = [self.lengths[row] for row in rows]

    def _scores(self, ids: Sequence[int]) -> np.ndarray:
        self._memory[:] = np.nan
        out = np.resize(self._memory, (len(ids), self.vocab)) if len(ids) < len(self._memory) else self._memory
        out[:] = np.linspace(-3, 0, self.vocab)  # no two alike
        out[np.arange(len(ids)), (np.asarray(ids) + 1) % self.vocab] = 20
        self._memory = out
        return out


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
    assert runner.lengths == [11, 11]


def test_no_limit_makes_a_pass_longer_than_the_context(tokenizer: Tokenizer) -> None:
    runner = Counting(tokenizer.vocab_size, context=40)
    answers = Engine(runner, tokenizer).answer([Request(ids=(1, 2), max_tokens=2**24), Request(ids=(1,), max_tokens=1)])
    assert runner.lengths == [40] and [len(answer.ids) for answer in answers] == [38, 1]


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
    def begin(self, prompts, *, length, held=()):
        self.lengths = [len(p) for p in prompts]
        self.longest = max(self.lengths)
        self.starts = [0] * len(prompts)
        return self
    def hold(self, row, tokens): return None
    def read(self, start, stop): pass
    def first(self): return np.arange(9, dtype=np.float32)[None].repeat(len(self.lengths), 0)
    def step(self, ids): return self.first()
    def keep(self, rows): self.lengths = [self.lengths[row] for row in rows]

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
