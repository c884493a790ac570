"""One linear map a group: the kernel at every level, torch's own product, and the loop over groups agree, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.core.errors import ConfigError
from orchard.ops import grouped
from orchard.ops.grouped import grouped_linear, grouped_loop
from orchard.ops.kernels import native

LEVELS = (0, 1, 2, 3)
needs_kernel = pytest.mark.skipif(native.library() is None, reason=native.why_not())


def case(
    counts: list[int], out: int = 12, width: int = 20, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(sum(counts) + out + width)
    x = torch.randn(sum(counts), width, generator=draw)
    weight = torch.randn(len(counts), out, width, generator=draw)
    return x, weight.to(dtype), torch.tensor(counts)


counted = st.lists(st.integers(0, 11), min_size=1, max_size=7).filter(lambda counts: sum(counts) > 0)


@needs_kernel
@given(
    counts=counted, out=st.integers(1, 40), width=st.integers(1, 70), half=st.booleans(), level=st.sampled_from(LEVELS)
)
@settings(max_examples=120, deadline=None)
def test_the_kernel_is_the_loop(counts: list[int], out: int, width: int, half: bool, level: int) -> None:
    x, weight, number = case(counts, out, width, torch.bfloat16 if half else torch.float32)
    want = grouped_loop(x.double(), weight.double(), number)
    got = grouped._kernel(x, weight, number, level=level)
    torch.testing.assert_close(got.double(), want, atol=1e-5 * width**0.5, rtol=1e-5)


@needs_kernel
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("width", [48, 50])
def test_a_row_becomes_the_same_alone_and_among_others_to_the_last_bit(level: int, width: int) -> None:
    x, weight, number = case([7, 0, 130, 1, 6], 37, width)
    whole = grouped._kernel(x, weight, number, level=level)
    for row, group in ((0, 0), (6, 0), (7, 2), (100, 2), (137, 3), (143, 4)):
        alone = torch.zeros(5, dtype=torch.int64).index_fill_(0, torch.tensor([group]), 1)
        assert torch.equal(grouped._kernel(x[row : row + 1], weight, alone, level=level)[0], whole[row])
    assert torch.equal(grouped._kernel(x, weight, number, level=level, threads=3), whole)


@needs_kernel
def test_much_work_is_shared_among_threads_and_stays_the_same() -> None:
    x, weight, number = case([50, 3, 90, 0, 57], 128, 256)  # more than a million products a thread
    want = grouped_loop(x.double(), weight.double(), number)
    torch.testing.assert_close(grouped._kernel(x, weight, number, threads=3).double(), want, atol=1e-4, rtol=1e-5)
    one, three = (grouped._kernel(x, weight, number, threads=threads) for threads in (1, 3))
    assert torch.equal(one, three)


@pytest.mark.parametrize("path", ["kernel", "torch", "loop"])
@pytest.mark.parametrize(("out", "width"), [(12, 20), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_loops(path: str, out: int, width: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    if path != "kernel":
        monkeypatch.setattr(grouped, "_kernel_fits", lambda x, weight: False)
    if path == "loop":
        monkeypatch.setattr(grouped, "_torch_fits", lambda x, weight: False)
    x, weight, number = case([3, 0, 5, 1], out, width)
    x, weight = x.to(dtype), weight.to(dtype)
    got = slopes(grouped_linear, x, weight, number)
    want = slopes(grouped_loop, x.double(), weight.double(), number)
    near: dict[str, float] = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    for mine, exact in zip(got, want, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), exact, **near)
    assert not got[2][1].any(), "a group without rows has a gradient of zero"


def slopes(function: Any, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight, counts)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


def test_only_what_is_asked_for_has_a_gradient() -> None:
    x, weight, number = case([2, 3])
    weight.requires_grad_()
    grouped_linear(x, weight, number).sum().backward()
    assert weight.grad is not None
    y = grouped_linear(x.requires_grad_(), weight.detach(), number)
    y.sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not grouped_linear(x, weight, number).requires_grad


def test_second_and_forward_derivatives_exist() -> None:
    x, weight, number = case([2, 0, 3], 4, 8)
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, number), (x, weight))
    x, weight = x.detach().float(), weight.detach().float()
    _, along = torch.func.jvp(lambda a: grouped_linear(a, weight, number), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(along, grouped_loop(torch.ones_like(x), weight, number))
    a = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(grouped_linear(a, weight, number).square().sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), a)
    ones = grouped_loop(torch.ones_like(x), weight, number)
    want = torch.cat([2 * part @ one for part, one in zip(ones.split(number.tolist()), weight, strict=True)])
    torch.testing.assert_close(second, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_compiles_as_one_graph(dtype: torch.dtype) -> None:
    x, weight, number = case([3, 0, 5, 1], 16, 8)
    x, weight = x.to(dtype), weight.to(dtype)
    made = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    for compiled, eager in zip(slopes(made, x, weight, number), slopes(grouped_linear, x, weight, number), strict=True):
        assert torch.equal(compiled, eager)


def test_no_rows_at_all_are_no_problem() -> None:
    x, weight, number = case([0, 0, 0])
    assert grouped_linear(x, weight, number).shape == (0, 12)


@needs_kernel
@pytest.mark.parametrize("counts", [[2, 2], [2, 4, 0], [-1, 6], [5, 1]])
def test_counts_that_do_not_fit_are_refused(counts: list[int]) -> None:
    x, weight, _ = case([2, 3])
    with pytest.raises(ConfigError, match="counted as"):
        grouped_linear(x, weight, torch.tensor(counts))
