"""Leading singular vectors beside a packed rest: exactness, error, budgets, and what recovery finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.core.errors import ConfigError, UsageError
from orchard.nn.formats import Blocks, Int2, Int4, Palette
from orchard.nn.linear import GroupedLinear
from orchard.nn.moe import MoE
from orchard.nn.tensors import carried
from orchard.transforms.lora import Lora, LoraLinear
from orchard.transforms.recover import Recover
from orchard.transforms.residual import Residual, leading, relative_errors, split
from orchard.transforms.rtn import Rtn
from tests.transforms.test_lora import IDS, built, scores, tree
from tests.transforms.test_qat import texts


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decaying(out: int, width: int, power: float) -> Tensor:
    """A weight whose singular values fall as a power of their number."""
    u, _, v = torch.linalg.svd(randn(out, width), full_matrices=False)
    return u * torch.arange(1, len(v) + 1) ** -power @ v


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (12, 12)])
def test_what_leads_is_the_truncated_decomposition(shape: tuple[int, int]) -> None:
    weight = decaying(*shape, 1.0)
    a, b = leading(weight, 5)
    assert a.shape == (5, shape[1]) and b.shape == (shape[0], 5) and a.dtype == b.dtype == torch.float16
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(b.float() @ a.float(), u[:, :5] * s[:5] @ v[:5], atol=2e-3, rtol=1e-2)
    assert 0.9 < float(a.norm() / b.norm()) < 1.1


def test_a_weight_of_low_rank_and_a_dead_one_leave_nothing() -> None:
    weight = randn(30, 4) @ randn(4, 18, seed=1) * 0.1
    a, b = leading(weight, 6)
    assert (b.float() @ a.float() - weight).norm() < 2e-3 * weight.norm()
    packed, (a, b) = split(torch.zeros(12, 12), 3, Blocks.Config().build())
    assert not a.any() and not b.any() and not Blocks.Config().build().unpack(packed, torch.float32).any()


FORMS = {"blocks": Blocks.Config(), "two": Int2.Config(group=32), "palette": Palette.Config(bits=2)}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_rounds_do_not_make_it_worse_and_beat_packing_alone(form: Any) -> None:
    weight, built_form = decaying(96, 64, 0.7), form.build()
    alone = float((built_form.unpack(built_form.pack(weight), torch.float32) - weight).norm())
    errors = []
    for rounds in (1, 2, 4):
        packed, (a, b) = split(weight, 8, built_form, rounds)
        errors.append(float((built_form.unpack(packed, torch.float32) + b.float() @ a.float() - weight).norm()))
    assert errors == sorted(errors, reverse=True) and errors[0] < 0.8 * alone


def test_a_model_gets_side_paths_that_are_its_own() -> None:
    model, told = built(tree()), list[float]()
    change = Residual(r=4)
    made = change.apply(model, tell=told.append)
    assert abs(sum(told) - 1) < 1e-6 and not change.notes
    assert made.config.complete() == change(model.config.complete()).complete()
    sides = [module for module in made.modules() if isinstance(module, LoraLinear)]
    assert len(sides) == 14 and all(module.config.kept and module.scale == 1 for module in sides)
    assert all(module.lora_a.dtype == torch.float16 and not module.lora_a.requires_grad for module in sides)
    alone = relative_errors(model, Rtn(format=Blocks.Config()).apply(model))
    beside = relative_errors(model, made)
    assert beside.keys() == alone.keys()
    assert all(beside[path] < alone[path] for path in beside if path != "head") and beside["head"] == 0
    again = change.apply(model).state_dict()
    assert all(value.equal(again[name]) for name, value in made.state_dict().items())
    assert scores(carried(made, made.config)).equal(scores(made))


def test_the_rank_follows_from_a_budget_and_the_bytes_are_within_it() -> None:
    model = built(tree())
    for bits in (6.0, 8.0, 12.5):
        change = Residual(bits=bits)
        made = change.apply(model)
        for path, module in made.named_modules():
            if isinstance(module, LoraLinear):
                size = module.nbytes + module.lora_a.nbytes + module.lora_b.nbytes
                limit = bits / 8 * module.lora_a.shape[1] * module.lora_b.shape[0]
                more = 2 * (module.lora_a.shape[1] + module.lora_b.shape[0])
                assert size <= limit < size + more, path
    tight = Residual(bits=3.6)
    made = tight.apply(model)
    assert not any(isinstance(module, LoraLinear) for module in made.modules())
    assert len(tight.notes) == 14 and "packed alone" in tight.notes[0]


def test_a_rank_beyond_the_weight_and_experts_are_named() -> None:
    change = Residual(r=30)
    made = change.apply(built(tree()))
    small = [note for note in change.notes if "of rank 16 at most" in note]
    assert len(small) == 4 == len(change.notes)  # keys and values have 16 rows
    change = Residual(r=2)
    made = change.apply(built(tree(MoE.Config(hidden_dim=16, experts=2))))
    grouped = [module for module in made.modules() if isinstance(module, GroupedLinear)]
    assert grouped and all(isinstance(module.format, Blocks) for module in grouped)
    assert len(change.notes) == len(grouped) and "packed alone" in change.notes[0]


@pytest.mark.parametrize("arguments", [{"r": -1}, {"rounds": 0}, {"bits": 0.0}, {"bits": float("nan")}, {"r": True}])
def test_settings_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Residual(**arguments)


@pytest.mark.parametrize("rank", [0, 3])
def test_weighing_lowers_what_it_weighs(rank: int) -> None:
    weight, form = decaying(48, 36, 0.5), Blocks.Config().build()
    counts = torch.full((36,), 0.02)
    counts[1::4], counts[0] = 1.0, 0.0  # the first column never gets an input

    def cost(weighed: Tensor | None) -> float:
        packed, (a, b) = split(weight, rank, form, 2, weighed)
        made = form.unpack(packed, torch.float32) + b.float() @ a.float()
        assert made.isfinite().all()
        return float(((made - weight).square() * counts).sum())

    assert cost(counts) < 0.9 * cost(None)
    model, change = built(tree()), Residual(r=rank, weighted=True)
    assert change.looks and change.apply(model, texts())(IDS).isfinite().all()
    with pytest.raises(UsageError, match="has none"):
        change.apply(model)


def test_a_second_side_path_is_refused() -> None:
    model = Residual(r=2, then=Int4.Config(group=8), targets="q").apply(built(tree()))
    with pytest.raises(ConfigError, match="side path already"):
        Residual(r=2).apply(model)
    with pytest.raises(ConfigError, match="side path already"):
        Residual(r=2).apply(Lora(r=2).attach(built(tree())))


def test_recovery_trains_the_side_path_that_is_there() -> None:
    model = Residual(r=3).apply(built(tree()))
    recover = Recover(r=3)
    student = recover.apply(model)
    torch.testing.assert_close(student(IDS), model(IDS))
    student(IDS).square().sum().backward()
    trained = [name for name, parameter in student.named_parameters() if parameter.grad is not None]
    assert len(trained) == 28 and all("lora" in name for name in trained)
    finished = recover.finish(student)
    torch.testing.assert_close(finished(IDS), model(IDS))
