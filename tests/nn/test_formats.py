"""Weight formats: the contract for every one that is discovered, and the error bounds of those that round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import ConfigError
from orchard.nn.formats import Format, Int8, Plain
from tests.matrix import axes

FORMATS = axes.formats()
each_format = pytest.mark.parametrize("name", FORMATS)
each_shape = pytest.mark.parametrize("shape", [(6, 16), (3, 6, 16), (1, 8)])


def example(name: str, shape: tuple[int, ...], seed: int = 0) -> tuple[Format, torch.Tensor]:
    return FORMATS[name].build(), torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@each_shape
@each_format
def test_packing_follows_the_layout_and_the_bytes_are_exact(name: str, shape: tuple[int, ...]) -> None:
    form, weight = example(name, shape)
    layout, packed = form.layout(shape), form.pack(weight)
    assert packed.keys() == layout.keys()
    for key, part in layout.items():
        assert packed[key].shape == part.shape and packed[key].dtype == (part.dtype or weight.dtype)
        assert not (part.trained and part.dtype is not None and not part.dtype.is_floating_point)
    assert form.nbytes(shape, torch.float32) == sum(part.nbytes for part in packed.values())
    half = form.pack(weight.bfloat16())
    assert form.nbytes(shape, torch.bfloat16) == sum(part.nbytes for part in half.values())


@each_shape
@each_format
def test_unpacking_returns_the_shape_and_dtype_and_packing_again_changes_nothing(
    name: str, shape: tuple[int, ...]
) -> None:
    form, weight = example(name, shape)
    dense = form.unpack(form.pack(weight), torch.float32)
    assert dense.shape == shape and dense.dtype == torch.float32
    assert form.unpack(form.pack(weight), torch.bfloat16).dtype == torch.bfloat16
    torch.testing.assert_close(form.unpack(form.pack(dense), torch.float32), dense, atol=1e-6, rtol=1e-6)
    assert (dense - weight).norm() < 0.5 * weight.norm()


@each_shape
@each_format
def test_fake_is_pack_and_unpack_with_the_gradient_straight_through(name: str, shape: tuple[int, ...]) -> None:
    form, weight = example(name, shape)
    weight.requires_grad_()
    faked = form.fake(weight)
    torch.testing.assert_close(faked, form.unpack(form.pack(weight.detach()), torch.float32), atol=1e-7, rtol=1e-6)
    slope = torch.randn(shape)
    (faked * slope).sum().backward()
    torch.testing.assert_close(weight.grad, slope)


@each_format
def test_matmul_is_the_product_with_the_dense_weight(name: str) -> None:
    form, weight = example(name, (6, 16))
    packed, x = form.pack(weight), torch.randn(2, 3, 16, requires_grad=True)
    y = form.matmul(x, packed)
    dense = form.unpack(packed, torch.float32)
    want = [[[float(x[b, t].detach() @ dense[o]) for o in range(6)] for t in range(3)] for b in range(2)]
    torch.testing.assert_close(y, torch.tensor(want), atol=1e-5, rtol=1e-5)
    y.sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(2, 3, 16), atol=1e-5, rtol=1e-5)
    assert form.matmul(torch.ones(1, 16, dtype=torch.bfloat16), packed).dtype == torch.bfloat16


@each_format
def test_an_all_zero_weight_stays_zero(name: str) -> None:
    form, weight = example(name, (2, 8))
    assert form.unpack(form.pack(weight * 0), torch.float32).equal(weight * 0)


@each_format
def test_one_expert_is_packed_as_it_would_be_alone(name: str) -> None:
    form, weight = example(name, (3, 4, 16))
    together = form.pack(weight)
    for expert in range(3):
        alone = form.pack(weight[expert])
        assert all(together[key][expert].equal(alone[key]) for key in alone)


@given(
    rows=st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=8, max_size=8), min_size=1, max_size=3),
    group=st.sampled_from([None, 1, 2, 4, 8]),
)
def test_int8_errs_by_at_most_half_a_step(rows: list[list[float]], group: int | None) -> None:
    weight, form = torch.tensor(rows), Int8.Config(group=group).build()
    error = (form.unpack(form.pack(weight), torch.float32) - weight).abs().unflatten(-1, (-1, group or 8))
    largest = weight.abs().unflatten(-1, (-1, group or 8)).amax(-1, keepdim=True)
    assert (error <= largest / 127 / 2 * (1 + 1e-4) + 1e-12).all()


def test_plain_is_exact() -> None:
    weight = torch.randn(3, 4)
    form = Plain.Config().build()
    assert form.unpack(form.pack(weight), torch.float32).equal(weight) and form.fake(weight) is weight


@pytest.mark.parametrize("group", [3, 16])
def test_groups_that_do_not_divide_are_refused(group: int) -> None:
    form: Any = Int8.Config(group=group).build()
    for call in (lambda: form.layout((2, 8)), lambda: form.pack(torch.ones(2, 8))):
        with pytest.raises(ConfigError, match="do not divide"):
            call()
