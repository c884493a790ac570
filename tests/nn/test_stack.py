"""Blocks and stacks: where norms stand, layer numbers, and who may read whose store."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchard.cache.store import Cache, Store
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack

DIM = 8


def attention(owner: int | None = None, **fields: Any) -> Any:
    base = Attention.Config(heads=2, kv_heads=1, head_dim=4, store=Store.Config(owner=owner))
    return base.clone(**fields)


def block(mixer: Any = None, **fields: Any) -> Any:
    return Block.Config(mixer=mixer or attention(), mlp=GatedMLP.Config(hidden_dim=8), **fields)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
@torch.no_grad()
def test_a_block_is_two_residual_steps_with_norms_where_asked(before: bool, after: bool) -> None:
    torch.manual_seed(0)
    first, second = (RMSNorm.Config() if flag else None for flag in (before, after))
    module = block(mixer_norm=first, mlp_norm=first, mixer_out_norm=second, mlp_out_norm=second)
    module = module.clone(dim=DIM, layer=0).build()
    for value in module.parameters():
        torch.nn.init.normal_(value, std=0.5)
    x = torch.randn(1, 4, DIM)
    context = Context.whole(x[..., 0])
    same = torch.nn.Identity()
    mid = x + (module.mixer_out_norm if after else same)(
        module.mixer((module.mixer_norm if before else same)(x), context)
    )
    want = mid + (module.mlp_out_norm if after else same)(
        module.mlp((module.mlp_norm if before else same)(mid), context)
    )
    torch.testing.assert_close(module(x, context), want)
    assert len([key for key in module.state_dict() if "norm" in key]) == 2 * (before + after)


def test_a_stack_numbers_its_layers_and_gives_them_its_width() -> None:
    cfg = Stack.Config(dim=DIM, layers=[block() for _ in range(3)]).complete()
    assert [layer.layer for layer in cfg.layers] == [layer.mixer.layer for layer in cfg.layers] == [0, 1, 2]
    assert {layer.mlp.gate.in_dim for layer in cfg.layers} == {DIM} and cfg.layers[1].mixer.store.dim == 4


class Swap(Configurable, torch.nn.Module):
    """A mixer and an MLP that are nobody's: sockets take anything with a width that is called as (x, context)."""

    @config
    class Config(BaseConfig):
        dim: int = 0
        layer: int = 0

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return x.flip(-1) * (self.config.layer + 1)


def test_sockets_take_other_parts() -> None:
    one = Block.Config(mixer=Swap.Config(), mlp=Swap.Config(), mixer_norm=None, mlp_norm=None)
    module = Stack.Config(dim=2, layers=[one, one]).build()
    x = torch.tensor([[[1.0, 2.0]]])
    first = x + x.flip(-1)
    first = first + first.flip(-1)
    second = first + first.flip(-1) * 2
    assert module(x, Context.whole(x[..., 0])).equal(second + second.flip(-1))  # an MLP is told no layer number


@pytest.mark.parametrize(
    ("mixers", "error", "message"),
    [
        ([attention(), attention(owner=1)], ConfigError, "layer 1 cannot read the store of layer 1"),
        ([attention(owner=1), attention()], ConfigError, "layer 0 cannot read the store of layer 1"),
        ([attention(), attention(owner=-1)], ConfigError, "layer 1 cannot read the store of layer -1"),
        ([attention(), attention(owner=0), attention(owner=1)], UnsupportedPair, "layer 2 reads layer 1"),
        ([Swap.Config(), attention(owner=0)], UnsupportedPair, "layer 1 reads layer 0"),
        ([attention(), attention(owner=0, kv_heads=2)], UnsupportedPair, "layers 1 and 0 have different"),
        ([attention(), attention(owner=0, head_dim=8)], UnsupportedPair, "layers 1 and 0 have different"),
    ],
)
def test_impossible_owners_are_refused_by_name(mixers: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        Stack.Config(dim=DIM, layers=[block(mixer) for mixer in mixers]).complete()
    assert caught.value.hint  # type: ignore[attr-defined]


@torch.no_grad()
def test_a_borrowed_store_shows_the_owners_keys() -> None:
    """With the owner's query and output weights, a borrower computes from the owner's keys and not from its own input."""
    torch.manual_seed(0)
    stack: Stack = Stack.Config(dim=DIM, layers=[block(), block(attention(owner=0))]).build()
    lender, borrower = stack.layers[0].mixer, stack.layers[1].mixer
    borrower.load_state_dict(lender.state_dict(), strict=False)
    x, other = torch.randn(2, 1, 5, DIM)
    for cache in (None, Cache([layer.mixer.store for layer in stack.config.layers], batch=1, length=5, dtype=x.dtype)):
        context = Context(torch.arange(5)[None], cache=cache)
        y = lender(x, context)
        assert borrower(x, context).equal(y)
        assert not borrower(other, context).equal(y)  # its queries are still its own
        assert set(context.views) == {0}


def test_a_store_that_is_borrowed_is_not_built() -> None:
    configs = [attention(dim=DIM, layer=i, owner=owner).complete().store for i, owner in enumerate((None, 0))]
    cache = Cache(configs, batch=1, length=4, dtype=torch.float32)
    assert set(cache.stores) == {0}
    with pytest.raises(ConfigError, match="reads the store of layer 0"):
        configs[1].build(slots=cache.stores[0].slots, dtype=torch.float32)
