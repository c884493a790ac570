"""Quantisation-aware training of small decoders: what becomes of the tree, that it learns, and that packing changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.models.language import Decoder
from orchard.nn.formats import Int2, Int4, Int8, Learned, Plain
from orchard.nn.formats.learned_once import once
from orchard.nn.linear import Embedding, Linear, Weight
from orchard.nn.moe import MoE
from orchard.nn.tensors import carried, dense_tensor, tensor_names
from orchard.transforms.inputs import mean_squares
from orchard.transforms.ptq import NotFinite
from orchard.transforms.qat import Qat, dead_groups, scale_names, weight_names
from tests.transforms.test_lora import IDS, built, scores, tree

Q = "stack.layers.0.mixer.q"


def texts(count: int = 2) -> list[Batch]:
    torch.manual_seed(7)
    made = []
    for _ in range(count):
        ids = torch.randint(0, 50, (2, 17))
        places = torch.arange(16).expand(2, 16)
        made.append(Batch(ids[:, :-1], ids[:, 1:], places, torch.zeros(2, 16, dtype=torch.long), plain=True, full=True))
    return made


def divergence(student: Decoder, teacher: Decoder, batches: Sequence[Batch]) -> Tensor:
    total = torch.zeros(())
    for batch in batches:
        with torch.no_grad():
            wanted = teacher(batch.ids).log_softmax(-1)
        total = total + torch.nn.functional.kl_div(
            student(batch.ids).log_softmax(-1).flatten(0, 1),
            wanted.flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
    return total / len(batches)


def formats(cfg: Any) -> dict[str, Any]:
    found = (Linear.Config, Embedding.Config)
    return {path: node.format for path, node in cfg.walk() if isinstance(node, found)}


def test_the_tree_says_what_the_finished_model_is() -> None:
    qat = Qat(bits=2, group=32, bits_of={"stack.layers[1].mixer.v": 4, "stack.layers.1.mlp.up": None})
    model = built(tree())
    packed, trained = qat(tree()), qat.trained(tree())
    assert formats(packed)["stack.layers[0].mixer.q"] == Int2.Config(group=32)
    assert formats(packed)["stack.layers[1].mixer.v"] == Int4.Config(group=32)
    assert formats(packed)["stack.layers[1].mlp.up"] == Plain.Config()
    assert formats(packed)["embedding"] == formats(packed)["head"] == Int4.Config(group=32)
    student = qat.apply(model)
    assert student.config == trained and qat.finish(student).config == packed
    assert [note.partition(":")[0] for note in qat.notes] == [f"stack.layers.{i}.mlp.down" for i in (0, 1)]
    assert all("do not divide a width of 40" in note and "group=40" in note for note in qat.notes)
    assert formats(qat(tree(head=None))).keys() >= {"embedding"} and "head" not in formats(qat(tree(head=None)))
    kept = formats(Qat(group=8, embedding=None, targets="q")(tree()))
    assert {path for path, form in kept.items() if form != Plain.Config()} == {
        f"stack.layers[{i}].mixer.q" for i in (0, 1)
    }


def test_groups_that_do_not_fit() -> None:
    wide = tree().clone(dim=96)  # 64 does not divide it, 32 does
    qat = Qat(bits=2, group=64, targets="q", embedding=None)
    assert formats(qat(wide))["stack.layers[0].mixer.q"] == Int2.Config(group=32)
    narrow = tree().clone(dim=30)
    found, notes = qat.formats(narrow)
    assert found[Q].bits == 8 and "Int8" in notes[0]  # thirty codes of two bits are no whole number of bytes
    whole = Qat(bits=2, group=None, targets="q", embedding=None)
    assert formats(whole(wide))["stack.layers[0].mixer.q"] == Int2.Config(group=None)
    assert not whole.formats(wide)[1]


def test_what_cannot_be_is_refused_by_name() -> None:
    for wrong in ({"bits": 3}, {"group": 0}, {"embedding": 5}, {"bits": 4, "levels": "unbalanced"}, {"outside": "x"}):
        with pytest.raises(ConfigError):
            Qat(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"stack\.layers\.7\.mixer\.q"):
        Qat(bits_of={"stack.layers.7.mixer.q": 4})(tree())
    with pytest.raises(UnsupportedPair, match="unbalanced"):
        Qat(levels="unbalanced", group=8)(tree())
    with pytest.raises(ConfigError, match="no learned weights"):
        Qat().finish(built(tree()))
    broken = built(tree())
    with torch.no_grad():
        broken.stack.layers[1].mlp.gate.weight[3, 5] = float("nan")
    with pytest.raises(NotFinite, match=r"stack\.layers\.1\.mlp\.gate"):
        Qat(group=8).apply(broken)


def test_the_model_given_stays_as_it_was_and_everything_is_trained() -> None:
    model, qat = built(tree()), Qat(group=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    student = qat.apply(model)
    assert all(parameter.requires_grad for parameter in student.parameters())
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    shared = {value.data_ptr() for value in model.state_dict().values()}
    assert not shared & {value.data_ptr() for value in student.state_dict().values()}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_training_lowers_the_divergence_and_finishing_changes_no_bit(bits: int) -> None:
    teacher, qat = built(tree(head=None)), Qat(bits=bits, group=8, embedding=bits)
    student, data = qat.apply(teacher), texts()
    optimizer = torch.optim.Adam(
        [
            {"params": [p for n, p in student.named_parameters() if n not in set(scale_names(student))], "lr": 4e-3},
            {"params": [p for n, p in student.named_parameters() if n in set(scale_names(student))], "lr": 1e-2},
        ]
    )
    scales = {name: dict(student.named_parameters())[name].detach().clone() for name in scale_names(student)}
    first = float(divergence(student, teacher, data).detach())
    for _ in range(25):
        optimizer.zero_grad()
        with once(student):
            divergence(student, teacher, data).backward()
        optimizer.step()
    last = float(divergence(student, teacher, data).detach())
    assert last < (0.6 * first if bits < 8 else 0.02)  # eight bits have nothing to learn, and may not lose it
    assert sum(bool((dict(student.named_parameters())[n] != v).any()) for n, v in scales.items()) > 10
    student.eval()
    packed = qat.finish(student)
    assert torch.equal(scores(packed), scores(student)) and not any(p.requires_grad for p in packed.parameters())
    for path, module in packed.named_modules():
        if isinstance(module, Weight):
            assert isinstance(module.format, (Int2, Int4, Int8))
            assert torch.equal(module.dense(), student.get_submodule(path).dense())
    assert all("log_scale" not in name for name in packed.state_dict())
    again = carried(packed, packed.config)
    assert torch.equal(scores(again), scores(packed))


def test_tensors_of_a_student_are_what_it_computes_with() -> None:
    student = Qat(group=8).apply(built(tree()))
    module, attribute = tensor_names(student)[f"{Q}.weight"]
    assert torch.equal(dense_tensor(module, attribute), module.dense())  # type: ignore[operator]
    assert not torch.equal(dense_tensor(module, attribute), module.weight)  # type: ignore[arg-type]


def test_names_for_the_optimiser() -> None:
    student = Qat(group=8, embedding=None).apply(built(tree()))
    names = {name for name, _ in student.named_parameters()}
    assert f"{Q}.log_scale" in scale_names(student) and f"{Q}.weight" in weight_names(student)
    assert names >= {*scale_names(student), *weight_names(student)} and "head.weight" not in weight_names(student)


def test_dead_and_broken_scales_are_named() -> None:
    model = built(tree())
    with torch.no_grad():
        model.stack.layers[0].mixer.q.weight[5, :8] = 0
    qat = Qat(bits=2, group=8)
    student = qat.apply(model)
    (note,) = [note for note in qat.notes if "dead" in note]
    assert note.startswith(Q) and "1 of 128 groups" in note and "row 5" in note and dead_groups(student) == [note]
    packed = qat.finish(student)
    assert (packed.stack.layers[0].mixer.q.dense()[5, :8] == 0).all()
    assert packed.stack.layers[0].mixer.q.scales[5, 0] == 0 and qat.notes.count(note) == 1
    with torch.no_grad():
        student.stack.layers[1].mixer.o.log_scale[3, 1] = float("nan")
    with pytest.raises(NotFinite, match=r"stack\.layers\.1\.mixer\.o has scales .* row 3") as caught:
        qat.finish(student)
    assert "learning rate" in caught.value.hint


def test_texts_weigh_the_first_scales() -> None:
    model, data = built(tree()), texts()
    paths = [Q, "stack.layers.1.mlp.down", "head", "embedding"]
    seen = mean_squares(model, paths, data)
    assert seen.keys() == {*paths} - {"embedding"} and seen[Q].shape == (32,) and not model._forward_hooks
    hidden = torch.cat([model.hidden(one.ids, _whole(one)).flatten(0, 1) for one in data])
    assert torch.allclose(seen["head"], hidden.square().mean(0), rtol=1e-4)
    tied = built(tree(head=None))
    assert mean_squares(tied, [Q, "embedding"], data).keys() == {Q, "embedding"}, "there the table scores, too"
    told: list[float] = []
    plain, heeded = Qat(group=32).apply(model), Qat(group=32).apply(model, data, told.append)
    assert sum(told) == pytest.approx(1.0)
    weighs = seen["stack.layers.1.mlp.down"]
    errors = []
    for student in (plain, heeded):
        off = student.stack.layers[1].mlp.down.dense() - model.stack.layers[1].mlp.down.dense()
        errors.append(float((off.detach().square() * weighs).sum()))
    assert errors[1] < errors[0]


def test_experts_are_quantised_too_and_a_student_can_be_trained_on() -> None:
    model = built(tree(MoE.Config(hidden_dim=16, experts=4)))
    qat = Qat(bits=4, group=8)
    student = qat.apply(model, texts())
    assert isinstance(student.stack.layers[0].mlp.up.format, Learned)
    assert torch.equal(scores(qat.finish(student).eval()), scores(student.eval()))
    lower = Qat(bits=2, group=8).apply(student)  # from the weights behind the levels, not from the levels
    assert torch.equal(lower.stack.layers[0].mixer.q.weight, student.stack.layers[0].mixer.q.weight)


def _whole(batch: Batch) -> Any:
    from orchard.core.context import Context

    return Context.whole(batch.ids)


def test_ids_are_scored_alike_in_float64() -> None:
    student = Qat(group=8).apply(built(tree())).eval()
    with torch.no_grad():
        assert torch.allclose(student.double()(IDS).float(), scores(student.float()), atol=1e-3)
