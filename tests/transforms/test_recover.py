"""Recovery of a compressed model, and adapters for tasks beside it: the base keeps its bits, the two side paths do not mix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchard.core.config import BaseConfig
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.generate.lowering import lower
from orchard.models.language import Decoder
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.ops.plan.adapt import adapted
from orchard.ops.plan.reference import Reference
from orchard.session.build import Built
from orchard.session.model import Model
from orchard.transforms.lora import (
    Lora,
    LoraLinear,
    freeze_base,
    merged,
    merged_in,
    sides_of,
    unmerged,
    with_sides,
)
from orchard.transforms.lora_kept import KeptLinear, LoraOver
from orchard.transforms.ptq import NotFinite, Quantise
from orchard.transforms.recover import Recover
from orchard.weights.adapters import Side, read_adapter, write_adapter
from tests.generate.conftest import make_tokenizer
from tests.transforms.test_lora import IDS, built, scores, stir, tree
from tests.transforms.test_qat import divergence, texts

MLP = GatedMLP.Config(hidden_dim=64)


def packed(bits: int = 4) -> Decoder:
    made: Decoder = Quantise(bits=bits, group=32).apply(built(tree(MLP)))
    return made.eval()


def recovered(base: Decoder | None = None, r: int = 3) -> Decoder:
    recover = Recover(r=r, alpha=6)
    student = recover.apply(packed() if base is None else base)
    stir(student)
    return recover.finish(student).eval()


def tasked(base: Decoder, targets: Any = ("q", "gate")) -> Decoder:
    twin = Lora(r=2, alpha=4, targets=targets).attach(base).eval()
    stir(twin)
    return twin


def test_training_lowers_the_divergence_and_the_base_keeps_its_bits() -> None:
    teacher, base, recover, data = built(tree(MLP)), packed(2), Recover(r=4, alpha=8), texts()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    student = recover.apply(base)
    assert torch.equal(scores(student), scores(base))
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    assert len(trained) == 28 and all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    optimizer = torch.optim.Adam(trained.values(), lr=1e-2)
    first = float(divergence(student, teacher, data).detach())
    for _ in range(25):
        optimizer.zero_grad()
        divergence(student, teacher, data).backward()
        optimizer.step()
    assert float(divergence(student, teacher, data).detach()) < 0.6 * first
    done = recover.finish(student.eval())
    assert done.config == recover(base.config) and not any(p.requires_grad for p in done.parameters())
    for state in (done.state_dict(), base.state_dict()):
        assert all(torch.equal(state[name], value) for name, value in before.items())
    assert {p.dtype for name, p in done.named_parameters() if "lora_" in name} == {torch.float16}
    assert (scores(done) - scores(student)).abs().max() < 0.02
    again = Recover(r=4, alpha=8).apply(base)
    assert torch.equal(again.stack.layers[0].mixer.q.lora_a, recover.apply(base).stack.layers[0].mixer.q.lora_a)


def test_a_tree_goes_through_text_and_side_paths_that_are_there_are_trained_on() -> None:
    base = packed()
    cfg = Recover(r=3)(base.config)
    assert BaseConfig.from_dict(cfg.to_dict()) == cfg and all(node.kept for _, node in cfg.find(LoraLinear))
    some = Recover(r=2, alpha=4, targets="q")
    half = some.finish(some.apply(base))
    recover = Recover(r=5, alpha=5)
    student = recover.apply(half)
    assert student.stack.layers[0].mixer.q.lora_a.shape[0] == 2 and student.stack.layers[0].mixer.k.lora_a.shape[0] == 5
    assert [note.partition(":")[0] for note in recover.notes] == [f"stack.layers.{i}.mixer.q" for i in (0, 1)]
    assert all(p.dtype == torch.float32 for p in student.parameters() if p.requires_grad)
    assert recover.finish(student).config == recover(half.config)
    assert half.stack.layers[0].mixer.q.lora_a.dtype == torch.float16, "the model given stays as it was"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="no side paths"):
        Recover().finish(packed())
    with pytest.raises(ConfigError, match="rank 0"):
        Recover(r=0)
    with pytest.raises(ConfigError, match="takes a side path"):
        Recover(targets="embedding").apply(packed())
    recover = Recover(r=2)
    student = recover.apply(packed())
    with torch.no_grad():
        student.stack.layers[1].mixer.v.lora_b[0, 0] = float("inf")
    with pytest.raises(NotFinite, match=r"stack\.layers\.1\.mixer\.v\.lora_b"):
        recover.finish(student)


# Adapters beside it ---------------------------------------------------------------------------------------------------


def test_an_adapter_is_a_second_side_path_and_trains_alone() -> None:
    model = recovered()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = Lora(r=2, alpha=4, targets=("q", "gate")).attach(model).eval()
    assert torch.equal(scores(twin), scores(model))
    assert twin.config == Lora(r=2, alpha=4, targets=("q", "gate"))(model.config)
    assert type(twin.stack.layers[0].mixer.q) is LoraOver and type(twin.stack.layers[0].mixer.k) is KeptLinear
    assert twin.stack.layers[0].mixer.k.kept_a.data_ptr() == model.stack.layers[0].mixer.k.lora_a.data_ptr()
    trained = freeze_base(twin)
    names = {name for name, p in twin.named_parameters() if p.requires_grad}
    paths = {f"stack.layers.{i}.{part}" for i in (0, 1) for part in ("mixer.q", "mlp.gate")}
    assert names == {f"{path}.{part}" for path in paths for part in ("lora_a", "lora_b")}
    optimizer = torch.optim.Adam(trained, lr=0.02)
    losses = []
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(twin(IDS)[0], torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert sides_of(twin).keys() == paths and not sides_of(model)


def test_a_third_side_path_and_dora_are_refused() -> None:
    model = recovered()
    with pytest.raises(ConfigError, match="already"):
        Lora(targets="q").attach(tasked(model))
    with pytest.raises(ConfigError, match="already"):
        Lora(targets="q")(tasked(model).config)
    with pytest.raises(UnsupportedPair, match="DoRA"):
        Lora(targets="q", dora=True).attach(model)
    with pytest.raises(UnsupportedPair, match="DoRA"):
        Lora(targets="q", dora=True)(model.config).build()
    path = "stack.layers.0.mixer.q"
    with pytest.raises(UnsupportedPair, match="DoRA"):
        with_sides(model, {path: [(np.ones((1, 32)), np.ones((32, 1)), 1.0)]}, magnitudes={path: np.ones(32)})
    done = Lora(r=1, targets="k").attach(tasked(model, "q"))  # other maps may have theirs
    assert type(done.stack.layers[0].mixer.k) is LoraOver and type(done.stack.layers[0].mixer.q) is LoraOver


def test_trained_sides_go_beside_it_alone_and_together() -> None:
    model = recovered()
    twin = tasked(model)
    sides = {path: [side] for path, side in sides_of(twin).items()}
    again = with_sides(model, sides)
    assert torch.allclose(scores(again), scores(twin), atol=1e-6) and sides_of(again).keys() == sides.keys()
    halves = {path: [(a, b, scale / 2)] * 2 for path, ((a, b, scale),) in sides.items()}
    assert torch.allclose(scores(with_sides(model, halves)), scores(twin), atol=1e-5)
    back = with_sides(again, {path: [(a, -b, scale)] for path, ((a, b, scale),) in sides.items()})
    assert torch.allclose(scores(back), scores(model), atol=1e-4)


def test_merging_takes_the_adapter_alone_or_everything() -> None:
    dense = recovered(built(tree(MLP)))
    twin = tasked(dense)
    want = scores(twin)
    alone = merged(twin, own=False)
    assert torch.allclose(scores(alone), want, atol=1e-4) and not alone.config.find(LoraLinear)
    assert len(alone.config.find(KeptLinear)) == 14
    whole = merged(twin)
    assert torch.allclose(scores(whole), want, atol=1e-4)
    assert not whole.config.find(KeptLinear) and type(whole.stack.layers[0].mixer.q) is Linear
    assert torch.allclose(scores(merged(dense)), scores(dense), atol=1e-4)
    with merged_in(twin):
        assert torch.allclose(scores(twin), want, atol=1e-4)
    assert torch.equal(scores(twin), want)
    assert torch.allclose(scores(unmerged(alone, sides_of(twin))), scores(dense), atol=1e-4)
    with pytest.raises(UnsupportedPair, match="Int4"):
        merged(tasked(recovered()))


def test_plans_take_both() -> None:
    model = recovered()
    twin = tasked(model)
    want, ids = scores(twin)[0].numpy(), IDS[0].tolist()
    sides = {path: [side] for path, side in sides_of(twin).items()}
    plan, count = lower(model, stores="f32"), len(ids)
    assert plan.whole
    for made in (adapted(plan, sides, kind="f32"), lower(twin, stores="f32")):
        assert made.whole
        got = Reference(made, 1, count).run(ids, [0] * count, range(count), range(count))
        assert np.abs(got - want).max() < 1e-3


def test_an_adapter_for_it_is_a_folder_of_its_own(tmp_path: Path) -> None:
    """Signed by the recovered model, written without what belongs to that, and applied again from the folder."""
    model = recovered()
    twin = tasked(model)
    loaded = Model(Built(model, None, {}), make_tokenizer(), name="small")
    base = loaded.adapters.base
    assert not any("lora" in name or "kept" in name for name in base.shapes)
    sides = {path: Side(*side) for path, side in sides_of(twin).items()}
    write_adapter(tmp_path / "task", sides, base, base_name="small")
    found = read_adapter(tmp_path / "task", base)
    assert found.sides.keys() == sides.keys()
    loaded.adapters.load(tmp_path / "task")
    again = loaded.adapters.model("task").built.decoder
    assert torch.allclose(scores(again), scores(twin), atol=1e-5)
