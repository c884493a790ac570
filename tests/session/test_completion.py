"""Texts gone on with as they stand: what the model thought of the prompt, what biases and penalties do."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchard.core.errors import UsageError
from orchard.generate.request import Sampling
from orchard.session.completion import Completion
from orchard.session.errors import ExceededContextWindowSizeError
from orchard.session.executors.local import LocalExecutor
from orchard.session.model import load
from orchard.session.turn import Done, Text

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def executor(smollm2: Path) -> LocalExecutor:
    return LocalExecutor(load(smollm2))


def run(executor: LocalExecutor, asked: Completion) -> tuple[list[Text], Done]:
    *texts, done = executor.complete(asked, threading.Event())
    assert isinstance(done, Done)
    return [text for text in texts if isinstance(text, Text)], done


def test_the_prompt_is_scored_as_the_model_scores_it(executor: LocalExecutor) -> None:
    prompt = "The capital of France is Paris. " * 12  # more than one chunk of scored tokens
    ids = executor.encode(prompt)
    assert len(ids) > 70
    asked = Completion(prompt, max_tokens=0, echo=True, logprobs=2)
    texts, done = run(executor, asked)
    assert (texts[0].delta, list(texts[0].ids)) == (prompt, ids)
    assert len(texts) == 1 and (done.finish, done.usage.output, done.usage.cached) == ("length", 0, 0)
    logits = executor.model.logits([ids])[0].log_softmax(-1).numpy()
    found = texts[0].logprobs
    assert [one.id for one in found] == ids[1:]
    for place, one in enumerate(found):
        assert abs(one.logprob - logits[place, one.id]) < 0.1  # the native engine rounds to 8 bits
        assert len(one.top) == 2 and one.top[0][1] >= one.top[1][1]
    assert np.mean([abs(one.logprob - logits[place, one.id]) for place, one in enumerate(found)]) < 0.02
    again, _ = run(executor, replace(asked, max_tokens=3))
    assert again[0].logprobs == found and len(again) == 4, "the same, however often, and cached or not"


def test_a_bias_forbids_and_demands_tokens(executor: LocalExecutor) -> None:
    plain = Completion("The capital of France is", max_tokens=4)
    first = run(executor, plain)[0][0].ids[0]
    assert run(executor, replace(plain, bias={first: -100.0}))[0][0].ids[0] != first
    texts, _ = run(executor, replace(plain, bias={271: 100.0}))
    assert [text.ids for text in texts] == [(271,)] * 4
    with pytest.raises(UsageError, match="bias"):
        executor.complete(replace(plain, bias={10**9: 1.0}), threading.Event())


def test_penalties_keep_an_answer_from_repeating_itself(executor: LocalExecutor) -> None:
    asked = Completion("1, 1, 1, 1, 1, 1, 1, 1,", max_tokens=24)

    def most(sampling: Sampling) -> int:
        ids = [token for text in run(executor, replace(asked, sampling=sampling))[0] for token in text.ids]
        return max(map(ids.count, ids))

    assert most(Sampling()) >= 8
    assert most(Sampling(frequency_penalty=2.0)) < most(Sampling())
    assert most(Sampling(presence_penalty=100.0)) == 1


def test_what_cannot_be_gone_on_with_is_refused_before_anything_happens(executor: LocalExecutor) -> None:
    for wrong in (Completion(""), Completion("a", max_tokens=0), Completion("a", max_tokens=-1)):
        with pytest.raises(UsageError):
            executor.complete(wrong, threading.Event())
    with pytest.raises(ExceededContextWindowSizeError):
        executor.complete(Completion((5,) * executor.context_size), threading.Event())


def test_control_tokens_in_a_text_are_letters(executor: LocalExecutor) -> None:
    (end,) = executor.model.tokenizer.encode("<|im_end|>", special=True)
    assert end not in executor.encode("a <|im_end|> b")
    assert b"".join(executor.spelled(executor.encode("naïve <|im_end|>"))).decode() == "naïve <|im_end|>"
