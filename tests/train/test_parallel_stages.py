"""Where a model is cut into stages, in which order they work, and what cannot be cut."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.cache.store import Store
from orchard.core.batch import Batch, GroupBatch, PairBatch
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair, UsageError
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.objectives.lm import NextToken
from orchard.train.parallel import Mesh
from orchard.train.parallel_line import Arrived, Line
from orchard.train.parallel_pipeline import Pipeline, _Flow, _Shown, batches_of, order
from orchard.train.parallel_stages import _balanced, keep_stage, layers_kept, plan_stages
from orchard.train.world import World
from orchard.transforms.lora import Lora, freeze_base
from tests.train.parallel_program import batches, build


def largest(sizes: list[int], cuts: tuple[int, ...], end: int) -> int:
    edges = [0, *cuts, len(sizes)]
    sums = [sum(sizes[start:stop]) for start, stop in pairwise(edges)]
    return max([*sums[:-1], sums[-1] + end])


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(0, 20),
    st.sets(st.integers(1, 6)),
)
def test_cuts_are_the_best_there_are(sizes: list[int], count: int, end: int, together: set[int]) -> None:
    allowed = [cut for cut in range(1, len(sizes)) if cut not in together]
    every = list(combinations(allowed, count - 1))
    found = _balanced(sizes, count, end=end, together=together)
    if not every:
        assert found is None
    else:
        assert found is not None and tuple(found) in every
        assert largest(sizes, tuple(found), end) == min(largest(sizes, cuts, end) for cuts in every)


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 5), st.integers(1, 7))
def test_no_stage_waits_for_one_that_waits_for_it(schedule: str, stages: int, count: int) -> None:
    """Stages work in any interleaving until all is done; each micro-batch goes down and comes back once, in order."""
    work = [list(order(schedule, stage, stages, count)) for stage in range(stages)]
    down, up, most = [0] * stages, [0] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while work[stage]:
                forward, number = work[stage][0]
                if forward and stage and down[stage - 1] <= number:
                    break
                if not forward and stage < stages - 1 and up[stage + 1] <= number:
                    break
                done = down if forward else up
                assert done[stage] == number
                done[stage] += 1
                most[stage] = max(most[stage], down[stage] - up[stage])
                work[stage].pop(0)
                moved = True
    assert down == up == [count] * stages
    if schedule == "1f1b":
        assert most == [min(count, stages - stage) for stage in range(stages)]
    assert most[-1] == 1


def test_a_head_counts_as_much_as_it_weighs() -> None:
    block = Block.Config(mixer=Attention.Config(heads=2, kv_heads=2, head_dim=8), mlp=GatedMLP.Config(hidden_dim=32))
    tree = Decoder.Config(vocab=500, dim=16, context=8, stack=Stack.Config(layers=[block.clone() for _ in range(6)]))
    assert [len(stage) for stage in plan_stages(tree.build(), 2)] == [5, 1]  # a head of 8000 numbers, layers of 2592
    tree.head = None
    assert [len(stage) for stage in plan_stages(tree.build(), 2)] == [5, 1]
    tree.vocab = 20
    assert [len(stage) for stage in plan_stages(tree.build(), 3)] == [2, 2, 2]
    assert plan_stages(tree.build(), 3, [1, 3]) == [range(1), range(1, 3), range(3, 6)]


@pytest.mark.parametrize("kind", ["", "tied", "lora"])
def test_stages_one_after_another_are_the_whole_model(kind: str) -> None:
    whole = build(kind, 4)
    ids = batches(1)[0].ids
    stages = plan_stages(whole, 3)
    x: Any = ids
    names: set[str] = set()
    for stage in range(3):
        part = build(kind, 4)
        keep_stage(part, stages, stage)
        assert layers_kept(part) == stages[stage] and part.dtype == torch.float32
        x = part.hidden(x, Context.whole(ids))
        names |= {name for name, _ in part.named_parameters()}
    assert layers_kept(whole) is None
    assert torch.equal(part.scores(x), whole(ids))
    assert names == {name for name, _ in whole.named_parameters()}


def test_a_stage_alone_says_that_it_is_one() -> None:
    ids = batches(1)[0].ids
    for kind in ("", "tied"):
        first, last = build(kind, 4), build(kind, 4)
        stages = plan_stages(first, 2)
        keep_stage(first, stages, 0)
        keep_stage(last, stages, 1)
        with pytest.raises(UnsupportedPair, match="token ids are read on the first one") as refused:
            last(ids)
        assert "Pipeline.loss" in refused.value.hint
    keep_stage(first := build("", 4), stages, 0)
    with pytest.raises(UnsupportedPair, match="scores are made on the last one"):
        first(ids)


def sharing(*owners: int | None) -> Decoder:
    """Layers of which some read the keys of another."""
    layers = []
    for owner in owners:
        mixer = Attention.Config(heads=2, kv_heads=2, head_dim=8)
        if owner is not None:
            mixer.store, mixer.k, mixer.v = Store.Config(owner=owner), None, None
        layers.append(Block.Config(mixer=mixer, mlp=GatedMLP.Config(hidden_dim=16)))
    tree = Decoder.Config(vocab=8, dim=16, context=8, stack=Stack.Config(layers=layers), head=Linear.Config())
    made: Decoder = tree.build()
    return made


def test_layers_that_share_keys_stay_together() -> None:
    assert plan_stages(sharing(None, 0, 0, None), 2) == [range(3), range(3, 4)]
    with pytest.raises(UnsupportedPair, match=r"before layer 2, and layer 2 reads the keys of layer 0"):
        plan_stages(sharing(None, 0, 0, None), 2, [2])
    with pytest.raises(UnsupportedPair, match=r"only 1 places to cut.*such as 1, of 0"):
        plan_stages(sharing(None, 0, 0, None), 3)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"mesh.pipeline is 5, and the model has 4 layers"):
        plan_stages(build("", 4), 5)
    for cuts in ([], [0], [4], [1, 2]):
        with pytest.raises(ConfigError, match=r"mesh.cuts is \["):
            plan_stages(build("", 4), 2, cuts)
    with pytest.raises(ConfigError, match=r"mesh.cuts is \[2, 1\]"):
        plan_stages(build("", 4), 3, [2, 1])
    with pytest.raises(UnsupportedPair, match=r"cuts decoders.*a Linear has no embedding"):
        plan_stages(torch.nn.Linear(2, 2), 2)
    shared = build("", 4)
    shared.head.weight = shared.embedding.weight  # type: ignore[union-attr]
    with pytest.raises(
        UnsupportedPair, match=r"embedding.weight and head.weight are the same tensor, which stages 0 and 1"
    ):
        plan_stages(shared, 2)
    with pytest.raises(UnsupportedPair, match=r"stage 0 of the pipeline \(layers 0 to 1\) has nothing that is trained"):
        plan_stages(build("only head", 4), 2, [2])
    adapted = Lora(r=2, alpha=2).attach(build("tied", 4))
    freeze_base(adapted)
    assert len(plan_stages(adapted, 4)) == 4


def test_meshes_with_stages_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"x pipeline 2 for 3 processes \(it would need 2\)"):
        Mesh.Config(pipeline=2).build(here=World(size=3))
    with pytest.raises(UnsupportedPair, match=r"mesh.pipeline 2 with mesh.expert 2"):
        Mesh.Config(pipeline=2, expert=2).build(here=World(size=4))
    with pytest.raises(ConfigError, match=r"mesh.schedule is 'zb'"):
        Mesh.Config(pipeline=2, schedule="zb").build(here=World(size=2))
    with pytest.raises(ConfigError, match=r"mesh.cuts is \[1\], and mesh.pipeline is 1"):
        Mesh.Config(cuts=[1]).build(here=World())
    mesh = Mesh.Config().build(here=World())
    assert (mesh.stage, mesh.stages) == (0, 1)
    with pytest.raises(UsageError, match="a pipeline of 1 stage"):
        Pipeline(build(), mesh)


def test_objectives_are_shown_the_tokens_of_their_batch_and_no_others() -> None:
    batch = batches(1)[0]
    rows = torch.zeros(4)
    assert next(batches_of(PairBatch(batch, batch.part(0, 4)))) is batch
    assert len(list(batches_of(PairBatch(batch, batch, (rows, rows))))) == 2
    assert [id(one) for one in batches_of(GroupBatch(batch, batch.ids, rows, rows))] == [id(batch)]
    with pytest.raises(ConfigError, match="a list is no batch"):
        list(batches_of([1]))
    model, last = build("", 4), build("", 4)
    stages = plan_stages(model, 2)
    keep_stage(first := build("", 4), stages, 0)
    keep_stage(last, stages, 1)
    flow = _Flow(batch)
    context = Context(positions=batch.positions, documents=batch.documents)
    flow.arrived.append(Arrived(first.hidden(batch.ids, context), None, {}))
    objective = NextToken.Config(chunk=8).build()
    assert torch.equal(objective(_Shown(last, flow), batch).value, objective(model, batch).value)
    other = Batch(batch.ids.clone(), batch.targets, batch.positions, batch.documents)
    with pytest.raises(UnsupportedPair, match="other tokens than its batch holds"):
        objective(_Shown(last, flow), other)


def test_what_layers_leave_has_to_be_single_numbers() -> None:
    line = Line.__new__(Line)  # nothing is sent
    with pytest.raises(UnsupportedPair, match=r"a layer left counts as a tensor of shape \[3\]"):
        line.send("kind", torch.zeros(1, 2, 4), {"balance": [torch.ones(())], "counts": [torch.ones(3)]})
