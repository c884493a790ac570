"""Additive codes: what they mean, that they commute with rotations, that attention from codes is attention to what they mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.core.errors import ConfigError
from orchard.ops import rope, vq, vq_attend, vq_fit
from orchard.ops.attention import attend
from orchard.ops.vq import Codebooks, flat, paired, turned
from tests.cache.vq_files import random_books

H, D, R, N, S = 2, 16, 4, 8, 37


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def turn(keys: Tensor, positions: Tensor) -> Tensor:
    return rope.rotate(keys, *rope.tables(positions, rope.frequencies(100.0, keys.shape[-1])))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 8), st.integers(1, 9), st.integers(0, 99))
def test_packed_indices_come_back(bits: int, count: int, seed: int) -> None:
    made = torch.randint(0, 1 << bits, (2, 3, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    data = vq.packed(made, bits)
    assert data.shape[-1] == -(-count * bits // 8) and vq.unpacked(data, bits, count).equal(made)


def test_a_byte_is_a_and_b() -> None:
    assert vq.packed(torch.tensor([[3, 12]], dtype=torch.uint8), 4).tolist() == [[3 | 12 << 4]]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 99), st.integers(0, 5000))
def test_rotations_commute_with_codewords(seed: int, position: int) -> None:
    """Rotating what codes stand for is the same as rotating every codeword."""
    books = random_books(H, R, N, D, seed)
    codes, scale = vq.encode_keys(books, drawn(1, H, 3, D, seed=seed))
    at = torch.full((1, 1, 3), position)
    words = turn(books.key_words.flatten(1, 2)[None], at[..., :1]).unflatten(2, (R, 2 * N))[0]
    moved = Codebooks(
        paired(words[:, :, :N]), books.values, turn(books.key_offset[None, :, None], at[..., :1])[0, :, 0],
        books.value_offset, books.key_weight, books.value_metric,
    )  # fmt: skip
    torch.testing.assert_close(flat(turned(paired(words[:, :, :N]))), words[:, :, N:], atol=1e-5, rtol=0)
    rotated = turn(vq.decode_keys(books, codes, scale), at)
    torch.testing.assert_close(vq.decode_keys(moved, codes, scale), rotated, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("role", ["k", "v"])
def test_encoding_finds_the_best_pair_of_every_round_and_the_best_prescale(role: str) -> None:
    """Against a search through all pairs in float64, in the metric; and no other prescale would be nearer."""
    books = random_books(H, R, N, D)
    x = drawn(1, H, 6, D, seed=3)
    if role == "k":
        (codes, scale), words, offset = vq.encode_keys(books, x), books.key_words, books.key_offset
        metric = torch.diag_embed(torch.cat([books.key_weight] * 2, dim=-1))
    else:
        (codes, scale), words, offset = vq.encode_values(books, x), books.value_words, books.value_offset
        metric, codes = books.value_metric, codes.unflatten(-1, (-1, 2))
    for head in range(H):
        sums = (words[head, :, :N, None] + words[head, :, None, N:]).flatten(1, 2).double()
        for token in range(6):
            whole = (x[0, head, token] - offset[head]).double()
            left, made = whole / whole.norm(), torch.zeros(D, dtype=torch.float64)
            for r in range(R):
                apart = left - sums[r]
                best = int((apart @ metric[head].double() * apart).sum(-1).argmin())
                assert codes[0, head, token, r].tolist() == [best // N, best % N]
                left, made = left - sums[r, best], made + sums[r, best]
            weighed = made @ metric[head].double()
            torch.testing.assert_close(
                float(scale[0, head, token]), float(weighed @ whole / (weighed @ made)), rtol=2e-3, atol=0
            )


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_from_codes_is_attention_from_what_they_stand_for(groups: int, softcap: float | None) -> None:
    """One query a key head goes through tables, several through blocks; two slots are kept as they are, some are not seen."""
    books = random_books(H, R, N, D)
    k, v = vq.encode_keys(books, drawn(2, H, S, D, seed=1)), vq.encode_values(books, drawn(2, H, S, D, seed=2))
    q, positions = drawn(2, H * groups, 1, D, seed=4), torch.arange(100, 100 + S).expand(2, 1, S)
    mask = torch.rand(2, 1, 1, S, generator=torch.Generator().manual_seed(5)) < 0.8
    slot = torch.tensor([[[3, S], [0, 7]], [[S, 1], [5, 6]]])
    mask[..., :8] = True
    first = torch.zeros(2, H, S + 1, dtype=torch.bool).scatter(2, slot, True)[..., :S]
    kept = vq_attend.Kept(drawn(2, H, 2, D, seed=6), drawn(2, H, 2, D, seed=7), slot, first)
    keys, values = vq.decode_keys(books, *k), vq.decode_values(books, *v)
    for b in range(2):
        for h in range(H):
            for row, place in enumerate(slot[b, h].tolist()):
                if place < S:
                    keys[b, h, place], values[b, h, place] = kept.k[b, h, row], kept.v[b, h, row]
    want = attend(q, turn(keys, positions), values, mask, scale=0.3, softcap=softcap)
    coded = vq_attend.Coded(books, k[0].flatten(3), k[1], *v)
    got = coded.attend(q, mask, 0.3, softcap, positions, turn, kept)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_table_scores_are_explicit_scores() -> None:
    books = random_books(H, R, N, D)
    codes, scale = vq.encode_keys(books, drawn(1, H, S, D))
    q, positions = drawn(1, H, 2, 3, D, seed=1), torch.arange(S)[None, None] * 9
    turns = vq_attend.turns_of(turn, positions, D, q)
    assert turns is not None
    want = q @ turn(vq.decode_keys(books, codes, scale), positions)[:, :, None].mT
    got = vq_attend.table_scores(books, q, codes.flatten(3), scale, turns)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_rotation_of_other_pairs_is_noticed() -> None:
    def partial(keys: Tensor, positions: Tensor) -> Tensor:
        return rope.rotate(keys, *rope.tables(positions, rope.frequencies(100.0, D // 2)))

    assert vq_attend.turns_of(partial, torch.arange(5)[None, None], D, drawn(1)) is None


def test_fitting_finds_what_keys_and_values_are_made_of() -> None:
    """Vectors made from hidden codebooks: far nearer than the same number of random ones, and every step of it helps."""
    hidden = random_books(H, 2, 4, 8, seed=5)
    make = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 4, (1, H, 600, 2, 2), generator=make, dtype=torch.uint8)
    ones = torch.ones(1, H, 600, 1)
    k = vq.decode_keys(hidden, codes, ones)[0] + 0.01 * drawn(H, 600, 8)
    v = vq.decode_values(hidden, codes.flatten(3), ones)[0] + 0.01 * drawn(H, 600, 8, seed=1)
    found = vq_fit.fit(k, v, rounds=2, words=4, passes=0)
    both = vq_fit.refined(found, k, v)
    spread = [float((x - x.mean(1, keepdim=True)).square().mean()) for x in (k, v)]
    key, value = vq_fit.key_error(found, k) / spread[0] / 2, vq_fit.value_error(found, v) / spread[1]
    assert key < 0.2 and value < 0.2, (key, value)
    assert vq_fit.key_error(both, k) <= vq_fit.key_error(found, k)
    assert vq_fit.value_error(both, v) <= vq_fit.value_error(found, v)
    weight = torch.ones(H, 4)
    weight[:, 0] = 25.0  # what counts more is kept better
    told = vq_fit.fit(k, v, rounds=2, words=4, weight=weight, passes=0)
    lost = [
        paired(vq.decode_keys(b, *vq.encode_keys(b, k[None]))[0] - k)[:, :, 0].square().mean() for b in (told, found)
    ]
    assert lost[0] < lost[1]


def test_codebooks_that_do_not_fit_together_are_refused() -> None:
    good = random_books(1, 2, 4, 8)
    for keys, values in (
        (good.keys[:, :, :3], good.values),
        (good.keys, good.values[:, :3]),
        (good.keys[:, :, :, :3], good.values),
    ):
        with pytest.raises(ConfigError):
            Codebooks(keys, values, good.key_offset, good.value_offset, good.key_weight, good.value_metric)
