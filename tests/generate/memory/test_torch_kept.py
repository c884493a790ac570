"""A torch model under a budget: exact until something must go, then over just what is kept, and out to arrays and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchard.cache.codecs import Int8
from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.errors import BadFile, ConfigError, UnsupportedPair, UsageError
from orchard.generate.memory.torch_kept import TorchKept
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack

VOCAB = 29
IDS = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def model(seed: int = 0, dtype: torch.dtype = torch.float32, **store: Any) -> Decoder:
    """Three layers, of which the last reads the store of the second."""
    block = Block.Config(
        mixer=Attention.Config(heads=4, kv_heads=2, head_dim=8, store=Store.Config(**store)),
        mlp=GatedMLP.Config(hidden_dim=24),
    )
    stack = Stack.Config(layers=[block.clone(), block.clone(), block.clone().set("mixer.store.owner", 1)])
    torch.manual_seed(seed)
    made: Decoder = Decoder.Config(vocab=VOCAB, dim=16, context=64, stack=stack, head=None).build()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.4)
    return made.to(dtype).eval()


MODEL = model()


def kept(scoring: Any = "keydiff", budget: int = 12, block: int = 8, **more: Any) -> TorchKept:
    return TorchKept(more.pop("model", MODEL), budget=budget, block=block, sinks=2, scoring=scoring, **more)


def whole(ids: list[int], of: Decoder = MODEL) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(of(torch.tensor([ids]))[0])


def test_nothing_is_lost_until_something_must_go() -> None:
    for scoring in ("recent", "keydiff", "snap", "probe"):
        one = kept(scoring)
        got = np.concatenate([one.read(IDS[:7], wanted=3), one.read(IDS[7:20], wanted=13)])
        np.testing.assert_allclose(got, whole(IDS[:20])[4:], atol=2e-5)
        assert one.used == one.peak == 20 and one.room == 0 and one.length == 20


def test_any_length_takes_the_same_memory_and_never_more_than_was_said() -> None:
    for scoring in ("recent", "keydiff", "snap"):
        for heads in ("uniform", "flat"):
            one = kept(scoring, heads=heads)
            before = one.nbytes
            for start in range(0, 57, 19):
                scores = one.read(IDS[start : start + 19], wanted=1)
                assert one.used <= one.peak <= 20 and np.isfinite(scores).all()
            assert one.nbytes == before


def test_what_is_left_is_an_ordinary_shorter_sequence() -> None:
    """With one layer a token's keys and values are its own, so forgetting is the same as never having read."""
    block = Block.Config(mixer=Attention.Config(heads=4, kv_heads=2, head_dim=8), mlp=GatedMLP.Config(hidden_dim=24))
    torch.manual_seed(1)
    tree = Decoder.Config(vocab=VOCAB, dim=16, context=64, stack=Stack.Config(layers=[block]), head=None)
    single: Decoder = tree.build().eval()
    one = kept("recent", model=single)
    one.read(IDS[:20])
    one.evict()
    got = one.read(IDS[20:23], wanted=3)
    np.testing.assert_allclose(got, whole([*IDS[:2], *IDS[10:23]], single)[-3:], atol=1e-5)


def test_a_probe_looks_and_leaves_nothing() -> None:
    one, other = kept("probe"), kept("probe")
    for each in (one, other):
        each.read(IDS[:15])
    one.probe(IDS[30:45])
    assert one.used == 15 and one.read(IDS[15:16], wanted=1).tolist() == other.read(IDS[15:16], wanted=1).tolist()
    with pytest.raises(UsageError, match="do not fit"):
        one.read(IDS[16:24])
    one.probe(IDS[20:30])
    one.evict()
    assert one.used == one.length == 12
    one.read(IDS[16:24])
    with pytest.raises(UsageError, match="nothing has looked"):
        one.evict()


