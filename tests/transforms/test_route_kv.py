"""Keys and values that are borrowed by chance: who is read and how often, what learns, what is repeated, what is left."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.core.config import REQUIRED, BaseConfig
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention import Attention, Rotary
from orchard.nn.attention.borrow import Borrow
from orchard.train.compiled import compiled
from orchard.train.parallel_stages import plan_stages
from orchard.train.recompute import Recompute, recompute
from orchard.transforms.retain import Retain
from orchard.transforms.route_kv import RouteKV, settled
from orchard.transforms.share_kv import ShareKV
from orchard.transforms.tracks import ParallelTracks
from tests.transforms.routing_models import IDS, built, owners, tree


def sources(cfg: Any) -> list[tuple[int, ...]]:
    return [node.borrow.layers if node.borrow is not None else () for _, node in cfg.find(Attention)]


def forced(model: Any, **reads: int) -> Any:
    """The model in training, in which only these layers (`l3=1`) borrow, and always from the same one."""
    made = copy.deepcopy(model).train()
    for layer, block in enumerate(made.stack.layers):
        source = reads.get(f"l{layer}")
        block.mixer.borrow = None if source is None else Borrow.Config(p_borrow=1.0, layers=(source,)).build()
    return made


def slopes(model: Any, seed: int = 3) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    model(IDS).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_every_layer_but_the_first_may_read_any_before_it() -> None:
    routed = RouteKV(0.6).tree(tree())
    assert sources(routed) == [(), (0,), (0, 1), (0, 1, 2)]
    assert {node.borrow.p_borrow for _, node in routed.find(Attention) if node.borrow is not None} == {0.6}
    assert BaseConfig.from_dict(routed.to_dict()) == routed
    assert settled(routed) == RouteKV()(routed) == tree().complete()
    assert sources(RouteKV().tree(ShareKV(last=1)(tree()))) == [(), (0,), (0, 1), ()], "the last has none of its own"
    assert sources(Retain(layers=(0, 2, 3))(routed)) == [(), (), (0,), (0, 2)], "who is not kept lends nothing"
    open_tree = tree().clone(vocab=REQUIRED)
    assert RouteKV().tree(open_tree).clone(vocab=40).complete() == RouteKV().tree(tree())
    near = Attention.Config(heads=4, kv_heads=2, head_dim=8, window=4, rotary=Rotary.Config(theta=100.0))
    gemma = tree(near, near.clone(window=None), near, near.clone(window=None))
    assert sources(RouteKV().tree(gemma)) == [(), (), (0,), (1,)], "only those that see as far"


def test_draws_are_as_likely_as_asked_and_one_for_a_whole_pass() -> None:
    borrow = Borrow.Config(p_borrow=0.6, layers=(0, 1, 4)).build()
    torch.manual_seed(0)
    seen = Counter(borrow.draw() for _ in range(6000))
    assert seen.keys() == {None, 0, 1, 4}
    assert seen[None] == pytest.approx(2400, abs=190) and all(abs(seen[one] - 1200) < 160 for one in (0, 1, 4))
    context, asked = Context.whole(IDS), iter([1, 0])
    context.views[1], context.views[0] = object(), object()  # type: ignore[assignment]
    assert context.lent(3, lambda: next(asked)) is context.lent(3, lambda: next(asked)) is context.views[1]
    assert context.lent(4, lambda: next(asked)) is context.views[0], "each layer draws for itself"


def test_a_layer_that_borrows_reads_what_the_retained_model_reads() -> None:
    """The same keys, with the norm and the rotation of the layer that made them."""
    model = built(tree())
    with torch.no_grad():
        borrowed = forced(model, l1=0, l3=2)(IDS)
        assert torch.allclose(borrowed, Retain(layers=(0, 2)).apply(model)(IDS), atol=1e-5)
        assert not torch.allclose(borrowed, model(IDS), atol=1e-2)


def test_off_when_it_does_not_learn() -> None:
    model = built(tree())
    made = RouteKV(1.0).apply(model)
    with torch.no_grad():
        assert torch.equal(made(IDS), model(IDS)) and not torch.equal(made.train()(IDS), model(IDS))
        places = torch.arange(11).expand(2, -1)
        cached = made(
            IDS, Context(places, cache=made.cache(batch=2, length=11))
        )  # as rollouts write, while a model learns
        assert torch.allclose(cached, model(IDS), atol=1e-5)
        torch.manual_seed(0)
        once, again = made(IDS), made(IDS)
        assert not torch.equal(once, again), "another draw in every pass"
        kept = RouteKV().finish(made)
        assert kept.config == model.config and torch.equal(kept.eval()(IDS), model(IDS))
    assert made.stack.layers[0].mixer.q.weight is not model.stack.layers[0].mixer.q.weight
    model.stack.layers[1].requires_grad_(False)
    assert not any(p.requires_grad for p in RouteKV().apply(model).stack.layers[1].parameters())


def test_gradients_flow_into_what_is_read_and_are_zero_where_nobody_reads() -> None:
    model = built(tree())
    own, routed = slopes(forced(model)), slopes(forced(model, l3=1))
    assert not torch.equal(own["stack.layers.1.mixer.k.weight"], routed["stack.layers.1.mixer.k.weight"])
    for part in ("k.weight", "v.weight", "k_norm.weight"):
        assert not routed[f"stack.layers.3.mixer.{part}"].any(), (
            "there, and zero: processes exchange the same gradients"
        )
        assert routed[f"stack.layers.1.mixer.{part}"].any()
    assert routed["stack.layers.3.mixer.q.weight"].any()
    chained = forced(model, l1=0, l2=1)  # nobody but layer 2 reads the keys of layer 1
    assert slopes(chained)["stack.layers.1.mixer.k.weight"].any()


def test_recomputed_and_compiled_blocks_read_what_they_read_before() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    plain = RouteKV(0.7).apply(built(tree(layers=3))).train()
    wanted = [slopes(plain, seed) for seed in range(2)]
    again = copy.deepcopy(plain)
    recompute(again, Recompute.Config(every=1))
    for seed, want in enumerate(wanted):
        found = slopes(again, seed)
        assert all(torch.equal(found[name], want[name]) for name in want)
    counter: Any = CompileCounterWithBackend("eager")
    report = compiled(plain, backend=counter)
    for seed, want in enumerate(wanted):
        found = slopes(plain, seed)
        assert all(torch.allclose(found[name], want[name], rtol=1e-3, atol=1e-3) for name in want)
    assert (report.blocks, report.reasons) == (3, {}) and counter.frame_count <= 3, (
        "with and without a lender, not by layer"
    )


def test_what_cannot_be_routed_is_said() -> None:
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="p_borrow is"):
            RouteKV(wrong)
    with pytest.raises(ConfigError, match="no layer of 1"):
        RouteKV().tree(tree(layers=1))
    with pytest.raises(UnsupportedPair, match="layer 0 is made of tracks"):
        RouteKV().tree(ParallelTracks(tracks=2, depth=2)(tree().set("stack.layers", list(_plain(4)))))
    plain = Attention.Config(heads=4, kv_heads=2, head_dim=8)
    for wrong_layers, message in (((1,), "cannot read the store of layer 1"), ((), "no layer to borrow from")):
        bad = tree(plain, plain.clone(borrow=Borrow.Config(layers=wrong_layers)))
        with pytest.raises(ConfigError, match=message):
            bad.complete()
    with pytest.raises(UnsupportedPair, match="different rotary"):
        tree(plain.clone(rotary=None), plain.clone(borrow=Borrow.Config(layers=(0,)))).complete()
    with pytest.raises(UnsupportedPair, match="only 0 places to cut"):
        plan_stages(RouteKV().apply(built(tree())), 2)
    assert owners(RouteKV().tree(tree())) == [None] * 4


def _plain(count: int) -> Any:
    return tree(*[Attention.Config(heads=4, kv_heads=2, head_dim=8)] * count).stack.layers
