"""The study `commvq` on a model that was never trained: everything is measured, and what must be exact is."""

from __future__ import annotations

import torch

from orchard.core.report import Report
from orchard.studies import _commvq_codes as codes
from orchard.studies import _commvq_models as models
from orchard.studies import commvq


def test_a_tiny_run_measures_every_claim() -> None:
    torch.manual_seed(0)
    size = models.Size(layers=1, steps=1, rows=4, length=64, fitted=600, measured=4)
    model = models.trained(size, 0)
    values, by_layer = commvq.measured(model, size, 0, soft=1, steps=1)
    report = Report.record("study", "commvq", values=values, claims=commvq.CLAIMS)
    verdicts = {claim.id: claim for claim in report.claims}
    for name in ("commutes", "tables", "bytes"):
        assert verdicts[name].passed, (name, verdicts[name].value)
    missing = {name for name, claim in verdicts.items() if claim.value is None}
    assert missing == {"smol-loss", "smol-bytes"}
    assert len(by_layer) == 4


def test_baselines_are_as_good_as_their_bits_allow() -> None:
    """Two levels of a normal channel lose 1 - 2/π of its variance; by token nearly the same; free codes learn what repeats."""
    x = torch.randn(2, 4000, 64, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 3, 64) + 2.0
    share = (codes.two_levels(x)(x) - x).square().mean((0, 1)) / x.var(1).mean(0)
    torch.testing.assert_close(share, torch.full((64,), 1 - 2 / torch.pi), atol=0.02, rtol=0)
    even = torch.randn(2, 500, 64, generator=torch.Generator().manual_seed(1))
    assert abs(codes.error(codes.by_token, even) - (1 - 2 / torch.pi)) < 0.03
    few = x[:, :8].repeat(1, 20, 1)
    assert codes.error(codes.free_residual(few, 4, 16), few) < 0.01