def test_readers_of_a_shared_store_all_count() -> None:
    one = kept("probe")
    one.read(IDS[:15])
    one.probe(IDS[30:33])
    found = one.cache.stores[1].slots.scores  # type: ignore[attr-defined]
    alone = kept("probe")
    alone.read(IDS[:15])
    last = MODEL.stack.layers[2].mixer
    forward, last.forward = last.forward, lambda x, context: torch.zeros_like(x)
    try:
        alone.probe(IDS[30:33])
    finally:
        last.forward = forward
    less = alone.cache.stores[1].slots.scores  # type: ignore[attr-defined]
    assert (found >= less).all() and (found > less).any()


@pytest.mark.parametrize(("dtype", "codec"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, Int8)])
@pytest.mark.parametrize("heads", ["uniform", "flat"])
def test_saved_and_taken_up_again(dtype: torch.dtype, codec: Any, heads: Any) -> None:
    store = {} if codec is None else {"codec": codec.Config()}
    made = model(dtype=dtype, **store)
    one = kept("keydiff", heads=heads, model=made)
    one.read(IDS[:33])
    arrays = one.save()
    other = kept("keydiff", heads=heads, model=made)
    other.read(IDS[40:50])
    other.load(arrays)
    assert (other.used, other.peak, other.length) == (one.used, one.peak, one.length)
    assert all(np.array_equal(value, other.save()[name]) for name, value in arrays.items())
    np.testing.assert_array_equal(one.keys(1), other.keys(1))
    for start in (33, 40):  # through a time of forgetting
        np.testing.assert_array_equal(
            one.read(IDS[start : start + 7], wanted=2), other.read(IDS[start : start + 7], wanted=2)
        )


def test_what_belongs_to_others_is_refused_and_nothing_has_changed() -> None:
    one = kept()
    one.read(IDS[:18])
    arrays = one.save()
    wrong: list[dict[str, np.ndarray]] = [
        {},
        {**arrays, "about": arrays["about"][:-4]},
        {**arrays, "0.k.x": arrays["0.k.x"][:, :, 1:]},
        {**arrays, "0.k.x": arrays["0.k.x"].astype(np.float64)},
        {**arrays, "1.positions": arrays["1.positions"][..., ::-1]},
        {name: array for name, array in arrays.items() if name != "1.v.x"},
    ]
    others = [kept(budget=13), kept(block=9), kept("recent"), kept(heads="flat"), kept(model=model(seed=5))]
    before = {name: array.copy() for name, array in arrays.items()}
    for bad in [*wrong, *(each.save() for each in others)]:
        with pytest.raises(BadFile):
            one.load(bad)
        assert all(np.array_equal(before[name], array) for name, array in one.save().items())


def test_budgets_by_layer() -> None:
    one = kept("recent", budgets=[16, 8])
    assert [store.slots.capacity for store in one.cache.stores.values()] == [24, 16]
    one.read(IDS[:40])
    assert [store.slots.used for store in one.cache.stores.values()] <= [24, 16] and one.budgets == [16, 8]
    one.evict([8, 16])
    assert one.length == 16 and one.budgets == [8, 16] and one.keys(0).shape == (2, 8, 8)
    for wrong in ([12], [20, 20]):
        with pytest.raises(UsageError):
            one.evict(wrong)
    with pytest.raises(ConfigError):
        one.evict([2, 12])


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="no room"):
        TorchKept(MODEL, budget=4, block=8, sinks=4)
    with pytest.raises(ConfigError, match="no scoring"):
        kept("best")
    with pytest.raises(UnsupportedPair, match="Window"):
        kept(model=model(policy=Window.Config(window=4)))
    one = kept()
    for bad in ([], [VOCAB], [-1]):
        with pytest.raises(UsageError):
            one.read(bad)
    with pytest.raises(UsageError):
        one.read([1, 2], wanted=3)
    with pytest.raises(UsageError):
        one.keys(2)
    assert one.length == 0
