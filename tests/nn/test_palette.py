"""Palettes: k-means against an exact search and a uniform grid, importance, edges, broken and extreme values."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.core.errors import ConfigError
from orchard.nn.formats import Int4, Palette
from orchard.nn.linear import Embedding, GroupedLinear, Linear

LARGEST = 65504.0


def palette(bits: int = 4, rows: int = 16) -> Palette:
    made: Palette = Palette.Config(bits=bits, rows=rows).build()
    return made


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(form: Palette, weight: Tensor, importance: Tensor | None = None, of: Tensor | None = None) -> Tensor:
    off = form.unpack(form.pack(weight, importance), torch.float64) - weight.double()
    return (off.square() * (1.0 if of is None else of)).sum()


def exact(values: Tensor, counts: Tensor, means: int) -> float:
    """The least weighted square that any palette of so many means can leave, by dynamic programming over sorted values."""
    order = values.argsort()
    x, w = values[order].double(), counts[order].double()
    mass, total, square = (torch.cat([torch.zeros(1), part.cumsum(0)]).double() for part in (w, w * x, w * x * x))
    count = len(x)
    first, last = torch.meshgrid(torch.arange(count + 1), torch.arange(count + 1), indexing="ij")
    between = [part[last] - part[first] for part in (mass, total, square)]
    cost = between[2] - between[1].square() / between[0].clamp_min(1e-30)
    cost = torch.where(last >= first, cost.clamp_min(0), torch.inf)
    best = cost[0]
    for _ in range(means - 1):
        best = (best[:, None] + cost).amin(0)
    return float(best[count])


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("kind", ["normal", "outliers", "weighted"])
def test_k_means_comes_near_the_exact_optimum(bits: int, kind: str) -> None:
    form = palette(bits)
    for seed in range(4):
        weight, counts = randn(16, 32, seed=seed), torch.ones(16, 32)
        if kind == "outliers":
            weight = weight**3
        if kind == "weighted":
            counts = randn(16, 32, seed=seed + 9).square()
        found = float(error(form, weight, None if kind != "weighted" else counts, counts))
        least = exact(weight.flatten(), counts.flatten(), 2**bits)
        assert least * 0.999 < found < 1.01 * least


@given(
    bits=st.sampled_from([2, 4]),
    rows=st.integers(1, 5),
    data=st.lists(st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8), min_size=1, max_size=7),
    limit=st.sampled_from([1e-9, 1e-3, 1.0, 1e4, 6e4]),
)
def test_never_worse_than_the_uniform_grid_of_each_table(bits: int, rows: int, data: Any, limit: float) -> None:
    weight, form = torch.tensor(data) * limit, palette(bits, rows)
    dense = form.unpack(form.pack(weight), torch.float64)
    for some, made in zip(weight.double().split(rows), dense.split(rows), strict=True):
        grid = torch.linspace(0, 1, 2**bits, dtype=torch.float64) * (some.max() - some.min()) + some.min()
        nearest = (some[..., None] - grid.half().double()).abs().amin(-1).square().sum()
        assert (made - some).square().sum() <= nearest * (1 + 1e-9) + 1e-12 * some.square().sum() + 1e-30


@settings(max_examples=60)
@given(
    bits=st.sampled_from([2, 4]),
    rows=st.integers(1, 9),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 20), st.sampled_from([4, 8, 20])),
    limit=st.sampled_from([0.0, 1e-40, 1e-20, 1e-7, 1e-4, 1.0, 1e6, 1e20, 3e38]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_size(bits: int, rows: int, shape: tuple[int, ...], limit: float, seed: int) -> None:
    form, weight = palette(bits, rows), (torch.tanh(randn(*shape, seed=seed)).double() * limit).float()
    packed = form.pack(weight)
    layout = form.layout(shape)
    assert {name: (part.shape, part.dtype) for name, part in layout.items()} == {
        name: (tuple(part.shape), part.dtype) for name, part in packed.items()
    }
    assert form.nbytes(shape, torch.float32) == sum(part.nbytes for part in packed.values())
    table = packed["table"].float()
    assert table.isfinite().all() and (table.diff() >= 0).all()
    dense = form.unpack(packed, torch.float32)
    # Every value lies at the nearest entry of its own table, and no entry lies outside what the table is for.
    own = table.repeat_interleave(rows, 1)[:, : shape[1], None]
    clipped = weight.clamp(-LARGEST, LARGEST)
    assert ((dense - clipped).abs() <= (own - clipped[..., None]).abs().amin(-1) * (1 + 1e-6) + 1e-12).all()
    assert (dense.abs().amax((-1, -2)) <= clipped.abs().amax((-1, -2)) * (1 + 2**-10) + 2**-24).all()
    again = form.pack(dense)
    assert form.unpack(again, torch.float32).equal(dense)
    assert all(form.pack(weight)[name].equal(part) for name, part in packed.items())


@pytest.mark.parametrize("bits", [2, 4])
def test_few_different_values_are_kept_exactly(bits: int) -> None:
    values = torch.tensor([-3.0, -0.5, 0.0, 2.0])
    weight = values[torch.randint(4, (16, 8), generator=torch.Generator().manual_seed(1))]
    weight[3], weight[7, :] = 2.0, 0.0  # a constant row and a dead one
    form = palette(bits)
    assert form.unpack(form.pack(weight), torch.float32).equal(weight)


def test_importance_pulls_the_tables_and_broadcasts() -> None:
    form, weight = palette(2), randn(20, 16)
    columns = torch.ones(16)
    columns[::4] = 100.0
    full = columns.expand(20, 16)
    plainly, weighted = error(form, weight, None, full), error(form, weight, columns, full)
    assert weighted < 0.9 * plainly
    for same in (full, columns[None], columns * 1e30, columns * 1e-30, columns.double()):
        assert form.pack(weight, same)["codes"].equal(form.pack(weight, columns)["codes"])
    by_row = torch.linspace(1, 50, 20)[:, None]
    assert error(form, weight, by_row, by_row) < error(form, weight, None, by_row)
    assert error(form, weight, torch.tensor(3.0)) == error(form, weight)


def test_values_that_do_not_count_are_only_rounded() -> None:
    form, weight = palette(2), randn(16, 16)
    counts = torch.zeros(16, 16)
    counts[:, :2] = 1.0
    weight[:, 2:] *= 50
    weight[:, :2] = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(8).reshape(16, 2)
    dense = form.unpack(form.pack(weight, counts), torch.float32)
    torch.testing.assert_close(dense[:, :2], weight[:, :2], atol=1e-3, rtol=0)
    nothing = form.pack(weight, torch.zeros(16, 16))
    assert all(part.equal(form.pack(weight)[name]) for name, part in nothing.items())


@pytest.mark.parametrize(
    ("bad", "words"),
    [(torch.ones(3), "shape"), (-torch.ones(8), "negative"), (torch.full((8,), torch.nan), "finite")],
)
def test_an_importance_that_makes_no_sense_is_refused(bad: Tensor, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        palette().pack(torch.ones(4, 8), bad)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_value_shows_and_stays_in_its_table(bad: float) -> None:
    form, weight = palette(4, rows=3), randn(8, 8)
    weight[4, 1] = bad
    dense = form.unpack(form.pack(weight), torch.float32)
    assert dense[3:6].isnan().all() and dense[:3].isfinite().all() and dense[6:].isfinite().all()


@pytest.mark.parametrize("cfg", [{"bits": 3}, {"bits": 8}, {"rows": 0}, {"rows": 1.5}])
def test_what_is_no_palette_is_refused(cfg: Any) -> None:
    with pytest.raises(ConfigError):
        Palette.Config(**cfg).build()


def test_rows_that_are_no_whole_bytes_are_refused() -> None:
    for bits, width in ((4, 7), (2, 6)):
        with pytest.raises(ConfigError, match="bytes"):
            Linear.Config(in_dim=width, out_dim=4, format=Palette.Config(bits=bits)).build()


@pytest.mark.parametrize(("bits", "rows"), list(itertools.product([2, 4], [1, 5, 16])))
def test_an_embedding_looks_rows_up_in_their_own_tables(bits: int, rows: int) -> None:
    table: Embedding = Embedding.Config(vocab=37, dim=12, format=Palette.Config(bits=bits, rows=rows)).build()
    table.assign(randn(37, 12) * torch.arange(1, 38)[:, None])
    ids = torch.tensor([[0, 36, 15], [16, 1, 36]])
    assert table(ids, torch.float32).equal(table.dense()[ids])


def test_experts_and_large_weights_unpack_alike() -> None:
    form, weight = palette(4), randn(3, 150, 2400)
    packed = form.pack(weight)
    together = form.unpack(packed, torch.float32)
    for expert in range(3):
        alone = {name: part[expert] for name, part in packed.items()}
        assert form.unpack(alone, torch.float32).equal(together[expert])
    assert form.unpack(alone, torch.bfloat16).equal(together[2].bfloat16())
    assert 8 * form.nbytes((1536, 576), torch.float32) / (1536 * 576) == 4 + 16 * 16 / (16 * 576)
    mapped: GroupedLinear = GroupedLinear.Config(count=2, in_dim=8, out_dim=18, format=Palette.Config()).build()
    x = randn(5, 8)
    torch.testing.assert_close(mapped(x, 1), x @ mapped.dense()[1].mT)


def test_against_one_scale_a_row_at_nearly_the_same_bits() -> None:
    """Heavy tails are what tables are for: a grid pays for the furthest value of each row with all the others."""
    weight = randn(64, 512) ** 3
    rounded = Int4.Config(group=None).build()
    grid = (rounded.unpack(rounded.pack(weight), torch.float64) - weight.double()).square().sum()
    assert error(palette(4), weight) < 0.5 * grid


def test_training_through_fake_learns() -> None:
    torch.manual_seed(0)
    form, x = palette(2, rows=4), randn(64, 8, seed=3)
    wanted = x @ randn(8, 8, seed=4).mT
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.3)
    losses = []
    for _ in range(60):
        loss = (x @ form.fake(weight).mT - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.25 * losses[0]
