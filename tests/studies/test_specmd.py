"""SpecMD in the small: the made-up trace is as it says, and every claim has its number."""

from __future__ import annotations

import numpy as np
import pytest

from orchard.cache.experts.prefetch import NextGates
from orchard.cache.experts.simulate import Replay
from orchard.ops.kernels.native import library, why_not
from orchard.studies import _specmd_lm as lm
from orchard.studies import specmd
from orchard.studies._specmd_synthetic import synthetic


def test_the_made_up_trace_is_as_it_says() -> None:
    trace = synthetic(1, tokens=40)
    chosen = trace.chosen
    assert all(len(set(row.tolist())) == trace.k for row in chosen.reshape(-1, trace.k))
    stays = (chosen[1:, :, :, None] == chosen[:-1, :, None, :]).any(-1).mean()
    assert 0.35 < stays < 0.55  # 30 % are kept, and popular ones come again by themselves
    assert abs(lm.accuracy(trace, 1) - 0.9) < 0.02 and abs(lm.accuracy(trace, 2) - 0.8) < 0.02
    assert (trace.ahead[:, 0, 1] == -1).all()
    assert np.array_equal(synthetic(1, tokens=5).chosen, chosen[:5])


def test_least_stale_spares_what_lru_drops() -> None:
    replay = Replay(synthetic(0, tokens=30), NextGates(2))
    stale, lru = (replay.run(policy, replay.in_flight).counters for policy in ("least-stale", "lru"))
    assert stale.collisions < 0.1 * lru.collisions and stale.hit_rate > 1.3 * lru.hit_rate
    assert replay.nominal <= replay.in_flight <= replay.most_in_flight


def test_every_claim_has_its_number() -> None:
    values, series = specmd.measured(synthetic(0, tokens=12, layers=4, experts=16, k=2), 2, 0, "")
    plain = specmd.plain(synthetic(0, tokens=12, layers=4, experts=16, k=2))
    metrics = {claim.metric for claim in specmd.CLAIMS}
    assert {name for name in metrics if not name.startswith("lm_")} <= values.keys() | plain.keys()
    assert values["oracle_margin"] >= 0  # type: ignore[operator]
    assert len(series["least-stale: hit rate"]) == len(series["sizes"])


@pytest.mark.skipif(library() is None, reason=why_not())
def test_a_mixture_learns_and_is_recorded() -> None:
    size = lm.LM(layers=3, dim=32, experts=8, chosen=2, hidden=16, steps=12, batch=4, length=24, tokens=10, prompt=8)
    model, losses = lm.train(size, 0)
    assert losses[-1] < losses[0]
    trace = lm.record(model, size, 0)
    assert trace.chosen.shape == (10, 3, 2) and trace.experts == 8
    assert lm.accuracy(trace, 1) > 0.5
