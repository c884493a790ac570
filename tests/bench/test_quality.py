"""Agreement and divergence, on made-up scores and on the tiny model; texts; repacking."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.bench.quality import Agreement, _digest, compare, measure, step_scores
from orchard.bench.texts import TEXTS
from orchard.core.errors import UsageError
from orchard.session.model import load
from tests.tiny import tiny_gguf


@given(st.integers(0, 2**32 - 1), st.floats(-50, 50))
def test_equal_scores_agree_whatever_is_added_to_a_row(seed: int, shift: float) -> None:
    scores = np.random.default_rng(seed).normal(size=(4, 9)).astype(np.float32)
    found = compare(scores, scores + np.float32(shift))
    assert found.tokens == 4 and abs(found.nats) < 1e-5


@given(st.integers(0, 2**32 - 1))
def test_divergence_is_never_negative_and_grows_with_the_difference(seed: int) -> None:
    random = np.random.default_rng(seed)
    scores, noise = random.normal(size=(2, 3, 17)).astype(np.float32)
    near, far = compare(scores, scores + 0.01 * noise).nats, compare(scores, scores + noise).nats
    assert -1e-9 <= near <= far


def test_divergence_of_a_coin() -> None:
    fair, bent = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    found = compare(fair, bent)
    assert found.nats == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert found.same == 1 and compare(bent, bent[:, ::-1]).same == 0


def test_texts_add_up() -> None:
    assert (Agreement(10, 9, 1.0) + Agreement(30, 30, 0.0)).share == pytest.approx(39 / 40)
    with pytest.raises(UsageError):
        compare(np.zeros((2, 3)), np.zeros((3, 2)))


def test_stepping_gives_the_scores_of_reading_at_once(tmp_path: Path, empty_home: Path) -> None:
    model = load(tiny_gguf(tmp_path / "tiny.gguf"), dtype="float32")
    ids = [5, 80, 12, 33, 90, 41]
    assert compare(model.logits(ids)[0].numpy(), step_scores(model.runner, ids)).nats < 1e-2


def test_a_whole_measurement(tmp_path: Path, empty_home: Path) -> None:
    found = measure(str(tiny_gguf(tmp_path / "tiny.gguf")), texts=1, threads=1)
    assert found["texts"] == 1 and found["tokens"] > 30
    assert found["decode"]["agreement"] > 0.8 and 0 <= found["decode"]["nats"] < 0.1
    assert found.get("lost", []) == []  # the file holds no type that could be lost


def test_one_bit_makes_another_matrix() -> None:
    one = np.ones((4, 4), np.float32)
    other = one.copy()
    other.view(np.uint32)[3, 3] ^= 1
    assert _digest(one) == _digest(one.copy()) != _digest(other)
    assert _digest(one) != _digest(one.reshape(2, 8))


def test_there_are_fifty_different_texts() -> None:
    assert len(set(TEXTS)) == len(TEXTS) == 50
    assert all(150 < len(text) < 800 for text in TEXTS)


@pytest.mark.real
def test_texts_have_the_length_that_they_should(smollm2: Path) -> None:
    from orchard.text.tokenizer import Tokenizer
    from orchard.weights.gguf.reader import GGUFFile

    with GGUFFile.open(smollm2) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    assert all(50 <= len(tokenizer.encode(text)) <= 220 for text in TEXTS)


@pytest.mark.real
def test_repacking_the_default_model_loses_nothing_and_a_changed_bit_is_found(smollm2: Path) -> None:
    from orchard.bench.quality import matrices_lost
    from orchard.weights.checkpoint import open_checkpoint

    plan = getattr(load("smollm2").runner, "plan", None)
    if plan is None:
        pytest.skip("no native library here, so nothing is repacked")
    with open_checkpoint(smollm2) as checkpoint:
        tree = checkpoint.config()
        assert matrices_lost(checkpoint, tree, plan) == []
        name = next(name for name in plan.tensors if plan.tensors[name].dtype == np.uint8 and "mlp" in name)
        bent = plan.tensors[name].copy()
        bent[-1] ^= 1
        changed = dataclasses.replace(plan, tensors={**plan.tensors, name: bent})
        assert len(matrices_lost(checkpoint, tree, changed)) == 1
