"""Attention with every variation against loops over tokens, heads and channels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.cache.store import Store
from orchard.core.context import Context, KVView, Rotate
from orchard.core.errors import ConfigError
from orchard.nn.attention import Attention, RAttention, Rotary
from orchard.nn.norm import RMSNorm
from tests.matrix import axes

DIM, TOKENS = axes.DIM, 6
MIXERS: dict[str, Any] = {name: cfg for name, cfg in axes.mixers().items() if cfg.builds is Attention}


def built(cfg: Any) -> Attention:
    torch.manual_seed(0)
    module = cfg.clone(dim=DIM, layer=0).build()
    for value in module.parameters():
        torch.nn.init.normal_(value, std=0.5)
    return module.double()


def naive(module: Attention, x: Tensor) -> Tensor:
    """One sequence [T, dim] that starts at 0, in float64."""
    cfg = module.config
    q = [_heads(module.q, module.q_norm, cfg, row, cfg.heads) for row in x]
    k = [_heads(module.k, module.k_norm, cfg, row, cfg.kv_heads) for row in x]
    v = [_heads(module.v, None, cfg, row, cfg.kv_heads) for row in x]
    scale = cfg.scale if cfg.scale is not None else 1 / math.sqrt(cfg.head_dim)
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(cfg.heads):
            group = h // (cfg.heads // cfg.kv_heads)
            first = 0 if cfg.window is None else max(0, t - cfg.window + 1)
            scores = []
            for s in range(first, t + 1):
                score = scale * _turn(module, q[t][h], t) @ _turn(module, k[s][group], s)
                scores.append(score if cfg.softcap is None else cfg.softcap * torch.tanh(score / cfg.softcap))
            weights = [math.exp(score) for score in scores]
            y = sum(w * v[first + i][group] for i, w in enumerate(weights)) / sum(weights)
            heads.append(_with_far(module, y, h, q[t][h], [one[group] for one in k[:first]], [one[group] for one in v]))
        rows.append(module.o.weight @ torch.cat(heads))
    return torch.stack(rows)


def _with_far(module: Attention, near: Tensor, head: int, q: Tensor, k: list[Tensor], v: list[Tensor]) -> Tensor:
    """RATTENTION: what lies before the window, by features of unrotated queries and keys; both halves normalised."""
    if not isinstance(module, RAttention):
        return near
    far = torch.zeros_like(near)
    for one, value in zip(k, v):
        far += sum((sign * q).softmax(0) @ (sign * one).softmax(0) for sign in (1, -1)) * value
    halves = []
    for norm, y in ((module.near_norm, near), (module.far_norm, far)):
        gains = norm.weight[head * len(y) : (head + 1) * len(y)]
        halves.append(y / math.sqrt(float(y @ y) / len(y) + norm.config.eps) * gains)
    return halves[0] + halves[1]


def _heads(linear: Any, norm: RMSNorm | None, cfg: Any, row: Tensor, heads: int) -> list[Tensor]:
    y = linear.weight @ row
    if linear.bias is not None:
        y = y + linear.bias
    if norm is not None and cfg.norm_over == "all":
        y = _rms(norm, y)
    if cfg.clip is not None:
        y = torch.tensor([min(max(float(value), -cfg.clip), cfg.clip) for value in y], dtype=y.dtype)
    split = [y[h * cfg.head_dim : (h + 1) * cfg.head_dim] for h in range(heads)]
    return [_rms(norm, one) for one in split] if norm is not None and cfg.norm_over == "head" else split


def _rms(norm: RMSNorm, y: Tensor) -> Tensor:
    return y / math.sqrt(float(y @ y) / len(y) + norm.config.eps) * norm.weight


def _turn(module: Attention, y: Tensor, position: int) -> Tensor:
    if module.rotary is None:
        return y
    frequencies, gain = module.rotary.frequencies(y.device), getattr(module.rotary.scaling, "gain", 1.0)
    half, out = len(frequencies), y.clone()
    for i, f in enumerate(frequencies.tolist()):
        a, b, angle = y[i], y[i + half], position * f
        out[i] = gain * (a * math.cos(angle) - b * math.sin(angle))
        out[i + half] = gain * (b * math.cos(angle) + a * math.sin(angle))
    return out


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_every_variation_equals_loops(name: str) -> None:
    module = built(MIXERS[name])
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    y = module(x, Context.whole(x[..., 0]))
    want = torch.stack([naive(module, row) for row in x])
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)  # norms and angles are computed in float32


@pytest.mark.parametrize("name", sorted(MIXERS.keys() - {"Attention.attention", "one_group", "one_kv_head"}))
def test_every_variation_makes_a_difference(name: str) -> None:
    """A field that is read nowhere would pass the comparison above if the loops forgot it too."""
    plain = axes.mixers()["Attention.attention"].clone(rotary=Rotary.Config(theta=100.0))
    one, other = built(MIXERS[name]), built(plain)
    other.load_state_dict(one.state_dict(), strict=False)
    x = torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    assert not torch.allclose(one(x, Context.whole(x[..., 0])), other(x, Context.whole(x[..., 0])), atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "4 heads cannot share 3"),
        ({"kv_heads": 0}, "cannot share 0"),
        ({"window": 0}, "window of 0"),
        ({"norm_over": "heads"}, "norm_over"),
    ],
)
def test_impossible_shapes_are_refused_before_building(fields: dict[str, Any], message: str) -> None:
    cfg = axes.mixers()["Attention.attention"].clone(dim=DIM, layer=0, **fields)
    with pytest.raises(ConfigError, match=message) as caught:
        cfg.complete()
    assert caught.value.hint


def test_all_missing_dimensions_are_named() -> None:
    with pytest.raises(ConfigError, match="dim, layer, heads, kv_heads, head_dim"):
        Attention.Config().complete()


def test_a_borrowing_layer_has_no_keys_values_or_key_norm() -> None:
    cfg = MIXERS["norm_head"].clone(dim=DIM, layer=1, store=Store.Config(owner=0))
    module = cfg.build()
    assert module.k is None and module.v is None and module.k_norm is None and module.q_norm is not None
    assert {key.split(".")[0] for key in module.state_dict()} == {"q", "o", "q_norm"}


class Unkeyed:
    """A cache whose views share nothing and say so: each call shows one slot fewer."""

    def __init__(self) -> None:
        self.calls = 0

    def append(self, layer: int, k: Tensor, v: Tensor, context: Context, rotate: Rotate | None) -> KVView:
        self.calls += 1
        valid = (context.places >= 0) & (context.places > self.calls - 2)
        return KVView(k=k, v=v, positions=context.places, valid=valid)


@torch.no_grad()
def test_views_without_a_key_get_masks_of_their_own() -> None:
    module = built(MIXERS["nope"])
    x = torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    context = Context.whole(x[..., 0])
    context.cache = Unkeyed()
    first, second = module(x, context), module(x, context)
    assert not torch.allclose(first[:, -1], second[:, -1])


@torch.no_grad()
def test_views_with_one_key_share_one_mask() -> None:
    module = built(MIXERS["Attention.attention"])
    x = torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    context = Context.whole(x[..., 0])
    module(x, context)
    size = len(context.memo)
    module(x, context)
    assert len(context.memo) == size
