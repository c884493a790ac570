"""The study of sub-networks by prompt: its exercises are right, its models are alike where they should be, and it runs."""

from __future__ import annotations

import pytest
import torch

from orchard.core.batch import IGNORED
from orchard.studies import _ifp_models as models
from orchard.studies import ifp, study
from orchard.studies._ifp_tasks import DOMAINS, END, FIRST_BRACKET, KINDS, LETTERS, MARK, exercises
from orchard.transforms.ifprune_model import Instructed

TINY = models.Size(dim=16, heads=2, head_dim=8, hidden=8, kept=2, reader=8, rows=8, steps=4, compared=3)


@pytest.mark.parametrize("domain", DOMAINS)
def test_exercises_are_right(domain: str) -> None:
    read = exercises(20, 0, "a", domain)
    for row in range(20):
        ids, prompt = read.batch.ids[row].tolist(), read.prompt(row)
        given, answer = prompt[3:-1], ids[len(prompt) : ids.index(END)]
        assert prompt[-1] == MARK
        if domain == "copy":
            assert answer == given
        elif domain == "reverse":
            assert answer == given[::-1]
        elif domain == "sort":
            assert answer == sorted(given)
        elif domain == "add":
            assert answer == [(given[i] + given[i + 2]) % LETTERS for i in range(2)]
        elif domain == "caesar":
            assert answer == [(letter + given[0]) % LETTERS for letter in given[1:]]
        else:
            open_: list[int] = []
            for token in [*given, *answer]:
                kind = token - FIRST_BRACKET
                if kind < KINDS:
                    open_.append(kind)
                else:
                    assert open_.pop() == kind - KINDS
            assert not open_
        learnt = read.batch.targets[row][read.batch.targets[row] != IGNORED].tolist()
        assert learnt == [*answer, END]


def test_exercises_come_from_their_seed() -> None:
    one, same, other = (exercises(8, 0, name) for name in ("a", "a", "b"))
    assert torch.equal(one.batch.ids, same.batch.ids) and not torch.equal(one.batch.ids, other.batch.ids)


def test_models_begin_alike() -> None:
    made = {name: models.built(config, 3) for name, config in models.trees(TINY).items()}
    wanted = made["small"].stack.layers[1].mixer.q.weight
    for name in ("large", "static", "ifp"):
        decoder = made[name].decoder if isinstance(made[name], Instructed) else made[name]
        assert torch.equal(decoder.stack.layers[1].mixer.q.weight, wanted)
        assert torch.equal(decoder.stack.layers[1].mlp.up.weight, made["large"].stack.layers[1].mlp.up.weight)


def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ifp.SCALES, "small", (TINY, 1))
    monkeypatch.setattr(models, "HELD_OUT", 4)
    report = study("ifp")
    verdicts = {claim.id: claim.passed for claim in report.claims}
    assert verdicts["gathered"] and verdicts["active"]
    assert verdicts.keys() == {claim.id for claim in ifp.CLAIMS}
