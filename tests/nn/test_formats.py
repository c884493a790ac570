"""Weight formats: the contract for every one that is discovered, and the error bounds of those that round."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import ConfigError
from orchard.nn.formats import Format, Int2, Int4, Int8, Plain
from orchard.nn.formats.base import Grouped, GroupedFormat, NativeWeight, NotLowered
from orchard.nn.linear import GroupedLinear, Linear
from orchard.ops.kernels import packing
from tests.matrix import axes

FORMATS = {
    **axes.formats(),
    "Int8.half": Int8.Config(group=8, half=True),
    "Int8.half_rows": Int8.Config(half=True),
    "Int4.around_zero": Int4.Config(group=8),
    "Int4.pairs": Int4.Config(group=2),
    "Int2.fours": Int2.Config(group=4),
}
GROUPED = {name: cfg for name, cfg in FORMATS.items() if isinstance(cfg.build(), GroupedFormat)}
HALF_SCALES = {
    "Int8": Int8.Config(group=8, half=True),
    "Int4": Int4.Config(group=8),
    "Int4.minimum": Int4.Config(group=8, minimum=True),
    "Int2": Int2.Config(group=8),
}
TINY_STEP = 2.0**-24  # the least number that half precision has
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


def eights(least: float = -1e3, most: float = 1e3) -> Any:
    """Rows of one group of eight."""
    value = st.floats(least, most, width=32)
    return st.lists(st.lists(value, min_size=8, max_size=8), min_size=1, max_size=3).map(torch.tensor)


def off(form: Format, weight: torch.Tensor) -> torch.Tensor:
    return form.unpack(form.pack(weight), torch.float32) - weight


@given(eights())
def test_int8_with_half_scales_errs_by_half_a_step_and_what_rounding_the_scale_costs(weight: torch.Tensor) -> None:
    error = off(Int8.Config(group=8, half=True).build(), weight).abs()
    largest = weight.abs().amax(-1, keepdim=True)
    assert (error <= largest / 127 / 2 * (1 + 2**-9) + largest * 2**-11 + 127 * TINY_STEP).all()


@given(eights())
def test_int4_between_two_values_errs_by_half_a_step_and_what_rounding_both_ends_costs(weight: torch.Tensor) -> None:
    error = off(Int4.Config(group=8, minimum=True).build(), weight).abs()
    least, most = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    assert (error <= (most - least) * (1 / 30 + 2**-10) + least.abs() * 2**-9 + 15 * TINY_STEP).all()


@pytest.mark.parametrize(("cfg", "steps"), [(Int4.Config(group=8), 7), (Int2.Config(group=8), 1.5)])
@given(weight=eights())
def test_searched_scales_err_no_more_than_the_one_that_cuts_nothing_off(
    weight: torch.Tensor, cfg: Any, steps: float
) -> None:
    """Whatever the search takes must be at least as good as its plainest candidate, whose bound is known."""
    error = off(cfg.build(), weight).norm(dim=-1)
    step = weight.abs().amax(-1) / steps * (1 + 2**-10) + TINY_STEP
    assert (error <= 8**0.5 * (step / 2 + steps * step * 2**-10 + steps * TINY_STEP)).all()


@pytest.mark.parametrize(("cfg", "share"), [(Int4.Config(), 0.0094), (Int2.Config(), 0.119)])
def test_the_search_pays_on_normal_weights(cfg: Any, share: float) -> None:
    """Rounding to the furthest value alone leaves 1.2 % (4 bits) and 26 % (2 bits) of the square in groups of 64."""
    weight = torch.randn(64, 640, generator=torch.Generator().manual_seed(0))
    assert off(cfg.build(), weight).square().sum() < share * weight.square().sum()


@pytest.mark.parametrize("name", GROUPED)
@given(st.data())
def test_codes_are_in_range_and_scales_finite_however_large_or_small_the_weights(name: str, data: Any) -> None:
    limit = data.draw(st.sampled_from([1e-40, 1e-20, 1e-7, 1e-4, 1.0, 1e6, 1e20, 3e38]))
    weight, form = data.draw(eights(-1, 1)).double().mul(limit).float(), FORMATS[name].build()
    packed = form.pack(weight)
    assert all(part.isfinite().all() for part in packed.values())
    dense = form.unpack(packed, torch.float32)
    assert dense.isfinite().all()
    # A result reaches further than its weights by less than one step: codes go one further down than up.
    assert (dense.abs().amax(-1) <= weight.abs().amax(-1) * 1.5 + 128 * TINY_STEP).all()


@pytest.mark.parametrize("name", HALF_SCALES)
def test_values_beyond_half_precision_become_the_largest_there_is(name: str) -> None:
    form, levels = HALF_SCALES[name].build(), {"Int8": 127, "Int4": 7, "Int4.minimum": 14, "Int2": 1.5}[name]
    weight = torch.tensor([[1e9, -1e9, 1e9, -1e9, 0.0, 0.0, 1.0, -1.0]])
    dense = form.unpack(form.pack(weight), torch.float32)
    assert dense[0, 0] >= levels * 65504 and dense[0, 1] <= -65504 and dense[0, :4].sign().equal(weight[0, :4].sign())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", HALF_SCALES)
def test_a_broken_value_shows_and_stays_in_its_group(name: str, bad: float) -> None:
    form, weight = HALF_SCALES[name].build(), torch.randn(1, 16)
    weight[0, 3] = bad
    dense = form.unpack(form.pack(weight), torch.float32)
    assert dense[0, :8].isnan().all() and dense[0, 8:].isfinite().all()


def test_two_and_four_bits_take_the_bytes_they_say() -> None:
    assert Int4.Config().build().nbytes((128, 640), torch.float32) == 128 * (640 // 2 + 640 // 64 * 2)
    assert Int4.Config(group=32, minimum=True).build().nbytes((4, 64), torch.float32) == 4 * (64 // 2 + 2 * 2 * 2)
    assert Int2.Config().build().nbytes((128, 640), torch.float32) == 128 * (640 // 4 + 640 // 64 * 2)


@pytest.mark.parametrize(("cfg", "width"), [(Int4.Config(group=3), 9), (Int2.Config(group=2), 6)])
def test_codes_that_do_not_fill_bytes_are_refused(cfg: Any, width: int) -> None:
    with pytest.raises(ConfigError, match="whole number of bytes"):
        cfg.build().layout((2, width))


@pytest.mark.parametrize("kind", [Int8, Int4, Int2])
@pytest.mark.parametrize("group", [0, -8, 3, 16])
def test_groups_that_do_not_divide_are_refused(kind: Any, group: int) -> None:
    form: Any = kind.Config(group=group).build()
    for call in (lambda: form.layout((2, 8)), lambda: form.pack(torch.ones(2, 8))):
        with pytest.raises(ConfigError, match="do not divide"):
            call()


# Codes as they are ----------------------------------------------------------------------------------------------------


def random_grouped(cfg: Any, shape: tuple[int, ...], seed: int = 0) -> Grouped:
    """Any codes and any scales, of either sign: no packing of a dense weight would find them."""
    make = torch.Generator().manual_seed(seed)
    form = cfg.build()
    width = shape[-1]
    group = cfg.group or width
    scales = torch.randn((*shape[:-1], width // group), generator=make).half()
    codes = torch.randint(0, 2**form.bits, shape, generator=make, dtype=torch.uint8)
    return Grouped(codes, scales, scales.flip(-1) if form.has_minimum else None, form.bits, group)


def same(a: Grouped, b: Grouped) -> bool:
    minima = a.minima is b.minima is None or (
        a.minima is not None and b.minima is not None and a.minima.equal(b.minima)
    )
    return a.codes.equal(b.codes) and a.scales.equal(b.scales) and minima and (a.bits, a.group) == (b.bits, b.group)


@each_shape
@pytest.mark.parametrize("name", GROUPED)
def test_given_codes_are_kept_exactly(name: str, shape: tuple[int, ...]) -> None:
    form, given_codes = GROUPED[name].build(), random_grouped(GROUPED[name], shape)
    packed = form.take(given_codes)
    layout = form.layout(shape)
    assert {key: (tuple(part.shape), part.dtype) for key, part in packed.items()} == {
        key: (part.shape, part.dtype) for key, part in layout.items()
    }
    assert same(form.grouped(packed, shape), given_codes)
    dense = form.unpack(packed, torch.float32)
    assert dense.equal(given_codes.dense()) and dense.equal(by_hand(given_codes))


def by_hand(grouped: Grouped) -> torch.Tensor:
    """value = scale · (code - zero) + minimum, one by one."""
    zero = 0.0 if grouped.minima is not None else {8: 128, 4: 8, 2: 1.5}[grouped.bits]
    values = torch.empty(grouped.codes.shape)
    for place in itertools.product(*map(range, grouped.codes.shape)):
        by_group = (*place[:-1], place[-1] // grouped.group)
        least = 0.0 if grouped.minima is None else float(grouped.minima[by_group])
        values[place] = float(grouped.scales[by_group]) * (int(grouped.codes[place]) - zero) + least
    return values


def test_codes_of_another_kind_are_not_taken() -> None:
    cases = [Int8.Config(group=8), Int4.Config(group=8), Int4.Config(group=8, minimum=True), Int2.Config(group=8)]
    cases += [Int4.Config(group=4), Int8.Config(group=16)]
    for mine, other in itertools.product(cases, repeat=2):
        assert (mine.build().take(random_grouped(other, (2, 16))) is not None) == (mine == other)
    assert Int4.Config(group=64).build().take(random_grouped(Int4.Config(group=8), (2, 16))) is None


def test_a_module_takes_codes_or_leaves_everything_as_it_was() -> None:
    given_codes = random_grouped(Int4.Config(group=8), (3, 4, 16))
    experts = GroupedLinear.Config(count=3, in_dim=16, out_dim=4, format=Int4.Config(group=8)).build()
    assert experts.assign_grouped(given_codes) and experts.dense().equal(given_codes.dense())
    x = torch.randn(2, 16)
    torch.testing.assert_close(experts(x, 1), x @ given_codes.dense()[1].T)
    for cfg in (Plain.Config(), Int4.Config(group=16), Int8.Config()):
        other = GroupedLinear.Config(count=3, in_dim=16, out_dim=4, format=cfg).build()
        before = {name: part.clone() for name, part in other.packed().items()}
        assert not other.assign_grouped(given_codes)
        assert all(part.equal(before[name]) for name, part in other.packed().items())
    with pytest.raises(ConfigError, match="shape"):
        experts.assign_grouped(random_grouped(Int4.Config(group=8), (3, 5, 16)))


# The native engine's layout -------------------------------------------------------------------------------------------


def read_native(native: NativeWeight) -> torch.Tensor:
    """The values of a packed weight, read byte by byte as ops/kernels/native/kernels.h describes them."""
    blocks, cols, group = -(-native.rows // 32), native.cols, native.group
    each = len(native.data) // native.count
    values = np.empty((native.count, blocks * 32, cols), np.float32)
    for expert in range(native.count):
        data = native.data[expert * each : (expert + 1) * each].reshape(blocks, -1)
        for block in range(blocks):
            rows = values[expert, block * 32 : (block + 1) * 32]
            if native.kind == "f32":
                rows[:] = data[block].view(np.float32).reshape(cols, 32).T
            elif native.kind == "bf16":
                pairs = data[block].view(np.uint16).reshape(-1, 32, 2).astype(np.uint32) << 16
                rows[:] = pairs.view(np.float32).transpose(1, 0, 2).reshape(32, -1)[:, :cols]
            else:
                bits = int(native.kind[1:])
                for number, part in enumerate(data[block].reshape(cols // group, -1)):
                    rows[:, number * group : (number + 1) * group] = _read_group(part, bits, group, native.minimum)
    return torch.from_numpy(values[:, : native.rows])


def _read_group(part: np.ndarray, bits: int, group: int, minimum: bool) -> np.ndarray:
    halves = part[: 128 if minimum else 64].view(np.float16).astype(np.float32)
    codes, per_byte = part[128 if minimum else 64 :], 8 // bits
    values = np.empty((32, group), np.float32)
    for row, column in itertools.product(range(32), range(group)):
        chunk, within = divmod(column, 4 * per_byte)
        j, l = divmod(within, 4)
        byte = int(codes[chunk * 128 + (row // 16) * 64 + (row % 16) * 4 + l])
        zero = 0.0 if minimum else {8: 128, 4: 8, 2: 1.5}[bits]
        values[row, column] = halves[row] * ((byte >> (j * bits) & (2**bits - 1)) - zero)
    return values + halves[32:64, None] if minimum else values


NATIVE = {
    "q8": Int8.Config(group=32, half=True),
    "q4": Int4.Config(group=64),
    "q4 with minimum": Int4.Config(group=32, minimum=True),
    "q2": Int2.Config(group=64),
    "f32": Plain.Config(),
}


@pytest.mark.parametrize("shape", [(40, 64), (2, 33, 128)])
@pytest.mark.parametrize("name", NATIVE)
def test_the_native_layout_holds_the_same_values(name: str, shape: tuple[int, ...]) -> None:
    form, weight = NATIVE[name].build(), torch.randn(shape, generator=torch.Generator().manual_seed(3))
    packed = form.pack(weight)
    native = form.native(packed, shape)
    assert native.data.dtype == np.uint8 and native.data.ndim == 1 and native.data.ctypes.data % 64 == 0
    assert (native.kind, native.rows, native.cols) == (name.split()[0], *shape[-2:])
    assert native.count == (shape[0] if len(shape) == 3 else 1)
    assert native.minimum == ("minimum" in name) and native.group == getattr(NATIVE[name], "group", 1)
    dense = form.unpack(packed, torch.float32)
    assert read_native(native).reshape(shape).equal(dense)
    what = (native.kind, native.rows, native.cols, native.group, native.minimum)
    for data, matrix in zip(native.data.reshape(native.count, -1), dense.reshape(-1, *shape[-2:])):
        assert packing.values(data, *what).tobytes() == matrix.numpy().tobytes()


def test_plain_weights_of_other_types_are_bfloat16_for_the_engine() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        linear: Any = Linear.Config(in_dim=7, out_dim=3).build().to(dtype)
        native = linear.native()
        assert native.kind == "bf16" and read_native(native)[0].equal(linear.weight.bfloat16().float())


def test_eight_bits_lower_when_their_scales_are_half_precision_and_say_so_otherwise() -> None:
    weight = torch.randn(5, 96)
    for cfg in (Int8.Config(half=True), Int8.Config(group=96, half=True)):
        form: Any = cfg.build()
        packed = form.pack(weight)
        native = form.native(packed, (5, 96))
        assert native.group == (32 if cfg.group is None else 96)  # a whole row is cut: its scale is repeated
        assert read_native(native)[0].equal(form.unpack(packed, torch.float32))
    single: Any = Int8.Config(group=32).build()
    with pytest.raises(NotLowered, match="half-precision"):
        single.native(single.pack(weight), (5, 96))
    exact = single.take(random_grouped(Int8.Config(group=32), (5, 96)))
    assert read_native(single.native(exact, (5, 96)))[0].equal(single.unpack(exact, torch.float32))
    refused: list[tuple[Any, int]] = [
        (Int8.Config(half=True), 40),
        (Int4.Config(group=8), 40),
        (Int2.Config(group=16), 48),
    ]
    for other, width in refused:
        form = other.build()
        with pytest.raises(NotLowered, match="no multiple of 32") as caught:
            form.native(form.pack(torch.randn(2, width)), (2, width))
        assert caught.value.reason == caught.value.message


def test_a_format_without_a_native_layout_says_so() -> None:
    class Odd(Format):
        layout = pack = unpack = fake = lambda self, *_: {}  # type: ignore[assignment]

    with pytest.raises(NotLowered, match="format Odd has no native layout"):
        Odd().native({}, (1, 1))
