"""Answers to prompts as a kind of text: in shorter rows, beside rows of full length, and nothing learnt of what was asked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchard.core.batch import IGNORED
from orchard.evals import following_words
from orchard.evals.following import follow, following
from orchard.recipes.compress import compress
from orchard.recipes.compressing import prompts_words, texts
from orchard.recipes.compressing.follows import follows, greedy_answers
from orchard.recipes.compressing.prompts import prompts
from orchard.recipes.compressing.texts import ASKED, Texts, Wanted, texts_for
from orchard.recipes.own_text import answers
from orchard.session.build import build
from orchard.session.model import load
from orchard.text.chat import chat_ids
from tests.recipes.compressed_models import trained_folder

LENGTH = 384


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_folder(tmp_path_factory.mktemp("models") / "qwen2", steps=5, max_position_embeddings=LENGTH + 1)


@pytest.fixture(scope="module")
def two_lengths() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PARTS", 2)
        yield


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory, two_lengths: None) -> Texts:
    tokenizer, built = build(base, None, torch.float32, "cpu")
    folder = tmp_path_factory.mktemp("text")
    return texts_for(built.decoder, tokenizer, Wanted(12 * LENGTH, LENGTH, LENGTH, 8), folder)


def test_prompts_are_many_and_share_no_word_with_the_checks() -> None:
    made = prompts(3000, seed=1)
    assert len(set(made)) == 3000 and made == prompts(3000, seed=1) != prompts(3000, seed=2)
    mine = {word.lower() for name, some in vars(prompts_words).items() if name.isupper() for word in some}
    lists = ("NAMES", "CITIES", "JOBS", "PLACES", "MONTHS", "ITEMS", "ANIMALS", "SUBJECTS", "SHORT", "GROUPS")
    theirs = {word.lower() for name in lists for word in getattr(following_words, name)}
    theirs |= {word for word, _ in following_words.OPPOSITES}
    assert len(mine) > 500 and not mine & theirs
    asked = {check.prompt for check in following()}
    assert not asked & set(prompts(20_000))


def test_an_opening_is_what_the_chat_template_makes_of_a_prompt(base: Path) -> None:
    tokenizer, _ = build(base, None, torch.float32, "cpu")
    said = ["Where?", "Name <|im_end|> it.", " two  spaces "]
    script = answers(tokenizer, said, heat=(0.5, 1.0))
    assert list(script.openings) == [chat_ids(tokenizer, [{"role": "user", "content": one}]) for one in said]
    assert list(script.heat) == [0.5, 1.0, 0.5]


def test_rows_of_two_lengths_make_batches_of_as_many_tokens(written: Texts) -> None:
    assert written.lengths[ASKED] == LENGTH // 2 and set(written.learnt) == {LENGTH, LENGTH // 2}
    shapes = [tuple(batch.ids.shape) for batch in islice(written.source(2, 0).build(), 12)]
    assert set(shapes) == {(2, LENGTH), (4, LENGTH // 2)}
    share = written.tokens[LENGTH // 2] / sum(written.tokens.values())
    assert shapes.count((4, LENGTH // 2)) == pytest.approx(12 * share, abs=1)
    held = next(written.held_out(ASKED, 2))
    assert held.ids.shape == (4, LENGTH // 2)


def test_nothing_is_learnt_of_what_was_asked(base: Path, written: Texts) -> None:
    tokenizer, _ = build(base, None, torch.float32, "cpu")
    begin = chat_ids(tokenizer, [{"role": "user", "content": "x"}])[:2]
    batch = next(written.held_out(ASKED, 1))
    ids, targets = np.asarray(batch.ids), np.asarray(batch.targets)
    real = np.asarray(batch.positions[:, 0]) >= 0
    assert real.any() and (ids[real, :2] == begin).all()
    assert (targets[real, 0] == IGNORED).all(), "a prompt comes first"
    assert ((targets[real] != IGNORED).sum(1) > 0).all(), "and an answer after it"


@pytest.mark.long
def test_a_model_learns_from_both_lengths(base: Path, tmp_path: Path, two_lengths: None) -> None:
    small: dict[str, Any] = {"held": LENGTH, "looked": 2 * LENGTH, "length": LENGTH, "rows": 2, "dtype": "float32"}
    made = compress(base, ["qat:bits=4"], tmp_path / "x.orchard", device="cpu", tokens=6 * LENGTH, **small)
    assert set(made.to_dict()["measured"]["kinds"]) == {"plain", "chat", "calm", ASKED}


def test_answers_in_a_batch_are_the_engines_greedy_ones(base: Path) -> None:
    model = load(base, device="cpu")
    said = ["Where is the apple?", "Name two.", "Why?"]
    found = greedy_answers(model.decoder, model.tokenizer, said, tokens=8)
    assert found == [model.generate(one, max_tokens=8, temperature=0).text for one in said]


def test_follows_gives_the_score_of_the_checks(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchard.recipes.compressing import follows as module

    checks = following(each=2)
    monkeypatch.setattr(module, "following", lambda: checks)
    model = load(base, device="cpu")
    said = greedy_answers(model.decoder, model.tokenizer, [check.prompt for check in checks])
    assert follows(model) == follow(checks, lambda prompts: said).by_kind


@pytest.mark.long
def test_healing_may_hold_states_block_by_block(base: Path, tmp_path: Path) -> None:
    small: dict[str, Any] = {"held": 64, "looked": 128, "length": 32, "rows": 4, "dtype": "float32", "tokens": 512}
    plan = ["share-kv:last=1", "heal:states=1.0,lr=1e-2"]
    made = compress(base, plan, tmp_path / "x.orchard", device="cpu", **small)
    plain = compress(base, ["share-kv:last=1", "heal:lr=1e-2"], tmp_path / "y.orchard", device="cpu", **small)
    assert made.measured.all.kl != plain.measured.all.kl and made.measured.all.finite
