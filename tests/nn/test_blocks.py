"""Blocks of 6×6 in 128 bits: a decoder written from the description alone, error against plainer layouts, edges, extremes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.core.errors import ConfigError
from orchard.nn.formats import Blocks
from orchard.nn.linear import Embedding, GroupedLinear

FORM: Blocks = Blocks.Config().build()
LEVELS = [[-116, -78, -50, -27, -6, 14, 36, 60, 89, 127], [-86, -56, -34, -15, 0, 16, 33, 53, 80, 127]]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heavy(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.distributions.StudentT(5.0).sample(shape)


def back(weight: Tensor, importance: Tensor | None = None) -> Tensor:
    return FORM.unpack(FORM.pack(weight, importance), torch.float32)


def share(weight: Tensor) -> float:
    return float((back(weight) - weight).square().sum() / weight.square().sum())


def scale_of(code: int) -> float:
    if code == 0:
        return 0.0
    if code < 8:
        return 2.0 ** (-23 + 2 * (code - 1)) / 128
    if code < 56:
        return 2.0 ** ((code - 8) // 4 - 9) * (1 + (code - 8) % 4 / 4) / 128
    return [2.0**power / 128 for power in (3, 5, 7, 9, 11, 13, 16)][code - 56] if code < 63 else float("nan")


def decoded(block: bytes) -> list[list[float]]:
    """One block, byte by byte, as the module's description says it."""
    scale, levels = scale_of(block[0] & 63), LEVELS[block[0] >> 6 & 1]
    sign = -1 if block[0] >> 7 else 1
    rows: list[list[float]] = []
    for pair in range(3):
        number = int.from_bytes(block[1 + 5 * pair : 6 + 5 * pair], "little")
        digits = []
        for group in range(4):
            value = min(number >> 10 * group & 1023, 999)
            digits += [value % 10, value // 10 % 10, value // 100]
        values = [sign * scale * levels[digit] for digit in digits]
        rows += [values[:6], values[6:]]
    return rows


def dense_of(blocks: Tensor) -> Tensor:
    return torch.cat([torch.cat([torch.tensor(decoded(bytes(b.tolist()))) for b in row], 1) for row in blocks])


@pytest.mark.parametrize("shape", [(6, 6), (14, 20), (1, 1), (5, 13)])
def test_the_bits_are_as_described(shape: tuple[int, int]) -> None:
    packed = FORM.pack(randn(*shape))
    assert packed["blocks"].shape == (-(-shape[0] // 6), -(-shape[1] // 6), 16)
    whole = dense_of(packed["blocks"])
    assert FORM.unpack(packed, torch.float32).equal(whole[: shape[0], : shape[1]])


@given(st.binary(min_size=32, max_size=32))
def test_any_bytes_decode_as_described(data: bytes) -> None:
    blocks = torch.tensor(list(data), dtype=torch.uint8).reshape(1, 2, 16)
    packed = {"blocks": blocks, "extent": torch.empty(6, 12, 0, dtype=torch.uint8)}
    got = FORM.unpack(packed, torch.float32)
    torch.testing.assert_close(got, dense_of(blocks), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(FORM.rows(packed, torch.arange(6), torch.float32).nan_to_num(), got.nan_to_num())


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 14), st.integers(1, 14)),
    limit=st.sampled_from([0.0, 1e-40, 1e-20, 1e-7, 1e-4, 1e-2, 1.0, 8.0, 300.0, 6e4, 1e6, 1e20, 3e38]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_size(shape: tuple[int, ...], limit: float, seed: int) -> None:
    weight = (torch.tanh(randn(*shape, seed=seed)).double() * limit).float()
    packed = FORM.pack(weight)
    assert {name: (part.shape, part.dtype) for name, part in FORM.layout(shape).items()} == {
        name: (tuple(part.shape), part.dtype) for name, part in packed.items()
    }
    assert FORM.nbytes(shape, torch.float32) == sum(part.nbytes for part in packed.values())
    assert FORM.nbytes(shape, torch.float32) == 16 * shape[0] * -(-shape[1] // 6) * -(-shape[2] // 6)
    dense = FORM.unpack(packed, torch.float32)
    assert dense.shape == shape and dense.isfinite().all()
    clipped = weight.clamp(-65024, 65024)
    # The second set of levels has a zero: whatever is taken cannot be worse than zeros.
    assert (dense - clipped).square().sum() <= clipped.square().sum() * (1 + 1e-5)
    assert all(FORM.pack(weight)[name].equal(part) for name, part in packed.items())
    if 0.01 <= limit <= 4:
        assert FORM.unpack(FORM.pack(dense), torch.float32).equal(dense)


@given(st.sampled_from([1e-5, 1e-3, 0.02, 0.5, 5.0, 100.0, 6e4]), st.booleans())
def test_constant_blocks(value: float, mixed: bool) -> None:
    weight = torch.full((6, 6), value)
    if mixed:
        weight[::2] *= -1
    inside = 0.004 <= value <= 4
    assert ((back(weight) - weight).abs() <= (0.07 if inside else 0.4) * value).all()
    assert (back(weight)[0] == back(weight)[2]).all()


@pytest.mark.parametrize(
    ("weight", "most"),
    [(randn(120, 600), 0.0156), (heavy(120, 600) * 0.1, 0.0215), (randn(120, 600) * 0.02, 0.0156)],
    ids=["normal", "heavy-tailed", "small"],
)
def test_the_error_that_the_layout_was_chosen_for(weight: Tensor, most: float) -> None:
    """Six uniform levels between two half-precision ends, fitted to each block, leave 0.039 and 0.054 of the square."""
    assert share(weight) < most


def test_ten_uniform_levels_do_worse() -> None:
    weight = randn(120, 600)
    blocks = weight.unflatten(0, (-1, 6)).unflatten(-1, (-1, 6)).transpose(1, 2).flatten(-2)
    best = torch.full(blocks.shape[:-1], torch.inf)
    for cut in (0.7, 0.8, 0.9, 1.0, 1.1):
        step = blocks.abs().amax(-1, keepdim=True) * cut / 4.5
        level = ((blocks / step + 0.5).round() - 0.5).clamp(-4.5, 4.5)
        best = torch.minimum(best, (level * step - blocks).square().sum(-1))
    assert share(weight) < 0.8 * float(best.sum() / weight.square().sum())


def test_importance_is_minimised_and_may_be_zero() -> None:
    weight, columns = randn(36, 36), torch.ones(36)
    columns[::3] = 50.0
    plain, weighted = back(weight), back(weight, columns)
    assert ((weighted - weight).square() * columns).sum() < 0.9 * ((plain - weight).square() * columns).sum()
    assert back(weight, columns * 1e30).equal(weighted) and back(weight, columns * 1e-30).equal(weighted)
    nothing = torch.ones(36)
    nothing[6:12] = 0.0
    assert back(weight, nothing)[:, :6].equal(plain[:, :6]) and back(weight, nothing).isfinite().all()
    with pytest.raises(ConfigError, match="negative"):
        FORM.pack(weight, -columns)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_value_shows_and_stays_in_its_block(bad: float) -> None:
    weight = randn(12, 12)
    weight[7, 2] = bad
    dense = back(weight)
    assert dense[6:, :6].isnan().all() and dense[:6].isfinite().all() and dense[:, 6:].isfinite().all()


def test_values_beyond_the_last_scale_become_the_largest() -> None:
    weight = torch.zeros(6, 6)
    weight[0, 0], weight[5, 5] = 1e9, 3e38
    assert back(weight)[0, 0] == back(weight)[5, 5] == 65024 and back(weight).count_nonzero() == 2
    assert back(-weight).equal(-back(weight))


def test_what_lies_beyond_the_edge_does_not_count() -> None:
    """Edge blocks hold fewer values, and are the better for it."""
    weight = randn(3, 300)
    assert share(weight) < 0.9 * share(torch.cat([weight, randn(3, 300, seed=1)]))


@pytest.mark.parametrize("vocab", [6, 17, 23])
def test_an_embedding_looks_its_rows_up(vocab: int) -> None:
    table: Embedding = Embedding.Config(vocab=vocab, dim=14, format=Blocks.Config()).build()
    table.assign(randn(vocab, 14))
    ids = torch.tensor([[0, vocab - 1, 5], [3, 1, vocab - 1]])
    assert table(ids, torch.float32).equal(table.dense()[ids])
    assert table(ids, torch.bfloat16).equal(table.dense(torch.bfloat16)[ids])


def test_experts_and_large_weights_unpack_alike() -> None:
    packed = FORM.pack(randn(2, 500, 800))
    together = FORM.unpack(packed, torch.float32)
    for expert in range(2):
        alone: Any = {name: part[expert] for name, part in packed.items()}
        assert FORM.unpack(alone, torch.float32).equal(together[expert])
    mapped: GroupedLinear = GroupedLinear.Config(count=2, in_dim=8, out_dim=7, format=Blocks.Config()).build()
    x = randn(5, 8)
    torch.testing.assert_close(mapped(x, 1), x @ mapped.dense()[1].mT)


def test_training_through_fake_learns() -> None:
    x = randn(64, 8, seed=3)
    wanted = x @ randn(8, 8, seed=4).mT
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.3)
    losses = []
    for _ in range(60):
        loss = (x @ FORM.fake(weight).mT - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
