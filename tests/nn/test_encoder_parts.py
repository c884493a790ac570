"""The parts of encoders: norms, attention that looks both ways, blocks that normalise sums, pooling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.config import Config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.attention.bidirectional import BidirectionalAttention
from orchard.nn.feed_forward import FeedForward
from orchard.nn.layer_norm import LayerNorm
from orchard.nn.pooling import Pooling
from orchard.nn.post_norm import PostNormBlock

DIM = 16


def filled(cfg: Any) -> Any:
    torch.manual_seed(0)
    module = cfg.build()
    for value in module.parameters():
        torch.nn.init.normal_(value, std=0.5)
    return module.requires_grad_(False)


def block() -> Any:
    mixer = BidirectionalAttention.Config(heads=4)
    return filled(PostNormBlock.Config(dim=DIM, layer=0, mixer=mixer, mlp=FeedForward.Config(hidden_dim=24)))


@given(seed=st.integers(0, 2**16), scale=st.floats(0.01, 1000), shift=st.floats(-100, 100))
def test_a_layer_norm_forgets_scale_and_shift(seed: int, scale: float, shift: float) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    norm = LayerNorm.Config(dim=64, eps=0.0).build()
    assert torch.allclose(norm(x * scale + shift), norm(x), atol=max(1e-4, 1e-4 * abs(shift) / scale))


def test_a_layer_norm_is_computed_in_float32() -> None:
    norm = filled(LayerNorm.Config(dim=DIM)).to(torch.bfloat16)
    x = torch.randn(2, DIM).to(torch.bfloat16)
    wide = torch.nn.functional.layer_norm(x.float(), (DIM,), norm.weight.float(), norm.bias.float(), 1e-12)
    assert norm(x).dtype == torch.bfloat16 and torch.equal(norm(x), wide.to(torch.bfloat16))


def test_every_token_sees_every_other_and_no_padding() -> None:
    layer = filled(BidirectionalAttention.Config(dim=DIM, layer=0, heads=4))
    x = torch.randn(1, 5, DIM)
    ids = torch.zeros(1, 5, dtype=torch.long)
    plain = layer(x, Context.whole(ids))
    other = x.clone()
    other[0, 4] += 1
    assert (layer(other, Context.whole(ids))[0, 0] - plain[0, 0]).abs().max() > 1e-3
    valid = torch.tensor([[True, True, True, True, False]])
    padded = layer(other, Context.whole(ids, valid))[0, :4]
    assert torch.allclose(padded, layer(x[:, :4], Context.whole(ids[:, :4]))[0], atol=1e-6)
    assert torch.isfinite(layer(other, Context.whole(ids, valid))).all()


def test_a_width_that_has_no_equal_heads() -> None:
    with pytest.raises(ConfigError, match="16 has no 3 equal heads"):
        BidirectionalAttention.Config(dim=DIM, layer=0, heads=3).build()


def test_a_block_normalises_the_sum() -> None:
    module = block()
    x = torch.randn(2, 3, DIM)
    context = Context.whole(torch.zeros(2, 3, dtype=torch.long))
    once = module.mixer_norm(x + module.mixer(x, context))
    assert torch.equal(module(x, context), module.mlp_norm(once + module.mlp(once, context)))
    assert Config.from_dict(module.config.to_dict()) == module.config


@pytest.mark.parametrize(("how", "expected"), [("mean", [3.0, 4.0]), ("first", [1.0, 8.0]), ("max", [5.0, 8.0])])
def test_pooling_leaves_padding_out_and_gives_length_one(how: Any, expected: list[float]) -> None:
    hidden = torch.tensor([[[1.0, 8.0], [5.0, 0.0], [100.0, -100.0]]])
    found = Pooling.Config(how=how).build()(hidden.to(torch.bfloat16), torch.tensor([[True, True, False]]))
    wanted = torch.tensor([expected])
    assert found.dtype == torch.float32 and torch.allclose(found, wanted / wanted.norm())


def test_an_unknown_pooling() -> None:
    with pytest.raises(ConfigError, match="no pooling called 'last'"):
        Pooling.Config(how="last").build()  # type: ignore[arg-type]
