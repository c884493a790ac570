"""Values made once a step: the same gradients, whatever asks for them how often."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.formats import Learned, Plain
from orchard.nn.formats.learned_once import _on_gpu, forget, once
from orchard.nn.linear import Embedding, GroupedLinear, Linear, Weight
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.stack import Block, Stack
from orchard.objectives.lm import NextToken
from orchard.transforms.lora import Lora
from orchard.transforms.qat import Qat

TWO = Learned.Config(bits=2, group=8)


def model(mlp: Any = None) -> Decoder:
    torch.manual_seed(0)
    block = Block.Config(
        mixer=Attention.Config(heads=2, kv_heads=1, head_dim=8), mlp=mlp or GatedMLP.Config(hidden_dim=24)
    )
    cfg: Any = Decoder.Config(vocab=19, dim=16, context=16, stack=Stack.Config(layers=[block]), head=None)
    for kind in (Linear, GroupedLinear):
        if cfg.find(kind):
            cfg = cfg.rewrite(kind, lambda node: node.clone(format=TWO))
    cfg = cfg.rewrite(Embedding, lambda node: node.clone(format=Learned.Config(bits=4, group=8)))
    made: Decoder = cfg.build()
    for module in made.modules():
        if isinstance(module, Linear | GroupedLinear):
            module.assign(torch.randn(module.shape) * 0.3)
    return made


def batches(count: int = 3) -> list[Batch]:
    torch.manual_seed(5)
    ids = torch.randint(0, 19, (count, 2, 13))
    places = torch.arange(12).expand(2, 12)
    return [
        Batch(row[:, :-1], row[:, 1:], places, torch.zeros(2, 12, dtype=torch.long), plain=True, full=True)
        for row in ids
    ]


def gradients(made: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    objective = NextToken.Config(chunk=5).build()  # scores in chunks, so that the head is asked for several times
    for batch in batches():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            objective(made, batch).value.backward()
    return {name: p.grad for name, p in made.named_parameters() if p.grad is not None and not name.endswith(".made")}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("mlp", [None, MoE.Config(hidden_dim=16, experts=3)])
def test_gradients_of_several_batches_are_the_same(dtype: torch.dtype | None, mlp: Any) -> None:
    one, other = model(mlp), model(mlp)
    want = gradients(one, dtype)
    names = {name for name, _ in other.named_parameters()}
    with once(other, dtype):
        gradients(other, dtype)
    got = {name: p.grad for name, p in other.named_parameters()}
    assert {name for name, _ in other.named_parameters()} == names == want.keys()
    assert sum(name.endswith("log_scale") for name in names) >= 8
    for name, value in want.items():
        assert got[name] is not None and torch.allclose(got[name], value, atol=0.02 if dtype else 1e-4, rtol=0.02), name


def test_values_are_made_once_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, count = model(), 0
    values = Learned.values

    def counted(self: Any, *args: Any) -> Tensor:
        nonlocal count
        count += 1
        return values(self, *args)

    monkeypatch.setattr(Learned, "values", counted)
    with once(made):
        gradients(made)
        gradients(made)
    assert count == 8
    assert all(module.__dict__["_made"][0].numel() == 0 for module in made.modules() if "_made" in module.__dict__)


def test_packed_weights_beside_side_paths_are_made_when_first_met_and_forgotten() -> None:
    made = Lora(r=2, alpha=4).attach(Qat(bits=2, embedding=4).finish(model()).requires_grad_(False))
    names, ids = made.state_dict().keys(), torch.arange(6)[None]
    want, _ = made(ids), gradients(made)
    slopes = {name: p.grad for name, p in made.named_parameters() if p.requires_grad}
    made.zero_grad()
    with once(made):
        assert torch.equal(made(ids), want)
        kept = {
            name: module.__dict__["_made"][0] for name, module in made.named_modules() if "_made" in module.__dict__
        }
        gradients(made)
    assert len(kept) >= 8 and all(value.numel() and not value.requires_grad for value in kept.values())
    assert made.state_dict().keys() == names
    assert all(
        torch.allclose(p.grad, slopes[name], atol=1e-5) for name, p in made.named_parameters() if p.requires_grad
    )
    with once(made):
        assert all(made.get_submodule(name).made is value for name, value in kept.items())
    forget(made)
    assert not any("_made" in module.__dict__ for module in made.modules())
    assert torch.equal(made(ids), want)

    def never(run: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError("nothing is learnt here, so there is nothing to record")

    found = [module for module in made.modules() if isinstance(module, Weight) and not isinstance(module.format, Plain)]
    with _on_gpu(made, found, [torch.float32] * len(found), never):
        assert torch.equal(made(ids), want)
    assert made.state_dict().keys() == names


def test_passes_that_are_recorded_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a recorded pass is one call; here it is run again."""
    runs: list[int] = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()  # as recording does
        runs.append(0)
        at = len(runs) - 1

        def again() -> None:
            runs[at] += 1
            run()

        return again

    made, other = model(), model()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (made, other)]
    for step in range(3):
        for one, optimizer in zip((made, other), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            found = [
                module
                for module in one.modules()
                if isinstance(module, Weight) and not isinstance(module.format, Plain)
            ]
            with once(one) if one is made else _on_gpu(one, found, [torch.float32] * len(found), record):
                gradients(one)
            optimizer.step()
        assert runs == [step + 1, step + 1]
        for (name, p), (_, q) in zip(made.named_parameters(), other.named_parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.allclose(p.grad, q.grad, atol=1e-6), name
    with torch.no_grad(), _on_gpu(other, found, [torch.float32] * len(found), record):
        ids = torch.arange(6)[None]
        assert torch.allclose(other(ids), made(ids), atol=1e-5)
    assert runs == [4, 3] and copy.deepcopy(other).state_dict().keys() == made.state_dict().keys()
    other.get_submodule("stack.layers.0.mlp.up").weight.requires_grad_(
        False
    )  # something else is trained: recorded anew
    other.zero_grad()
    with _on_gpu(other, found, [torch.float32] * len(found), record):
        gradients(other)
    assert len(runs) == 4 and other.get_submodule("stack.layers.0.mlp.up").weight.grad is None
    assert other.get_submodule("stack.layers.0.mlp.up").log_scale.grad is not None
    with pytest.raises(RuntimeError, match="stop"), _on_gpu(other, found, [torch.float32] * len(found), record):
        raise RuntimeError("stop")
    assert isinstance(other.get_submodule("stack.layers.0.mlp.up").format, Learned)
    forget(other)
    assert "_recorded" not in other.__dict__


def test_an_error_inside_leaves_everything_as_it_was() -> None:
    made = model()
    before, names = made(torch.arange(6)[None]), made.state_dict().keys()
    with pytest.raises(RuntimeError, match="stop"), once(made):
        gradients(made)
        raise RuntimeError("stop")
    assert torch.equal(made(torch.arange(6)[None]), before) and made.state_dict().keys() == names
    assert all(p.grad is None for name, p in made.named_parameters() if name.endswith("log_scale"))
    with once(made), pytest.raises(ConfigError, match="already"), once(made):
        pass


def test_evaluation_and_frozen_parts() -> None:
    made = model()
    want = made(torch.arange(6)[None])
    with torch.no_grad(), once(made):
        assert torch.equal(made(torch.arange(6)[None]), want)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name.endswith("log_scale"))
    with once(made):
        gradients(made)
    found = {name for name, p in made.named_parameters() if p.grad is not None}
    assert found == {name for name, _ in made.named_parameters() if name.endswith("log_scale")}
    with pytest.raises(ConfigError, match="inside `once`"), once(made):
        made.embedding.assign(torch.zeros(19, 16))


def test_a_compiled_module_is_compiled_once() -> None:
    map_: Any = Linear.Config(in_dim=16, out_dim=4, format=TWO).build()
    torch._dynamo.reset()
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph

    whole = torch.compile(map_, fullgraph=True, backend=backend)
    for _ in range(3):
        with once(map_):
            for _ in range(2):
                whole(torch.randn(5, 16)).sum().backward()
        with torch.no_grad():
            for parameter in map_.parameters():
                parameter.sub_(0.01 * parameter.grad)
                parameter.grad = None
    assert len(seen) == 1 and "round" not in seen[0].code
