"""The study of weights in flash: its texts are what they say, its ways part where they should, bytes are counted, and it runs."""

from __future__ import annotations

import pytest
import torch

from orchard.studies import _afm3_models as models
from orchard.studies import afm_3, study
from orchard.studies._afm3_disk import TokenByToken, stored
from orchard.studies._afm3_texts import CHARACTERS, DOMAINS, SAYINGS, facts, ids_of, rows, text
from orchard.transforms.ifprune_resident import write_groups

TINY = models.Size(
    dim=32, layers=2, hidden=32, groups=6, rows=2, length=96, base=2, steps=2, held_out=2, prompt=16, span=8, new=4
)


def test_texts_say_their_facts() -> None:
    import numpy as np

    dice = np.random.default_rng(0)
    for domain in DOMAINS:
        known = facts(domain)
        assert known == facts(domain) and len(known) > 20
        said = SAYINGS[domain](dice)
        assert any(left in said and right in said for left, right in known)
        assert len(text(domain, 50, dice)) == 50 and set(said) <= set(CHARACTERS)
    assert ids_of("\n a") == [0, 1, 2]


def test_rows_change_where_they_are_told_to() -> None:
    plain = rows(4, 64, 0, "a", "sums")
    assert torch.equal(plain.ids, rows(4, 64, 0, "a", "sums").ids)
    assert torch.equal(plain.ids[:, 1:], plain.targets[:, :-1])
    switched = rows(6, 64, 0, "a", "sums", switch=32, share=1.0)
    digits = set(ids_of("0123456789*=;"))
    for row in switched.ids.tolist():
        assert set(row[:32]) <= digits and not set(row[40:]) <= digits


def test_the_sizes_of_what_is_compared_are_equal() -> None:
    size = TINY
    base = models.built(models.tree(size, size.hidden), 0)
    cut = models.pruned(base, size, 0)
    small = models.built(models.tree(size, size.active), 0)
    assert sum(p.numel() for p in cut.parameters()) == sum(p.numel() for p in small.parameters())
    assert size.active == 32 - 24 + round(6 / 4) * 4


def test_a_router_of_tokens_looks_at_the_last_alone(tmp_path: object) -> None:
    from pathlib import Path

    base = models.built(models.tree(TINY, TINY.hidden), 0)
    model = models.choosing(base, TINY, 0).eval()
    path = Path(str(tmp_path)) / "groups"
    write_groups(model.decoder, path)
    with stored(model, path, 2) as disk:
        router = TokenByToken(disk)
        last = model.predictor.config.window  # type: ignore[union-attr]
        one = router.choose([1, 2, 3, 4, 5])
        assert model.predictor.config.window == last  # type: ignore[union-attr]
        assert not torch.equal(one.scores, disk.choose([1, 2, 3, 4, 5]).scores)
        at = torch.tensor([[0]])
        alone = model.predictor(torch.tensor([[7]]), at, model.decoder)[0, 0]
        assert torch.allclose(router.choose([7]).scores, alone, atol=1e-6)


def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(afm_3.SCALES, "small", TINY)
    report = study("afm-3")
    verdicts = {claim.id: claim.passed for claim in report.claims}
    assert verdicts["nested"]
    assert verdicts.keys() == {claim.id for claim in afm_3.CLAIMS}
    assert float(report.values["bytes_a_token_prompt"].value) > 0  # type: ignore[arg-type]
