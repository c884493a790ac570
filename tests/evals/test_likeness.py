"""Likeness: the same numbers as the plain way, whatever the chunks; nothing is lost by a model that is the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.batch import IGNORED, Batch
from orchard.core.errors import UnsupportedPair, UsageError
from orchard.data.batches import laid_out
from orchard.data.source import Sample
from orchard.evals.answers import BadTasks, Question, read_questions
from orchard.evals.likeness import Likeness, likeness, together
from orchard.models.language.decoder import Decoder
from orchard.transforms.kv8 import KV8
from tests.recipes.small import fresh

VOCAB = 258


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    tree: Any = fresh(tmp_path_factory.mktemp("tree")).complete().train.model
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model: Decoder = tree.build().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4 if parameter.dim() > 1 else 1)
        made.append(model)
    return made[0], made[1]


def batch(seed: int = 0, rows: int = 3, width: int = 12, documents: int = 2) -> Batch:
    draw = np.random.default_rng(seed)
    filled = []
    for _ in range(rows):
        sizes = [width // documents + 1] * documents
        filled.append([Sample.of(draw.integers(0, VOCAB, size).tolist()) for size in sizes])
    return laid_out(filled, rows, width)


def plain(model: Decoder, other: Decoder, batches: list[Batch]) -> Likeness:
    """The plain way: every document alone, all scores at once."""
    loss = reference = kl = same = count = 0.0
    for one in batches:
        for row in range(len(one)):
            for document in sorted(set(one.documents[row].tolist()) - {-1}):
                at = np.flatnonzero(one.documents[row] == document)
                ids, targets = torch.tensor(one.ids[row, at])[None], torch.tensor(one.targets[row, at])
                q, p = (each(ids)[0].double().log_softmax(-1) for each in (model, other))
                for place in (targets != IGNORED).nonzero()[:, 0].tolist():
                    loss -= q[place, targets[place]].item()
                    reference -= p[place, targets[place]].item()
                    kl += (p[place].exp() * (p[place] - q[place])).sum().item()
                    same += q[place].argmax().item() == p[place].argmax().item()
                    count += 1
    return Likeness(int(count), loss / count, reference / count, kl / count, same / count)


@given(room=st.sampled_from([1, 257, 258, 1000, 1 << 24]), documents=st.sampled_from([1, 2, 3]))
def test_it_is_what_the_plain_way_gives(models: tuple[Decoder, Decoder], room: int, documents: int) -> None:
    batches = [batch(seed, documents=documents) for seed in (0, 1)]
    found, wanted = likeness(*models, batches, room=room), plain(*models, batches)
    assert found.tokens == wanted.tokens and found.agreement == wanted.agreement
    for name in ("loss", "reference", "kl"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-4), name
    assert found.ratio == pytest.approx(wanted.loss / wanted.reference, rel=1e-4)


def test_a_model_is_like_itself(models: tuple[Decoder, Decoder]) -> None:
    told: list[float] = []
    found = likeness(models[0], models[0], [batch()], tell=told.append)
    assert (found.kl, found.agreement, found.ratio) == (0.0, 1.0, 1.0) and told == [1.0] and found.finite


def test_stores_show_what_they_cost(models: tuple[Decoder, Decoder]) -> None:
    """Reading through stores that keep everything changes next to nothing; through eight bits, something."""
    one = batch(documents=1)
    through = likeness(models[0], models[0], [one], stores=True)
    assert through.kl < 1e-6
    coded = KV8().apply(models[0])
    assert likeness(coded, models[0], [one]).kl < 1e-6, "without stores nobody would notice"
    assert likeness(coded, models[0], [one], stores=True).kl > 10 * max(through.kl, 1e-9)
    with pytest.raises(UsageError, match="several documents"):
        likeness(models[0], models[0], [batch(documents=2)], stores=True)


def test_numbers_that_are_none(models: tuple[Decoder, Decoder], tmp_path_factory: pytest.TempPathFactory) -> None:
    import copy

    broken = copy.deepcopy(models[0])
    with torch.no_grad():
        broken.norm.weight.fill_(math.nan)
    found = likeness(broken, models[0], [batch()])
    assert not found.finite and math.isnan(found.kl)
    facts = found.to_dict()
    assert facts["kl"] is None and facts["reference"] is not None and facts["tokens"] == found.tokens
    assert not Likeness.from_dict(facts).finite


def test_together_every_place_counts_the_same() -> None:
    found = together([Likeness(10, 1.0, 2.0, 0.5, 1.0), Likeness(30, 2.0, 2.0, 0.1, 0.0)])
    assert found == Likeness(40, 1.75, 2.0, 0.2, 0.25) and Likeness.from_dict(found.to_dict()) == found


def test_what_cannot_be_compared(models: tuple[Decoder, Decoder]) -> None:
    with pytest.raises(UsageError, match="no text"):
        likeness(*models, [])
    tree: Any = models[0].config.clone(vocab=300)
    with pytest.raises(UnsupportedPair, match="258 tokens and the other 300"):
        likeness(models[0], tree.build(), [batch()])


# Tasks ------------------------------------------------------------------------------------------------------------------


class Says:
    """A model that says what it is told to."""

    def __init__(self, *answers: str) -> None:
        self.answers = answers

    def generate_many(self, prompts: list[Any], max_tokens: int) -> list[Any]:
        from types import SimpleNamespace

        assert len(prompts) == len(self.answers) and max_tokens == 64
        return [SimpleNamespace(text=text) for text in self.answers]


def test_questions_are_scored_by_task(tmp_path: Any) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"prompt": "2 + 2?", "expected": ["4", "four"], "task": "sums"}\n\n'
        '{"prompt": "3 + 3?", "expected": "6", "exact": true, "task": "sums"}\n'
        '{"messages": [{"role": "user", "content": "Capital of France?"}], "completion": "Paris"}\n'
    )
    questions = read_questions(path)
    assert questions(Says("It is FOUR.", "It is 6.", "paris, of course")) == {"sums": 0.5, "tasks": 1.0}
    assert Question("", ("6",), exact=True).right(" 6 ") and not Question("", ("6",), exact=True).right("66")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "no JSON"),
        ("[]", "neither a prompt"),
        ('{"expected": "x"}', "neither a prompt"),
        ('{"prompt": "x", "messages": [], "expected": "x"}', "or both"),
        ('{"prompt": "x"}', "nothing is expected"),
        ('{"prompt": "x", "expected": [" "]}', "nothing is expected"),
        ('{"prompt": "x", "expected": "y", "exact": 1}', "exact"),
        ("", "no questions"),
    ],
)
def test_questions_that_cannot_be_asked(line: str, says: str, tmp_path: Any) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(line)
    with pytest.raises(BadTasks, match=says) as caught:
        read_questions(path)
    assert caught.value.hint
    with pytest.raises(BadTasks, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")
