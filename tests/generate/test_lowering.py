"""Every family as a plan, run by the plain interpreter, against the same model in torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from orchard.generate.lowering import lower
from orchard.models.language import Decoder
from orchard.ops.plan.reference import Reference
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from tests.parity.families import CASES, reference, save

BAR = 1e-4


@pytest.fixture(scope="module", params=sorted(CASES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = save(reference(request.param), tmp_path_factory.mktemp(request.param))
    with open_checkpoint(folder) as checkpoint:
        return load_decoder(checkpoint)


def ids_of(count: int, seed: int) -> list[int]:
    return torch.randint(3, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def expected_scores(model: Decoder, ids: Sequence[int]) -> np.ndarray:
    scores: np.ndarray = model(torch.tensor([ids]))[0].numpy()
    return scores


def differ(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape and got.dtype == np.float32
    return float(np.abs(got - expected).max())


def test_every_family_lowers_whole(model: Decoder) -> None:
    assert lower(model).whole
    assert {spec.codec for spec in lower(model).stores} == {"bf16"}


def test_whole_prompt(model: Decoder) -> None:
    ids = ids_of(24, 1)
    expected = expected_scores(model, ids)
    assert expected.std() > 0.05
    run = Reference(lower(model, stores="f32"), 1, 32)
    assert differ(run.run(ids, [0] * 24, range(24), range(24)), expected) <= BAR


def test_in_chunks(model: Decoder) -> None:
    ids = ids_of(18, 2)
    expected = expected_scores(model, ids)
    run = Reference(lower(model, stores="f32"), 1, 18)
    for start, stop in ((0, 5), (5, 6), (6, 14), (14, 15), (15, 18)):
        count = stop - start
        got = run.run(ids[start:stop], [0] * count, range(start, stop), [count - 1])
        assert differ(got, expected[stop - 1 : stop]) <= BAR


def test_two_sequences_of_different_lengths(model: Decoder) -> None:
    """Rows of both in one call; then one token of each, as in decoding."""
    first, second = ids_of(11, 3), ids_of(5, 4)
    expected = [expected_scores(model, first), expected_scores(model, second)]
    run = Reference(lower(model, stores="f32"), 2, 12)
    tokens, sequences = [*second[:4], *first[:10]], [1] * 4 + [0] * 10
    got = run.run(tokens, sequences, [*range(4), *range(10)], [13, 3])
    assert differ(got, np.stack([expected[0][9], expected[1][3]])) <= BAR
    got = run.run([first[10], second[4]], [0, 1], [10, 4], [0, 1])
    assert differ(got, np.stack([expected[0][10], expected[1][4]])) <= BAR


def test_fused_equals_unfused(model: Decoder) -> None:
    ids = ids_of(12, 5)
    fused, plain = lower(model, stores="f32"), lower(model, stores="f32", fused=False)
    assert len(fused.steps) < len(plain.steps)
    scores = [Reference(plan, 1, 12).run(ids, [0] * 12, range(12), range(12)) for plan in (fused, plain)]
    assert differ(*scores) <= 1e-5


def test_coarse_stores_stay_close(model: Decoder) -> None:
    ids = ids_of(16, 6)
    expected = expected_scores(model, ids)
    got = Reference(lower(model), 1, 16).run(ids, [0] * 16, range(16), range(16))
    assert 0 < differ(got, expected) <= 0.1 * float(np.abs(expected).max())
