"""Norms, activations, rotary positions and the other small operations against torch, at every level of this machine."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.nn.mlp import ACTIVATIONS
from orchard.nn.norm import RMSNorm
from orchard.ops import rope
from orchard.ops.kernels.native import library, why_not
from orchard.ops.plan import steps

ENGINE = library()
pytestmark = pytest.mark.skipif(ENGINE is None, reason=why_not())
LEVELS = range(3)
seeds, widths = st.integers(0, 2**32 - 1), st.integers(1, 300)
sizes = st.sampled_from([1e-3, 1.0, 30.0])


def values(seed: int, count: int, size: float) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=count) * size).astype(np.float32)


def call(name: str, level: int, *arguments: object) -> None:
    assert ENGINE is not None
    converted = [
        ctypes.c_void_p(item.ctypes.data)
        if isinstance(item, np.ndarray)
        else ctypes.c_float(item)
        if isinstance(item, float)
        else item
        for item in arguments
    ]
    getattr(ENGINE, f"orchard_vector_{name}")(level, *converted)


def close(found: np.ndarray, wanted: torch.Tensor, bound: float) -> None:
    size = max(float(wanted.abs().max()), 1e-30)
    assert float((torch.from_numpy(found) - wanted).abs().max()) <= bound * size


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40)
@given(seeds, widths, sizes, st.sampled_from([1e-6, 1e-5]))
def test_norm(level: int, seed: int, width: int, size: float, eps: float) -> None:
    x, weight = values(seed, width, size), values(seed + 1, width, 1.0)
    module = RMSNorm.Config(dim=width, eps=eps).build()
    module.weight = torch.nn.Parameter(torch.from_numpy(weight), requires_grad=False)
    out = np.empty_like(x)
    call("norm", level, x, weight, eps, width, out)
    close(out, module(torch.from_numpy(x)), 2e-6)
    call("norm", level, x, weight, eps, width, x)  # in place
    assert np.array_equal(x, out)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activation", steps.ACTIVATIONS)
@settings(max_examples=30)
@given(seeds, widths, sizes)
def test_gate(level: int, activation: str, seed: int, width: int, size: float) -> None:
    gate, up = values(seed, width, size), values(seed + 1, width, 1.0)
    exact = torch.from_numpy(gate).double(), torch.from_numpy(up).double()
    wanted = ACTIVATIONS[activation](exact[0]) * exact[1]
    out = np.empty_like(gate)
    call("gate", level, gate, up, width, steps.ACTIVATIONS.index(activation), out)
    # Far below zero an activation is x times a share that cancels to nothing in float32 (1 + tanh,
    # 1 + erf): what must hold there is a small error beside x, not beside the tiny result.
    allowed = 2e-6 * wanted.abs() + 2e-7 * (exact[0] * exact[1]).abs()
    assert bool(((torch.from_numpy(out) - wanted).abs() <= allowed + 1e-30).all())


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40)
@given(seeds, st.integers(1, 64), st.integers(0, 40), st.integers(0, 100_000))
def test_rotate(level: int, seed: int, half: int, rest: int, position: int) -> None:
    x = values(seed, 2 * half + rest, 1.0)
    cosines, sines = rope.tables(torch.tensor([position]), rope.frequencies(10_000.0, 2 * half))
    wanted = rope.rotate(torch.from_numpy(x.copy())[None, None, None], cosines, sines)[0, 0, 0]
    tables = [np.ascontiguousarray(table[0, :half].numpy()) for table in (cosines, sines)]
    call("rotate", level, x, *tables, half)
    close(x, wanted, 1e-6)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=30)
@given(seeds, widths, sizes)
def test_softmax_softcap_clip_and_sums(level: int, seed: int, width: int, size: float) -> None:
    x, y = values(seed, width, size), values(seed + 1, width, size)
    mass, capped, clipped, total = x.copy(), x.copy(), x.copy(), x.copy()
    call("softmax", level, mass, width)
    close(mass, torch.from_numpy(x).softmax(-1), 2e-6)
    call("softcap", level, capped, 5.0, width)
    assert float((torch.from_numpy(capped) - torch.tanh(torch.from_numpy(x) / 5) * 5).abs().max()) <= 3e-6
    call("clip", level, clipped, 0.5, width)
    assert np.array_equal(clipped, np.clip(x, -0.5, 0.5))
    call("add_scaled", level, total, y, 0.25, width)
    close(total, torch.from_numpy(x) + 0.25 * torch.from_numpy(y), 1e-6)
    scaled = x.copy()
    call("scale_each", level, scaled, y, width)
    assert np.array_equal(scaled, x * y)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_a_number_shows(level: int) -> None:
    x, ones = np.ones(40, np.float32), np.ones(40, np.float32)
    x[7] = np.nan
    out = np.empty_like(x)
    call("norm", level, x, ones, 1e-6, 40, out)
    assert np.isnan(out).all()
    call("gate", level, x, ones, 40, 0, out)
    assert np.isnan(out[7])
