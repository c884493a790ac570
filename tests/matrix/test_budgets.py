"""Every policy with a budget × codec × owner, while tokens are forgotten: attention is over just what is held, coded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.cache.codecs import Codec
from orchard.cache.policies import HeadSlots, Scored
from orchard.cache.store import Cache, Store
from orchard.core.context import Context
from orchard.ops.attention import attend, visible
from tests.matrix import axes
from tests.matrix.test_stores import ALL_CODECS, DIM, HEADS, QUERY_HEADS, SCALE

POLICIES: dict[str, Any] = {name: cfg for name, cfg in axes.policies().items() if issubclass(cfg.builds, Scored)}
ANGLES = torch.tensor([1.0, 0.3])
BLOCKS = (5, 3, 1, 1, 5, 2, 5)
BUDGET, BLOCK = 6, 5


def rotate(keys: Tensor, positions: Tensor) -> Tensor:
    angles = positions[..., None].float() * ANGLES
    a, b = keys.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def coded(codec: Codec, x: Tensor, role: Any) -> Tensor:
    return codec.decode(codec.encode(x, role), role, torch.float32)


@pytest.mark.parametrize("codec", ALL_CODECS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_budget_with_every_codec_and_owner(policy: str, codec: str) -> None:
    own = POLICIES[policy].clone(budget=BUDGET, block=BLOCK, sinks=1)
    for owner in axes.OWNERS:
        first = Store.Config(heads=HEADS, dim=DIM, codec=ALL_CODECS[codec].clone(), policy=own)
        stores = [first, first.clone(owner=0 if owner == "another" else None)]
        cache = Cache([cfg.complete() for cfg in stores], batch=1, length=1 << 40, dtype=torch.float32)
        make, length, said = torch.Generator().manual_seed(1), 0, torch.empty(2, 2, 1, HEADS, 0, DIM)
        for count in BLOCKS:
            if not own.builds.by_itself and cache.used + count > BUDGET + BLOCK:
                length = int(cache.evict()[0])
            for probe in (False, True):
                positions = torch.arange(length, length + count)[None]
                context = Context(positions, cache=cache, probe=probe)
                new = torch.randn(2, 2, 1, HEADS, count, DIM, generator=make)  # keys and values of two layers
                said = said if probe else torch.cat([said, new], dim=4)
                q = torch.randn(1, QUERY_HEADS, count, DIM, generator=make)
                for layer, cfg in enumerate(stores):
                    source = layer if cfg.owner is None else cfg.owner
                    view = context.views[source] if source != layer else context.append(layer, *new[:, layer], rotate)
                    mask = visible(positions, view, None)
                    if view.watch is not None:
                        view.watch(q, mask, SCALE, None)
                    got = attend(q, view.k, view.v, mask, scale=SCALE)[0, :, -1]
                    if not probe:
                        check(cache.stores[source], said[:, source, 0], q[0, :, -1], got)
                length += 0 if probe else count
            assert cache.used <= cache.peak <= BUDGET + BLOCK


def check(store: Store, said: Tensor, q: Tensor, got: Tensor) -> None:
    """The newest token's attention, from all tokens that were ever said [2, H, N, D] and the numbers of those that are held."""
    slots = store.slots
    assert isinstance(slots, HeadSlots)
    k, v = coded(store.codec, said[0][None], "k")[0], coded(store.codec, said[1][None], "v")[0]
    upto = slots.reach(None)
    values = store.codec.decode(
        {name: slots.shown(x, upto) for name, x in store.parts["v"].items()}, "v", torch.float32
    )
    for head in range(HEADS):
        places = slots.positions[0, head, :upto]
        places = places[places >= 0]
        tokens = [int((v[head] - one).abs().sum(-1).argmin()) for one in values[0, head, : len(places)]]
        assert tokens == sorted(set(tokens)) and tokens[0] == 0 and tokens[-1] == said.shape[2] - 1
        keys = rotate(k[head, tokens], places)
        group = QUERY_HEADS // HEADS
        for query in range(head * group, (head + 1) * group):
            want = (SCALE * (q[query] @ keys.T)).softmax(-1) @ v[head, tokens]
            torch.testing.assert_close(got[query], want, atol=1e-5, rtol=1e-5)
