"""Codecs that lose something: how much, in how many bytes, what the first tokens are spared, and whose file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.cache.codecs import CommVQ, Int4, Plain
from orchard.cache.codecs.fitted import write_fitted
from orchard.cache.policies import KeepAll, KeyDiff, Window
from orchard.cache.store import Cache, Store
from orchard.core.context import Context
from orchard.core.errors import BadFile, ConfigError
from orchard.ops import rope
from orchard.ops.attention import attend, visible
from tests.cache.vq_files import file_for, random_books, write_books

H, D, SINKS, LENGTH = 2, 8, 3, 24


def turn(keys: Tensor, positions: Tensor) -> Tensor:
    return rope.rotate(keys, *rope.tables(positions, rope.frequencies(100.0, D)))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded(**other: Any) -> CommVQ.Config:
    given = {"file": file_for(H, 3, 8, D), "model": "a test", "layer": 1, "rounds": 3, "words": 8, "sinks": SINKS}
    return CommVQ.Config(**{**given, **other})


def fed(codec: Any, policy: Any, chunks: list[int], seed: int = 0) -> tuple[Cache, list[Tensor]]:
    """Two sequences through one store; what each token's queries get."""
    store = Store.Config(heads=H, dim=D, codec=codec, policy=policy).complete()
    cache = Cache([store], batch=2, length=LENGTH, dtype=torch.float32)
    q, k, v = (drawn(2, H, LENGTH, D, seed=seed + n) for n in range(3))
    found, start = [], 0
    for size in chunks:
        here = slice(start, start + size)
        places = torch.arange(start, start + size).expand(2, size)
        view = cache.append(0, k[:, :, here], v[:, :, here], Context(places, cache=cache), turn)
        mask = visible(places, view, None)
        asked = turn(q[:, :, here], places[:, None])
        if view.attend is not None:
            found.append(view.attend(asked, mask, 0.4, None))
        else:
            found.append(attend(asked, view.k, view.v, mask, scale=0.4))
        start += size
    return cache, found


@pytest.mark.parametrize("codec", [coded(), Int4.Config(sinks=SINKS)])
@pytest.mark.parametrize("policy", [KeepAll.Config(), Window.Config(window=5, sinks=SINKS), Window.Config(window=6)])
def test_the_first_tokens_are_kept_as_they_are_however_the_input_is_cut(codec: Any, policy: Any) -> None:
    want = torch.cat(fed(codec, policy, [LENGTH])[1], dim=2)
    for chunks in ([1] * LENGTH, [2, 1, 5, 1, 1, 9, 5]):
        torch.testing.assert_close(torch.cat(fed(codec, policy, chunks)[1], dim=2), want, atol=1e-4, rtol=1e-4)
    plain = torch.cat(fed(Plain.Config(), policy, [LENGTH])[1], dim=2)
    torch.testing.assert_close(want[:, :, :SINKS], plain[:, :, :SINKS], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(want[:, :, SINKS + 4 :], plain[:, :, SINKS + 4 :], atol=1e-3), "the others are coded"


@pytest.mark.parametrize("codec", [coded(), Int4.Config(sinks=SINKS)])
def test_the_first_tokens_stay_found_where_a_policy_moves_them(codec: Any) -> None:
    """Forgetting packs positions; what was the first token is still as it was, to the last bit."""
    cache, _ = fed(codec, KeyDiff.Config(budget=8, block=4, sinks=SINKS), [4] * 5)
    (store,) = cache.stores.values()
    cache.evict()
    k = drawn(2, H, LENGTH, D, seed=1)[:, :, :SINKS]
    at = store.slots.positions[:, :, :SINKS]
    torch.testing.assert_close(store.keys()[:, :, :SINKS], turn(k, at), atol=1e-6, rtol=1e-6)
    rows = torch.tensor([1, 1, 0])
    cache.keep(rows)
    torch.testing.assert_close(store.keys()[:, :, :SINKS], turn(k, at)[rows], atol=1e-6, rtol=1e-6)


def test_bytes_of_a_head_of_64_channels() -> None:
    """Prescales counted: two bits are an eighth of float16, and less than 1.3 bits are as small as said."""
    two, one = (coded(rounds=rounds, words=16).build() for rounds in (14, 8))
    whole = Plain.Config().build().bytes_per_slot(H, 64, torch.float16)
    assert two.bytes_per_slot(H, 64, torch.float16) / whole == 1 / 8
    assert one.bytes_per_slot(H, 64, torch.float16) / whole == 10 / 128
    assert Int4.Config().build().bytes_per_slot(H, 64, torch.float16) / whole == 36 / 128
    assert coded(rounds=9, words=64).build().layout(64, torch.float16)["codes"][0] == (14,)
    cache, _ = fed(coded(), KeepAll.Config(), [1])
    rows = 2 * 2 * H * (SINKS + 1) * D * 4
    assert cache.nbytes == 2 * (LENGTH + 1) * coded().build().bytes_per_slot(H, D, torch.float32) + rows


def test_four_bits_are_within_half_a_step_and_channels_help(tmp_path: Path) -> None:
    x = drawn(2, H, 50, D)
    plain = Int4.Config().build()
    lost = (plain.decode(plain.encode(x, "v"), "v", torch.float32) - x).abs()
    step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / 15
    assert bool((lost <= step * 0.51 + 2e-3).all())
    wide = x * torch.tensor([1.0] * (D - 1) + [40.0]) + torch.tensor([9.0] * 2 + [0.0] * (D - 2))
    channels = {"middle": wide.mean((0, 2)), "width": wide.std((0, 2))}
    write_fitted(tmp_path / "c.safetensors", "channels", {0: channels}, model="m")
    told = Int4.Config(file=str(tmp_path / "c.safetensors"), model="m").build()
    errors = [(codec.decode(codec.encode(wide, "k"), "k", torch.float32) - wide)[..., 1] for codec in (plain, told)]
    assert errors[1].square().mean() < 0.1 * errors[0].square().mean()
    zeros = torch.zeros(1, H, 2, D)
    assert told.decode(told.encode(zeros, "v"), "v", torch.float32).abs().max() == 0


def test_files_of_others_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    write_books(path, {0: random_books(H, 3, 8, D)}, model="mine")
    x = drawn(1, H, 2, D)

    def tried(**other: Any) -> None:
        coded(**{"file": str(path), "model": "mine", "layer": 0, **other}).build().encode(x, "k")

    tried()
    for other, says in (
        ({"model": "yours"}, "another model"),
        ({"layer": 5}, "nothing for layer 5"),
        ({"rounds": 4}, "3 rounds of 8 codewords, not 4"),
        ({"file": str(tmp_path / "none")}, "not there"),
    ):
        with pytest.raises(BadFile, match=says):
            tried(**other)
    with pytest.raises(BadFile, match="heads"):
        coded(file=str(path), model="mine", layer=0).build().encode(drawn(1, 5, 2, D), "k")
    write_fitted(path, "channels", {0: {"keys": x}}, model="mine")
    with pytest.raises(BadFile, match="no codebooks"):
        tried()
    write_fitted(path, "codebooks", {0: {"keys": x}}, model="mine")
    with pytest.raises(BadFile, match="for a layer"):
        tried()
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(BadFile, match="damaged"):
        tried()
    books = random_books(H, 3, 8, D)
    books.keys[0, 0, 0, 0, 0] = float("nan")
    write_books(path, {0: books}, model="mine")
    with pytest.raises(BadFile, match="not finite"):
        tried()


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"words": 12}, {"words": 128}, {"sinks": -1}, {"sinks": 300}])
def test_impossible_codes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        coded(**wrong).build()
