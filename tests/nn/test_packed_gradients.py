"""Gradients through packed weights: those of the dense weight, for every format, and nothing dense is kept for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.nn.formats import Int2, Int4, Int8, Plain
from orchard.nn.formats.base import LARGE, spread, squeeze
from orchard.nn.linear import Embedding, GroupedLinear, Linear

FORMATS: dict[str, Any] = {
    "plain": Plain.Config(),
    "int8 rows": Int8.Config(),
    "int8 groups": Int8.Config(group=8),
    "int8 half": Int8.Config(group=8, half=True),
    "int4": Int4.Config(group=8),
    "int4 minimum": Int4.Config(group=8, minimum=True),
    "int2": Int2.Config(group=8),
}
PACKED = [name for name in FORMATS if name != "plain"]


def linear(name: str, in_dim: int = 16, out_dim: int = 5) -> Linear:
    torch.manual_seed(0)
    made: Linear = Linear.Config(in_dim=in_dim, out_dim=out_dim, format=FORMATS[name]).build()
    made.assign(torch.randn(out_dim, in_dim))
    return made.requires_grad_(False)


@pytest.mark.parametrize("name", FORMATS)
def test_gradcheck(name: str) -> None:
    map_ = linear(name)
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(map_, (x,))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15)
@given(st.lists(st.integers(1, 4), max_size=3), st.integers(0, 2**32 - 1))
def test_dx_is_dy_times_the_dense_weight(name: str, lead: list[int], seed: int) -> None:
    map_ = linear(name)
    torch.manual_seed(seed)
    x, dy = torch.randn(*lead, 16, requires_grad=True), torch.randn(*lead, 5)
    (got,) = torch.autograd.grad(map_(x), x, dy)
    assert got.shape == x.shape and torch.allclose(got, dy @ map_.dense(), atol=1e-5)


@pytest.mark.parametrize("name", PACKED)
def test_experts_and_tables(name: str) -> None:
    experts: GroupedLinear = GroupedLinear.Config(count=3, in_dim=16, out_dim=5, format=FORMATS[name]).build()
    table: Embedding = Embedding.Config(vocab=9, dim=16, format=FORMATS[name]).build()
    x = torch.randn(4, 16, requires_grad=True)
    for dense, y in ((experts.dense()[1], experts(x, 1)), (table.dense(), table.scores(x))):
        (got,) = torch.autograd.grad(y.sum(), x)
        assert torch.allclose(got, dense.sum(0).expand(4, 16), atol=1e-5)
    assert not table(torch.tensor([1, 2]), torch.float32).requires_grad


@pytest.mark.parametrize("name", PACKED)
def test_nothing_dense_is_kept_for_the_backward_pass(name: str) -> None:
    map_ = linear(name, in_dim=64, out_dim=64)
    own = {part.data_ptr() for part in map_.packed().values()}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        map_(x).sum().backward()
    assert kept and {tensor.data_ptr() for tensor in kept} <= own


@pytest.mark.parametrize("name", FORMATS)
def test_autocast_computes_and_answers_in_bfloat16(name: str) -> None:
    map_ = linear(name)
    x = torch.randn(7, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = map_(x)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        plain = map_(x)
    assert y.dtype == plain.dtype == torch.bfloat16 and torch.equal(y, plain)
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert torch.allclose(x.grad, map_.dense().sum(0).expand(7, 16), atol=0.1)


@pytest.mark.parametrize("name", PACKED)
def test_the_same_bits_with_and_without_gradients_and_after_recomputing(name: str) -> None:
    map_ = linear(name)
    x = torch.randn(3, 16, requires_grad=True)
    with torch.no_grad():
        want = map_(x)
    assert torch.equal(map_(x), want)
    (direct,) = torch.autograd.grad(map_(x).square().sum(), x)
    again = torch.utils.checkpoint.checkpoint(map_, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.square().sum(), x)[0], direct)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_weight_is_unpacked_in_pieces_and_is_the_same(name: str, dtype: torch.dtype) -> None:
    map_ = linear(name, in_dim=64, out_dim=LARGE // 16 + 77)
    packed = map_.packed()
    assert packed["codes"].numel() > LARGE
    assert torch.equal(map_.dense(dtype), map_.format.values(packed).to(dtype))  # type: ignore[attr-defined]
    row = {part: values[5:6] for part, values in packed.items()}
    assert torch.equal(map_.dense(dtype)[5:6], map_.format.unpack(row, dtype))


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_apart_and_together_again(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 7, 16), dtype=torch.uint8)
    packed = squeeze(codes, bits)
    assert torch.equal(spread(packed, bits), codes)
    assert torch.equal(spread(packed.transpose(0, 1), bits), codes.transpose(0, 1))
