"""Budgets: what is kept is what should be, at the right places, and never more than was said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.cache.policies import KeyDiff, Probe, Recent, Snap
from orchard.cache.policies.scored import best
from orchard.cache.store import Cache, Store
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair, UsageError
from orchard.ops.attention import attend, visible

HEADS, GROUP, DIM = 2, 2, 4
ANGLES = torch.tensor([1.0, 0.3])


def rotate(keys: Tensor, positions: Tensor) -> Tensor:
    angles = positions[..., None].float() * ANGLES
    cos, sin = angles.cos(), angles.sin()
    a, b = keys.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Talk:
    """Random keys, values and queries through a cache of some layers; remembers which token each slot should hold."""

    def __init__(self, *policies: Any, batch: int = 1, seed: int = 0) -> None:
        configs = [Store.Config(heads=HEADS, dim=DIM, policy=policy).complete() for policy in policies]
        self.cache = Cache(configs, batch=batch, length=10**6, dtype=torch.float32)
        self.make = torch.Generator().manual_seed(seed)
        self.batch, self.length, self.layers = batch, 0, len(policies)
        self.k = torch.empty(len(policies), batch, HEADS, 0, DIM)
        self.v = torch.empty(len(policies), batch, HEADS, 0, DIM)
        self.seen: list[Tensor] = []

    def step(self, count: int, *, probe: bool = False, q: Tensor | None = None) -> list[Tensor]:
        positions = torch.arange(self.length, self.length + count).expand(self.batch, -1)
        context = Context(positions, cache=self.cache, probe=probe)
        k, v = torch.randn(2, self.layers, self.batch, HEADS, count, DIM, generator=self.make)
        q = torch.randn(self.batch, HEADS * GROUP, count, DIM, generator=self.make) if q is None else q
        out = []
        for layer in range(self.layers):
            view = context.append(layer, k[layer], v[layer], rotate)
            mask = visible(positions, view, None)
            if view.watch is not None:
                view.watch(q, mask, 1.0, None)
            out.append(attend(q, view.k, view.v, mask, scale=1.0))
            self.seen = [q, view.k, mask]
        if not probe:
            self.k, self.v = torch.cat([self.k, k], dim=3), torch.cat([self.v, v], dim=3)
            self.length += count
        return out

    def evict(self, budgets: dict[int, int] | None = None) -> None:
        self.length = int(self.cache.evict(budgets)[0])

    def held(self, layer: int, head: int, row: int = 0) -> list[int]:
        """Which tokens, by number, a head holds: known by their values."""
        store = self.cache.stores[layer]
        count = int((store.slots.positions[row, head, :-1] >= 0).sum())
        values = store.slots.shown(store.parts["v"]["x"], max(count, 1))[row, head, :count]
        return [int((self.v[layer, row, head] - value).abs().sum(-1).argmin()) for value in values]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(4, 9),
    st.booleans(),
    st.integers(0, 10**6),
    st.sampled_from([1, 2]),
)
def test_what_is_kept_is_in_order_packed_and_never_too_much(
    sinks: int, block: int, budget: int, flat: bool, seed: int, batch: int
) -> None:
    policy = KeyDiff.Config(budget=budget, block=block, sinks=sinks, heads="flat" if flat else "uniform")
    talk = Talk(policy, policy, batch=batch, seed=seed)
    dice = torch.Generator().manual_seed(seed)
    for _ in range(8):
        talk.step(int(torch.randint(1, block + 1, (1,), generator=dice)))
        assert talk.cache.used <= talk.cache.peak <= budget + block
        for layer, store in talk.cache.stores.items():
            total = 0
            for head in range(HEADS):
                tokens = talk.held(layer, head)
                positions = store.slots.positions[0, head, : len(tokens)].tolist()
                assert positions == list(range(talk.length - len(tokens), talk.length))
                assert tokens == sorted(set(tokens))
                assert tokens[:sinks] == list(range(min(sinks, talk.k.shape[3])))
                total += len(tokens)
                assert flat or len(tokens) <= budget + block
            assert total <= HEADS * (budget + block)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([KeyDiff, Recent, Snap, Probe]))
def test_attention_is_over_what_is_held_at_its_new_places(seed: int, flat: bool, kind: Any) -> None:
    heads = "flat" if flat else "uniform"
    talk = Talk(kind.Config(budget=6, block=5, sinks=1, heads=heads), seed=seed)
    talk.step(5)
    for _ in range(3):
        talk.step(4)
        talk.step(3, probe=True)
        talk.evict()
        q = torch.randn(1, HEADS * GROUP, 1, DIM, generator=talk.make)
        (got,) = talk.step(1, q=q)
        for head in range(HEADS):
            tokens = talk.held(0, head)
            places = torch.arange(talk.length - len(tokens), talk.length)
            k, v = rotate(talk.k[0, 0, head, tokens], places), talk.v[0, 0, head, tokens]
            for query in range(head * GROUP, (head + 1) * GROUP):
                want = (q[0, query, 0] @ k.T).softmax(-1) @ v
                torch.testing.assert_close(got[0, query, 0], want, atol=1e-5, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.booleans())
def test_the_best_are_the_best(seed: int, budget: int, flat: bool) -> None:
    scores = torch.randint(0, 5, (2, HEADS, 7), generator=torch.Generator().manual_seed(seed)).float()
    chosen = best(scores, budget, flat=flat)
    groups = chosen.flatten(1)[:, None] if flat else chosen
    worth = scores.flatten(1)[:, None] if flat else scores
    want = min(budget * (HEADS if flat else 1), worth.shape[2])
    for row in range(2):
        for one, value in zip(groups[row], worth[row], strict=True):
            assert int(one.sum()) == want
            assert want == len(value) or value[one].min() >= value[~one].max()
    equal = best(torch.zeros(1, HEADS, 7), 3, flat=flat)  # of equal ones the newest, and all heads alike
    assert equal.nonzero()[:, 2].tolist() == [4, 5, 6] * HEADS


def test_recent_keeps_the_first_and_the_last() -> None:
    talk = Talk(Recent.Config(budget=5, block=3, sinks=2))
    for _ in range(20):
        talk.step(1)
    tokens = talk.held(0, 0)
    assert tokens[:2] == [0, 1] and tokens[2:] == list(range(20 - len(tokens) + 2, 20)) and len(tokens) >= 5


def test_unlike_keys_are_kept() -> None:
    talk = Talk(KeyDiff.Config(budget=3, block=8, sinks=0))
    talk.step(8)
    store = talk.cache.stores[0]
    keys = torch.ones(1, HEADS, 8, DIM) + 0.01 * torch.randn(1, HEADS, 8, DIM, generator=talk.make)
    keys[0, 0, [1, 4, 6]] *= -1
    keys[0, 1, [0, 2, 7]] *= -1
    store.parts["k"]["x"][:, :, :8] = keys
    store.rotate = None
    talk.evict()
    assert talk.held(0, 0) == [1, 4, 6] and talk.held(0, 1) == [0, 2, 7]


def test_a_probe_scores_by_the_largest_share_and_leaves_nothing() -> None:
    talk = Talk(Probe.Config(budget=4, block=6, sinks=1))
    talk.step(9)
    store = talk.cache.stores[0]
    before = {role: part["x"].clone() for role, part in store.parts.items()}
    found = torch.zeros(HEADS, 9)
    for _ in range(2):  # several probes: the largest of all
        talk.step(5, probe=True)
        q, k, mask = talk.seen
        for head in range(HEADS * GROUP):
            shares = (q[0, head] @ k[0, head // GROUP].T).masked_fill(~mask[0, 0], float("-inf")).softmax(-1)
            assert shares[2, 9 + 3] == 0 < shares[2, 9 + 1]  # they see each other, in order
            found[head // GROUP] = torch.maximum(found[head // GROUP], shares[:, :9].amax(0))
    assert all(before[role].equal(part["x"]) for role, part in store.parts.items())
    torch.testing.assert_close(store.slots.scores[0], found)
    found[:, 0] = 2.0
    want = [sorted(one.topk(4).indices.tolist()) for one in found]
    talk.evict()
    assert [talk.held(0, head) for head in range(HEADS)] == want and talk.length == 4


def test_snap_looks_with_the_last_queries_however_they_came() -> None:
    kept = []
    for chunks in ([12], [7, 1, 1, 1, 1, 1], [9, 3]):
        talk = Talk(Snap.Config(budget=6, block=8, sinks=1, last=3, pool=1))
        make = torch.Generator().manual_seed(5)
        k, v, q = torch.randn(3, 12, HEADS * GROUP, DIM, generator=make)
        store, start = talk.cache, 0
        for count in chunks:
            here = slice(start, start + count)
            positions = torch.arange(start, start + count)[None]
            context = Context(positions, cache=store)
            view = context.append(0, *(x[here, :HEADS].transpose(0, 1)[None] for x in (k, v)), rotate)
            mask = visible(positions, view, None)
            view.watch(q[here].transpose(0, 1)[None], mask, 1.0, None)
            start += count
        talk.v = v[:, :HEADS].transpose(0, 1)[None, None]
        rotated = rotate(k[:, :HEADS].transpose(0, 1), torch.arange(12))
        talk.evict()
        kept.append([talk.held(0, head) for head in range(HEADS)])
        for head in range(HEADS):
            worth = torch.zeros(12)
            for query in range(head * GROUP, (head + 1) * GROUP):
                for place in (9, 10, 11):
                    worth[: place + 1] += (rotated[head, : place + 1] @ q[place, query]).softmax(-1)
            worth[[0, 10, 11]] = 9.0  # a sink and the newest two, half of what the sinks leave
            assert kept[-1][head] == sorted(worth.topk(6).indices.tolist())
    assert kept[0] == kept[1] == kept[2]


def test_layers_with_budgets_of_their_own_end_together() -> None:
    policy = Probe.Config(budget=6, block=4, sinks=1)
    talk = Talk(policy, policy)
    talk.step(10)
    talk.step(3, probe=True)
    talk.evict({0: 9, 1: 3})
    sizes = [store.slots.capacity for store in talk.cache.stores.values()]
    assert sizes == [13, 7] and talk.length == 9
    assert len(talk.held(0, 0)) == 9 and len(talk.held(1, 0)) == 3
    assert talk.cache.stores[1].slots.positions[0, 0, :3].tolist() == [6, 7, 8]
    assert talk.cache.nbytes == 4 * 2 * HEADS * DIM * (14 + 8)
    talk.step(4)
    with pytest.raises(UsageError):
        talk.step(1)
    assert talk.cache.used == 13


def test_a_flat_layer_lets_one_head_keep_more() -> None:
    talk = Talk(Probe.Config(budget=3, block=6, sinks=1, heads="flat"))
    talk.step(9)
    slots: Any = talk.cache.stores[0].slots
    slots.scores = torch.stack([torch.ones(9), torch.zeros(9)])[None]
    talk.evict()
    assert [len(talk.held(0, head)) for head in range(HEADS)] == [5, 1] and talk.cache.used == 3
    for _ in range(6):
        talk.step(1)
    assert talk.held(0, 0)[-6:] == talk.held(0, 1)[-6:] == list(range(9, 15)) and talk.cache.peak == 9
    with pytest.raises(UsageError):
        talk.step(1)


@pytest.mark.parametrize("kind", [KeyDiff, Recent, Probe, Snap])
def test_budgets_that_hold_nothing_are_refused_by_name(kind: Any) -> None:
    for wrong in ({"budget": 4, "sinks": 4}, {"budget": 8, "newest": 5}, {"block": 0}, {"sinks": -1}, {"heads": "all"}):
        with pytest.raises(ConfigError):
            kind.Config(**{"budget": 8, "block": 4, **wrong}).build()
    with pytest.raises(ConfigError, match=kind.__name__):
        kind.Config(budget=4, block=4, sinks=4).build()


def test_bad_requests_change_nothing() -> None:
    talk = Talk(Probe.Config(budget=4, block=4, sinks=1))
    talk.step(6)
    before = talk.held(0, 0)
    with pytest.raises(UsageError, match="nothing has looked"):
        talk.evict()
    with pytest.raises(UsageError, match="do not fit"):
        talk.step(3)
    talk.step(2, probe=True)
    with pytest.raises(ConfigError):
        talk.evict({0: 1})
    with pytest.raises(UnsupportedPair, match="Probe"):
        talk.cache.rewind(torch.tensor([2]))
    assert talk.held(0, 0) == before and talk.cache.used == 6
    plain = Talk(Store.Config(heads=1, dim=2).policy)
    plain.step(3)
    with pytest.raises(UnsupportedPair, match="KeepAll"):
        plain.evict()
