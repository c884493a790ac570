"""RATTENTION in decoders: however tokens come in, it is the same function; its store never grows; what cannot be is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.cache.codecs import Int8
from orchard.cache.policies import KeepAll, Placement, Policy, Window
from orchard.cache.residue import Residue
from orchard.cache.store import Store
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.generate.lowering import lower
from orchard.models.language import Decoder
from orchard.nn.attention import Attention, RAttention
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack
from orchard.ops.plan.steps import Torch
from orchard.transforms.local_global import LocalGlobal
from orchard.transforms.share_kv import ShareKV
from orchard.transforms.tracks import ParallelTracks

WINDOW, LENGTH = 4, 20
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


def mixer(policy: Any = None, **fields: Any) -> Any:
    norms = {"q_norm": RMSNorm.Config(), "k_norm": RMSNorm.Config()}
    store = Store.Config(policy=policy or Window.Config(window=WINDOW))
    settings = {"heads": 4, "kv_heads": 2, "head_dim": 8, "window": WINDOW, "chunk": 3, "store": store, **norms}
    return RAttention.Config(**{**settings, **fields})


def tree(*mixers: Any) -> Decoder.Config:
    layers = [Block.Config(mixer=one, mlp=GatedMLP.Config(hidden_dim=32)) for one in mixers]
    return Decoder.Config(vocab=40, dim=32, context=64, stack=Stack.Config(layers=layers), head=None).complete()


def built(cfg: Any) -> Decoder:
    """Gains that differ, and weights large enough that a token too many or too few shows."""
    torch.manual_seed(0)
    model: Decoder = cfg.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def plain_tree(layers: int = 4) -> Decoder.Config:
    return tree(*(Attention.Config(heads=4, kv_heads=2, head_dim=8) for _ in range(layers)))


@torch.no_grad()
def in_steps(model: Decoder, ids: Tensor, positions: Tensor, cuts: list[int]) -> Tensor:
    """Scores of columns [B, T] that come in pieces of these sizes, the last of which is repeated."""
    cache, at, scores = model.cache(batch=len(ids), length=LENGTH), 0, []
    while at < ids.shape[1]:
        end = min(at + (cuts.pop(0) if len(cuts) > 1 else cuts[0]), ids.shape[1])
        scores.append(model(ids[:, at:end], Context(positions[:, at:end], cache=cache)))
        at = end
    return torch.cat(scores, 1)


POLICIES = (
    KeepAll.Config(),
    Window.Config(window=WINDOW),
    Window.Config(window=WINDOW + 3, sinks=2),
    Window.Config(window=99),
)


@functools.cache
def both_forms(policy: int) -> tuple[Decoder, Decoder]:
    chunked, pairs = (built(tree(*[mixer(POLICIES[policy], chunk=chunk)] * 2)) for chunk in (3, None))
    return chunked, pairs


@settings(max_examples=12, deadline=None)
@given(
    policy=st.sampled_from(range(len(POLICIES))),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    lengths=st.tuples(st.integers(1, LENGTH), st.integers(1, LENGTH)),
    left=st.booleans(),
)
@torch.no_grad()
def test_in_pieces_and_padded_as_every_pair_of_tokens(policy: int, cuts: list[int], lengths: Any, left: bool) -> None:
    """Recurrent steps and chunks with a store, rows of two lengths, against all pairs without one."""
    model, pairs = both_forms(policy)
    rows = [torch.randint(40, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    valid = torch.zeros(2, max(lengths), dtype=torch.bool)
    ids = torch.zeros(2, max(lengths), dtype=torch.long)
    for row, one in enumerate(rows):
        here = slice(max(lengths) - len(one), None) if left else slice(len(one))
        ids[row, here], valid[row, here] = one, True
    context = Context.whole(ids, valid)
    runs = (model(ids, context), in_steps(model, ids, context.positions, list(cuts)))
    for row, one in enumerate(rows):
        want = pairs(one[None])[0]
        for got in runs:
            torch.testing.assert_close(got[row][valid[row]], want, **CLOSE)


@torch.no_grad()
def test_packed_documents_are_read_as_if_alone() -> None:
    model = built(LocalGlobal(window=WINDOW, mixer="rattention")(plain_tree()))
    lengths = [7, 1, 9, 3]
    rows = [torch.randint(40, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), number) for number, n in enumerate(lengths)])[None]
    packed = model(torch.cat(rows)[None], Context(positions=places, documents=documents))[0]
    for got, one in zip(packed.split(lengths), rows, strict=True):
        torch.testing.assert_close(got, model(one[None])[0], **CLOSE)


@torch.no_grad()
def test_it_sees_what_a_window_alone_does_not() -> None:
    near = mixer().derive(Attention)
    ids = torch.randint(40, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 40
    for one, sees in ((near, False), (mixer(), True)):
        model = built(tree(one))
        assert bool((model(ids) - model(other))[0, -1].abs().max() > 1e-4) is sees


def test_bytes_do_not_depend_on_the_length() -> None:
    model = built(tree(mixer(), mixer()))
    sizes = {model.cache(batch=1, length=length).nbytes for length in (WINDOW, 64, 10_000)}
    slots = 2 * (WINDOW + 1) * 2 * 8 * 4  # keys and values, one slot for what nobody reads
    assert sizes == {2 * (slots + 2 * 16 * 8 * 4)}
    half = built(tree(mixer())).bfloat16().cache(batch=1, length=64).stores[0]
    assert half.residue is not None and half.residue.sum.dtype is torch.float32


@torch.no_grad()
def test_rows_are_kept_with_their_sums_and_int8_slots_give_nearly_the_same() -> None:
    model = built(tree(mixer(), mixer()))
    ids = torch.randint(40, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    places = torch.arange(LENGTH).expand(3, -1)
    want, cache = model(ids), model.cache(batch=3, length=LENGTH)
    model(ids[:, :15], Context(places[:, :15], cache=cache))
    cache.keep(torch.tensor([2, 0]))
    got = model(ids[[2, 0], 15:], Context(places[:2, 15:], cache=cache))
    torch.testing.assert_close(got, want[[2, 0], 15:], **CLOSE)
    coded = mixer()
    coded.store.codec = Int8.Config()
    rounded = in_steps(built(tree(coded, coded)), ids, places, [1])
    assert 0 < float((rounded - want).abs().max()) < 0.1 * float(want.abs().max())


@torch.no_grad()
def test_a_decode_step_compiles_whole_and_only_once() -> None:
    torch._dynamo.reset()
    model = built(tree(mixer()))
    ids = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(1))

    def step(cache: Any, ids: Tensor, positions: Tensor) -> Tensor:
        return model(ids, Context(positions, cache=cache, upto=WINDOW))

    fast = torch.compile(step, fullgraph=True, backend="eager", dynamic=False)
    plain, compiled = (model.cache(batch=2, length=12) for _ in range(2))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for p in range(8):
            here = (ids[:, p : p + 1], torch.full((2, 1), p))
            torch.testing.assert_close(fast(compiled, *here), step(plain, *here), **CLOSE)


# In stacks, and out of the native engine -----------------------------------------------------------------------------------


def test_local_layers_of_a_stack_are_of_it_and_survive_saving() -> None:
    made = LocalGlobal(window=6, mixer="rattention")(plain_tree())
    kinds = [type(block.mixer) for block in made.stack.layers]
    assert kinds == [RAttention.Config] * 3 + [Attention.Config]
    first = made.stack.layers[0].mixer
    assert (first.window, first.store.policy, first.store.residue) == (6, Window.Config(window=6), Residue.Config())
    assert BaseConfig.from_dict(made.to_dict()) == made
    model = built(plain_tree())
    healed = LocalGlobal(window=6, mixer="rattention").apply(model)
    mixed: Any = healed.stack.layers[1].mixer
    assert torch.equal(mixed.q.weight, model.stack.layers[1].mixer.q.weight)  # type: ignore[union-attr]
    assert torch.equal(mixed.far_norm.weight, torch.ones(32)) and mixed.far_norm.weight.requires_grad
    ParallelTracks(tracks=2, depth=2).apply(healed)(torch.zeros(1, 9, dtype=torch.long))


@torch.no_grad()
def test_layers_may_read_each_others_sums_and_nothing_else() -> None:
    model = built(ShareKV(last=1)(tree(mixer(), mixer(), mixer())))
    ids = torch.randint(40, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    places = torch.arange(LENGTH).expand(2, -1)
    for cuts in ([1], [7, 2, 5]):
        torch.testing.assert_close(in_steps(model, ids, places, cuts), model(ids), **CLOSE)
    for owner in (mixer().derive(Attention), mixer(window=3)):
        with pytest.raises(UnsupportedPair, match="keeps no such sum"):
            tree(owner, mixer(store=Store.Config(owner=0)))


def test_the_native_engine_leaves_it_to_torch_by_name() -> None:
    model = built(LocalGlobal(window=6, mixer="rattention")(plain_tree()))
    plan = lower(model, stores="f32")
    found = {step.node: step.reason for step in plan.steps if isinstance(step, Torch)}
    assert found == {f"stack.layers.{n}.mixer": "RAttention does not say how it lowers" for n in range(3)}
    with pytest.raises(UnsupportedPair, match="residue has no native form"):
        tree(mixer()).stack.layers[0].mixer.store.native()


class Forgets(Configurable, Policy):
    """A policy that does not tell what leaves."""

    @config
    class Config(BaseConfig):
        pass

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def capacity(self, length: int) -> int:
        return length

    def place(self, slots: Any, positions: Tensor, upto: int) -> Placement:
        raise NotImplementedError


def test_what_makes_no_sense_is_refused_by_name() -> None:
    for wrong, error, words in (
        (mixer(window=None), ConfigError, "without a window"),
        (mixer(window=0), ConfigError, "shows nothing"),
        (mixer(chunk=0), ConfigError, "pieces of 0"),
        (mixer(Window.Config(window=WINDOW - 1)), UnsupportedPair, "store of 3 tokens in a layer that sees 4"),
        (mixer(Forgets.Config()), UnsupportedPair, "Forgets does not tell what leaves"),
    ):
        with pytest.raises(error, match=words):
            tree(wrong)
    with pytest.raises(ConfigError, match="no mixer is called 'linear'"):
        LocalGlobal(window=4, mixer="linear")
    with pytest.raises(UnsupportedPair, match="RAttention"):
        LocalGlobal(window=4)(LocalGlobal(window=4, mixer="rattention")(plain_tree()))
    cache = built(tree(mixer())).cache(batch=1, length=8)
    with pytest.raises(UnsupportedPair, match="Window cannot go back"):
        cache.rewind(torch.tensor([1]))
