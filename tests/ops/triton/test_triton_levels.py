"""Weights of a few levels on a GPU against their torch twins (TRITON_INTERPRET=1: on a CPU that has Triton)."""

from __future__ import annotations

import os

import pytest
import torch

from orchard.nn.formats import learned
from orchard.nn.formats.learned import Learned
from orchard.nn.formats.learned_once import forget, once
from orchard.nn.linear import Linear

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("no GPU, and TRITON_INTERPRET is not 1", allow_module_level=True)

from orchard.ops.kernels.triton.levels import level_on_gpu, slope_on_gpu  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize("outside", ["stop", "inward", "pass"])
@pytest.mark.parametrize(
    ("bits", "zero", "group"), [(2, 1.5, 96), (2, 2.0, 64), (4, 8.0, 32), (4, 8.0, 200), (8, 128.0, 64)]
)
def test_levels_and_slopes(bits: int, zero: float, group: int, outside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    top, groups = 2**bits - 1, 5
    weight = torch.randn(33, groups * group, device=DEVICE)
    scale = (torch.rand(33, groups, device=DEVICE) + 0.5) * 2.5 / 2 ** (bits - 1)
    scale[3, 1], scale[4] = 0.0, -scale[4]
    grad = torch.randn_like(weight)
    found = level_on_gpu(weight, scale, zero, top, torch.float32)
    slopes = slope_on_gpu(weight, scale, grad, zero, top, outside, 0.5)
    monkeypatch.setattr(learned, "_kernels", lambda weight: None)
    wanted = learned._values(weight, scale, zero, top, torch.float32)
    # A weight within rounding of the border between two codes may go either way.
    off = (found - wanted).abs() > 1e-5
    assert off.float().mean() < 1e-3
    for one, two in zip(slopes, learned._slopes(weight, scale, grad, zero, top, outside, 0.5), strict=True):
        assert ((one - two).abs() > 1e-3).float().mean() < 2e-2


@pytest.mark.skipif(INTERPRETED, reason="a module is only sent there on a GPU")
def test_a_map_learns_the_same_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made = Linear.Config(in_dim=192, out_dim=64, format=Learned.Config(bits=2, group=96)).build().to(DEVICE)
    x = torch.randn(16, 192, device=DEVICE)

    def gradients() -> list[torch.Tensor]:
        """Of three steps, between which weights and scales change: what was recorded reads the new ones."""
        made.load_state_dict(start)
        found = []
        for _ in range(3):
            made.zero_grad()
            with once(made):
                made(x).square().sum().backward()
            found += [p.grad.clone() for p in made.parameters() if p.grad is not None]
            with torch.no_grad():
                for p in made.parameters():
                    p.add_(p.grad, alpha=-1e-3 / p.grad.norm())
        forget(made)
        return found

    start = {name: value.clone() for name, value in made.state_dict().items()}
    found = gradients()
    monkeypatch.setattr(learned, "_kernels", lambda weight: None)
    wanted = gradients()
    assert len(found) == len(wanted) == 6
    for one, two in zip(found, wanted, strict=True):
        assert (one - two).norm() < 2e-2 * two.norm()
