"""Root-mean-square normalisation against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from orchard.core.errors import ConfigError
from orchard.nn.norm import RMSNorm


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("cast_first", [True, False])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_formula(offset: float, cast_first: bool, eps: float) -> None:
    torch.manual_seed(0)
    norm = RMSNorm.Config(dim=5, eps=eps, offset=offset, cast_first=cast_first).build()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 5)
    y = norm(x)
    for row, out in zip(x.reshape(-1, 5).tolist(), y.reshape(-1, 5).tolist()):
        rms = math.sqrt(sum(value * value for value in row) / 5 + eps)
        want = [value / rms * (norm.weight[i].item() + offset) for i, value in enumerate(row)]
        assert out == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_new_norm_scales_by_one_whatever_its_offset(offset: float) -> None:
    x = torch.randn(4, 8)
    y = RMSNorm.Config(dim=8, offset=offset).build()(x)
    torch.testing.assert_close(y.pow(2).mean(-1), torch.ones(4), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("cast_first", [True, False])
def test_half_precision_is_computed_wide(cast_first: bool) -> None:
    """Squares of 300 overflow float16; the result must not."""
    norm = RMSNorm.Config(dim=4, cast_first=cast_first).build().half()
    y = norm(torch.full((1, 4), 300.0, dtype=torch.float16))
    assert y.dtype == torch.float16 and y.tolist() == [[1.0] * 4]


def test_when_the_cast_happens_matters_in_low_precision_only() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64), torch.randn(8, 64)
    out = {}
    for cast_first in (True, False):
        norm = RMSNorm.Config(dim=64, cast_first=cast_first).build()
        norm.load_state_dict({"weight": weight})
        out[cast_first] = norm(x), norm.bfloat16()(x.bfloat16())
    assert out[True][0].equal(out[False][0]) and not out[True][1].equal(out[False][1])


def test_the_width_is_required() -> None:
    with pytest.raises(ConfigError, match="dim"):
        RMSNorm.Config().build()
