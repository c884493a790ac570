"""The study of episodic memory: its chats are right, its ways keep their budgets, and it runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from orchard.core.batch import IGNORED
from orchard.core.context import Context
from orchard.studies import _epicache_chats as chats
from orchard.studies import epicache, study
from orchard.studies._epicache_model import Size, built
from orchard.studies._epicache_ways import Reader, ask, divergence

TINY = Size(dim=16, layers=2, heads=2, head_dim=8, steps=3, facts=16, chats=1, oracle=1, medoids=2, alphas=(1.0,))


def test_chats_say_every_fact_once_and_stay_with_a_topic() -> None:
    one = chats.chat(64, np.random.default_rng(1))
    assert len({(topic, key) for topic, key, _ in one.facts.tolist()}) == 64
    assert all(len(set(group[:, 0].tolist())) == 1 for group in one.facts.reshape(-1, chats.TOGETHER, 3))
    tokens = one.tokens()
    assert len(tokens) == 257 and max(tokens) < chats.VOCAB
    for place, (question, answer) in enumerate(zip(one.questions(), one.answers(), strict=True)):
        said = tokens[1 + 4 * place : 5 + 4 * place]
        assert question == [chats.ASK, *said[1:3]] and answer == said[0]


def test_lessons_ask_for_what_was_said() -> None:
    batch = chats.lesson(3, 8, 5, 0, "a")
    for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
        known = {tuple(ids[at + 1 : at + 3]): ids[at] for at in range(1, 33, 4)}
        asked = [place for place, target in enumerate(targets) if target != IGNORED]
        assert len(asked) == 5 and asked[0] > 33
        assert all(known[tuple(ids[place - 1 : place + 1])] == targets[place] for place in asked)
    assert torch.equal(batch.ids, chats.lesson(3, 8, 5, 0, "a").ids)


def test_asking_is_reading_and_leaves_nothing() -> None:
    model, one = built(TINY, 0).eval(), chats.chat(16, np.random.default_rng(2))
    reader = Reader(model, TINY, one)
    told = reader.full()
    for place in (0, 9):
        ids = torch.tensor([[*one.tokens(), *one.questions()[place]]])
        with torch.no_grad():
            want = model(ids, Context.whole(ids))[0, -1].log_softmax(-1)
        np.testing.assert_allclose(told[place], want.numpy(), atol=1e-4)
    kept = reader.kept("keydiff")
    kept.read(one.tokens())
    before = kept.save()
    ask(kept, one.questions())
    assert all(np.array_equal(array, kept.save()[name]) for name, array in before.items())
    assert divergence(told, told) == 0 < divergence(told, reader.alone("recent"))


def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(epicache.SCALES, "small", TINY)
    report = study("epicache")
    verdicts = {claim.id: claim.passed for claim in report.claims}
    assert verdicts["peak"] and verdicts.keys() == {claim.id for claim in epicache.CLAIMS}
    assert not verdicts["learnt"]  # three steps teach nothing
