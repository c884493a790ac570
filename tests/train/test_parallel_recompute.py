"""Blocks that are computed again in the backward pass, and blocks that are compiled, train as they did."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from orchard.cache.store import Store
from orchard.core.blocks import layers_of
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.train.compiled import as_written, compiled
from orchard.train.parallel import Mesh
from orchard.train.recompute import Recompute, recompute
from orchard.train.world import World
from orchard.transforms.lora import Lora
from tests.train.parallel_program import VOCAB, batches, build, train


@pytest.mark.parametrize("every", [1, 2, 3])
def test_recomputed_blocks_give_the_same_bits(every: int) -> None:
    mesh = Mesh.Config().build(here=World())
    model = build("moe" if every == 1 else "")
    plain = train(copy.deepcopy(model), mesh, steps=4)
    assert recompute(model, Recompute.Config(every=every)) == len(range(0, 2, every))
    assert train(copy.deepcopy(model), mesh, steps=4) == plain  # a copy recomputes its own blocks


def test_recomputing_repeats_dropout_and_leaves_no_marks() -> None:
    slopes, contexts = [], []
    for every in (0, 1):
        model = Lora(r=2, alpha=2, dropout=0.5).attach(build("moe"))
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("lora_b"):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
            if name.endswith("lora_a"):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(4))
        recompute(model.train(), Recompute.Config(every=every))
        torch.manual_seed(5)
        contexts.append(Context.whole(batches(1)[0].ids))
        model(batches(1)[0].ids, contexts[-1]).square().sum().backward()
        slopes.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(slopes[0][name], slopes[1][name]) for name in slopes[0])  # type: ignore[arg-type]
    assert len(contexts[1].collected["moe.balance"]) == 2 == len(contexts[0].collected["moe.balance"])


def test_less_is_kept_where_blocks_are_recomputed() -> None:
    def kept(every: int) -> int:
        model, sizes = build(), []
        recompute(model, Recompute.Config(every=every))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):  # type: ignore[func-returns-value]
            model(batches(1)[0].ids)
        return sum(sizes)

    assert kept(1) < 0.5 * kept(0)


def test_settings_of_recomputation_are_checked() -> None:
    with pytest.raises(ConfigError, match="every is -1"):
        recompute(build(), Recompute.Config(every=-1))
    with pytest.raises(ConfigError, match="no list of layers"):
        recompute(torch.nn.Linear(2, 2), Recompute.Config(every=1))
    assert layers_of(torch.nn.Linear(2, 2)) == []


def test_blocks_of_a_kind_are_compiled_once_and_train_the_same() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter: Any = CompileCounterWithBackend("aot_eager")
    mesh, model = Mesh.Config().build(here=World()), build()
    plain = train(copy.deepcopy(model), mesh, steps=3)
    report = compiled(model, backend=counter)
    recompute(model, Recompute.Config(every=2))
    found = train(model, mesh, steps=3)
    assert (report.blocks, report.reasons, counter.frame_count) == (2, {}, 1)
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    context = Context.whole(batches(1)[0].ids)
    model(batches(1)[0].ids, context)
    assert sorted(context.views) == [0, 1]


def test_blocks_with_mixtures_are_compiled_once_and_train_the_same() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter: Any = CompileCounterWithBackend("aot_eager")
    mesh, model = Mesh.Config().build(here=World()), build("moe")
    plain = train(copy.deepcopy(model), mesh, steps=3)
    report = compiled(model, backend=counter)
    recompute(model, Recompute.Config(every=2))
    found = train(model, mesh, steps=3)
    assert (report.blocks, report.reasons, counter.frame_count) == (2, {}, 1)
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-5)


def test_a_block_that_cannot_be_compiled_says_why() -> None:
    mesh, model = Mesh.Config().build(here=World()), build("moe")
    for (
        layer
    ) in model.stack.layers:  # somebody looks at single experts, and how many tokens they have is not known before
        layer.mlp.gate.register_forward_hook(lambda *_: None)
    plain = train(copy.deepcopy(model), mesh, steps=2)
    report = compiled(model, backend="aot_eager")
    assert report.blocks == 2
    assert train(model, mesh, steps=2) == plain
    assert report.blocks == 0
    assert set(report.reasons) == {"stack.layers.0", "stack.layers.1"} and all(report.reasons.values())


def test_blocks_that_read_another_layers_keys_are_compiled_and_train_the_same() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter: Any = CompileCounterWithBackend("aot_eager")
    mixers = [
        Attention.Config(heads=2, kv_heads=1, head_dim=8, store=Store.Config(owner=owner))
        for owner in (None, None, 1, 1, 1)
    ]
    blocks = [Block.Config(mixer=mixer, mlp=GatedMLP.Config(hidden_dim=16)) for mixer in mixers]
    torch.manual_seed(0)
    model: Decoder = Decoder.Config(vocab=VOCAB, dim=16, context=64, stack=Stack.Config(layers=blocks)).build()
    mesh = Mesh.Config().build(here=World())
    plain = train(copy.deepcopy(model), mesh, steps=3)
    report = compiled(model, backend=counter)
    recompute(model, Recompute.Config(every=2))
    found = train(model, mesh, steps=3)
    assert (report.blocks, report.reasons, counter.frame_count) == (5, {}, 2)
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-5)


@pytest.mark.long
def test_what_was_compiled_for_other_models_does_not_use_up_a_models_compilations() -> None:
    """Torch compiles one function a few times only; a teacher, and every step of a plan before this one, would count."""
    ids, here = torch.zeros(1, 8, dtype=torch.long), torch.arange(8)[None]
    reports = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = build("").to(dtype)
        reports.append(compiled(model, backend="eager"))
        for grad in (True, False):
            for documents in (None, torch.zeros(1, 8, dtype=torch.long)):
                for causal in (True, False):
                    with torch.set_grad_enabled(grad):
                        model.hidden(ids, Context(positions=here, documents=documents, causal=causal))
        as_written(model)
        assert all("forward" not in layer.__dict__ for layer in layers_of(model))
        model.hidden(ids, Context(positions=here))
    assert all(not report.reasons and report.blocks == 2 for report in reports)
