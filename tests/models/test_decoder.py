"""The decoder: scores, tying, dtypes, what a step may see, and the errors of an unfinished tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchard.cache.codecs import Int8
from orchard.cache.policies import Window
from orchard.core.config_text import diff
from orchard.core.context import Context
from orchard.core.errors import ConfigError, ContextOverflow, UnsupportedPair
from orchard.models.language import Decoder
from orchard.nn import formats
from orchard.nn.attention import Attention
from orchard.nn.linear import Embedding
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.stack import Block, Stack

VOCAB, DIM = 19, 16


def tree(**fields: Any) -> Any:
    mixer = Attention.Config(heads=4, kv_heads=2, head_dim=8)
    layers = [Block.Config(mixer=mixer, mlp=GatedMLP.Config(hidden_dim=24)) for _ in range(2)]
    return Decoder.Config(vocab=VOCAB, dim=DIM, context=64, stack=Stack.Config(layers=layers)).clone(**fields)


def built(cfg: Any) -> Decoder:
    torch.manual_seed(0)
    model: Decoder = cfg.build()
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.4)
    return model


IDS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_scores_are_the_norm_of_the_stack_times_the_head() -> None:
    model = built(tree(embedding=Embedding.Config(scale=3.0)))
    context = Context.whole(IDS)
    hidden = model.norm(model.stack(model.embedding.weight[IDS] * 3.0, Context.whole(IDS)))
    torch.testing.assert_close(model.hidden(IDS, context), hidden)
    torch.testing.assert_close(model(IDS), hidden @ model.head.weight.T)
    assert model(IDS).shape == (2, 9, VOCAB)


@torch.no_grad()
def test_a_tied_head_is_the_embedding_and_adds_no_tensor() -> None:
    tied, untied = built(tree(head=None)), built(tree())
    assert tied.head is None and untied.state_dict().keys() - tied.state_dict().keys() == {"head.weight"}
    hidden = tied.hidden(IDS, Context.whole(IDS))
    torch.testing.assert_close(tied(IDS), hidden @ tied.embedding.weight.T)


@torch.no_grad()
def test_a_softcap_bounds_the_scores() -> None:
    model, free = built(tree(softcap=0.7)), built(tree())
    torch.testing.assert_close(model(IDS), 0.7 * torch.tanh(free(IDS) / 0.7))
    assert model(IDS).abs().max() <= 0.7 < free(IDS).abs().max()


@torch.no_grad()
def test_nobody_sees_the_future() -> None:
    model = built(tree())
    want = model(IDS)
    changed = IDS.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB
    got = model(changed)
    torch.testing.assert_close(got[:, :5], want[:, :5], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(got[:, 5], want[:, 5], atol=1e-2)


@torch.no_grad()
def test_rotary_scores_do_not_depend_on_where_a_sequence_starts() -> None:
    model = built(tree())
    shifted = Context(torch.arange(30, 39).expand(2, 9))
    torch.testing.assert_close(model(IDS, shifted), model(IDS), atol=1e-4, rtol=1e-4)


def test_a_layer_window_hides_the_past() -> None:
    model = built(tree().rewrite(Attention, lambda node: node.clone(window=2)))
    x = model.embedding(IDS, torch.float32).detach().requires_grad_()
    model.norm(model.stack(x, Context.whole(IDS)))[:, -1].sum().backward()
    reach = x.grad.abs().sum((0, 2)) > 0  # two layers that each look one token back
    assert reach.tolist() == [False] * 6 + [True] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_in_every_part_of_a_step(dtype: torch.dtype) -> None:
    model = built(tree(head=None).rewrite(GatedMLP, lambda node: node.derive(MoE, experts=3))).to(dtype)
    assert model.dtype == dtype and model.device == torch.device("cpu")
    cache = model.cache(batch=2, length=9)
    steps = [model(IDS[:, t : t + 1], Context(torch.full((2, 1), t), cache=cache)) for t in range(9)]
    whole = model(IDS)
    assert whole.dtype == dtype and whole.isfinite().all()
    wide = model.float()(IDS)
    scale = wide.abs().max()
    assert (torch.cat(steps, dim=1).float() - wide).abs().mean() < 0.05 * scale
    assert (whole.float() - wide).abs().mean() < 0.05 * scale


def test_int8_stores_take_about_a_quarter_of_float32() -> None:
    plain = tree()
    small = plain.rewrite(Attention, lambda node: node.set("store.codec", Int8.Config()))
    sizes = [built(cfg).cache(batch=1, length=100).nbytes for cfg in (plain, small)]
    assert sizes[1] / sizes[0] == pytest.approx((8 + 4) / 32)  # eight codes and one scale against eight floats


def test_a_window_in_one_layer_saves_that_layers_slots_only() -> None:
    cfg = tree().set("stack.layers[1].mixer.store.policy", Window.Config(window=9))
    cache = built(cfg).cache(batch=1, length=99)
    assert cache.stores[1].nbytes * 10 == cache.stores[0].nbytes


def test_an_unfinished_tree_names_all_that_is_missing() -> None:
    cfg = tree().set("stack.layers[1].mixer", Attention.Config(heads=2)).set("stack.layers[0].mlp", GatedMLP.Config())
    with pytest.raises(ConfigError) as caught:
        cfg.complete()
    message = str(caught.value)
    for path in ("layers[1].mixer.kv_heads", "layers[1].mixer.head_dim", "layers[0].mlp.hidden_dim"):
        assert f"stack.{path}" in message
    assert "layers[0].mixer" not in message
    with pytest.raises(ConfigError, match=r"stack\.layers"):
        Decoder.Config(vocab=3, dim=4, context=5).build()


def test_what_is_missing_everywhere_is_told_once() -> None:
    with pytest.raises(ConfigError, match=r"stack\.layers\[0\.\.1\]\.mlp\.hidden_dim"):
        tree().rewrite(GatedMLP, lambda node: GatedMLP.Config()).complete()


def test_an_abstract_kind_finds_all_that_build_one() -> None:
    cfg = tree()
    packed = cfg.rewrite(formats.Format, lambda node: formats.Int8.Config())
    assert len(cfg.find(formats.Format)) == len(packed.find(formats.Int8)) > 10 and not packed.find(formats.Plain)


def test_stores_refuse_what_is_past_their_end() -> None:
    model = built(tree())
    with pytest.raises(ContextOverflow) as caught:
        model(IDS, Context(positions=torch.arange(9).expand(2, -1), cache=model.cache(batch=2, length=8)))
    assert (caught.value.tokens, caught.value.limit) == (9, 8)


def test_a_borrowed_store_needs_the_same_positions() -> None:
    cfg = tree().set("stack.layers[1].mixer.store.owner", 0)
    cfg.complete()
    with pytest.raises(UnsupportedPair, match="rotary"):
        cfg.set("stack.layers[1].mixer.rotary", None).complete()


def test_one_rewrite_puts_a_mixture_into_every_layer() -> None:
    base = tree()
    mixed = base.rewrite(GatedMLP, lambda node: node.derive(MoE, experts=4))
    before, after = "GatedMLP(hidden_dim=24, activation='silu')", "MoE(hidden_dim=24, experts=4, activation='silu')"
    assert [str(change) for change in diff(base, mixed)] == [f"stack.layers[0..1].mlp: {before} → {after}"]
    context = Context.whole(IDS)
    assert built(mixed)(IDS, context).shape == (2, 9, VOCAB) and len(context.collected["moe.balance"]) == 2


def test_a_context_for_padded_sequences_counts_only_real_tokens() -> None:
    valid = torch.tensor([[False, True, True], [True, True, False]])
    assert Context.whole(valid.long(), valid).positions.tolist() == [[-1, 0, 1], [0, 1, -1]]
    assert Context.whole(valid.long()).positions.tolist() == [[0, 1, 2]] * 2
