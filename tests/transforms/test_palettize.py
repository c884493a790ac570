"""Palettes in a model: which weights at which bits, errors weighed by what texts say, and the tree that comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.core.errors import ConfigError, UsageError
from orchard.models.language import Decoder
from orchard.nn.formats import Int8, Palette, Plain
from orchard.nn.linear import GroupedLinear, Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.transforms.inputs import mean_squares
from orchard.transforms.palettize import Palettize, bits_per_weight
from orchard.transforms.palettize_gradients import squared_gradients
from orchard.transforms.ptq import NotFinite
from tests.transforms.test_lora import built, tree
from tests.transforms.test_qat import texts

DOWN = "stack.layers.0.mlp.down"


def packed_bits(model: Decoder) -> dict[str, int]:
    return {
        path: module.format.config.bits  # type: ignore[attr-defined]
        for path, module in model.named_modules()
        if isinstance(module, Linear | GroupedLinear) and isinstance(module.format, Palette)
    }


def test_mixed_bits_by_name_and_a_tree_that_is_what_was_promised() -> None:
    model, told = built(tree()), list[float]()
    change = Palettize(two=("gate", "stack.layers.1.mixer.q"), weighted=False, rows=4)
    made = change.apply(model, tell=told.append)
    found = packed_bits(made)
    assert len(found) == 14 and sum(bits == 2 for bits in found.values()) == 3
    assert found["stack.layers.1.mixer.q"] == found["stack.layers.0.mlp.gate"] == 2
    assert made.config.complete() == change(model.config.complete()).complete() and not change.notes
    assert isinstance(made.embedding.format, Plain) and abs(sum(told) - 1) < 1e-6
    assert all(isinstance(module.format, Plain) for module in model.modules() if isinstance(module, Linear))
    again = change.apply(model)
    assert all(value.equal(again.state_dict()[name]) for name, value in made.state_dict().items())


def test_bits_per_weight_count_the_tables() -> None:
    model = built(tree())
    change = Palettize(two=("down",), weighted=False)
    made = change.apply(model)
    weights = [made.get_submodule(path) for path in packed_bits(made)]
    size, count = sum(w.nbytes for w in weights), sum(torch.Size(w.shape).numel() for w in weights)  # type: ignore[arg-type,misc]
    assert change.bits_per_weight(model.config.complete()) == 8 * size / count
    alone = bits_per_weight(made.config.complete(), [DOWN])
    assert alone == 2 + 2 * 4 * 16 / (32 * 40)  # 32 rows: two tables of four half-precision numbers


@pytest.mark.parametrize("by", ["inputs", "gradients"])
def test_weighing_lowers_what_it_weighs(by: str) -> None:
    model = built(tree())
    change = Palettize(bits=2, by=by)
    assert change.looks and not Palettize(weighted=False).looks
    weighed, plain = change.apply(model, texts()), Palettize(bits=2, weighted=False).apply(model)
    measure: Any = mean_squares if by == "inputs" else squared_gradients
    counts = measure(model, list(packed_bits(weighed)), texts())

    @torch.no_grad()
    def cost(made: Decoder) -> Tensor:
        off = {path: made.get_submodule(path).dense() - model.get_submodule(path).dense() for path in counts}  # type: ignore[operator]
        return torch.stack([(off[path].square() * counts[path]).sum() / counts[path].mean() for path in counts])

    assert (cost(weighed) <= cost(plain) * 1.003).all()
    assert cost(weighed).sum() < (0.995 if by == "inputs" else 0.97) * cost(plain).sum()


def test_squared_gradients_are_those_of_single_tokens() -> None:
    """One token counts, and only itself passes the last layer's way out: its gradient is the whole one."""
    model, (batch, *_) = built(tree()), texts()
    targets = torch.full_like(batch.targets, -100)
    targets[0, 3] = batch.targets[0, 3]
    one = type(batch)(batch.ids[:, :4], targets[:, :4], batch.positions[:, :4], batch.documents[:, :4], plain=True)
    path = "stack.layers.1.mlp.down"
    found = squared_gradients(model, [path], [one])
    loss = torch.nn.functional.cross_entropy(model(one.ids[:1])[0, 3:4], one.targets[0, 3:4])
    (slope,) = torch.autograd.grad(loss, model.get_submodule(path).weight)  # type: ignore[arg-type]
    torch.testing.assert_close(found[path], slope.square(), atol=1e-9, rtol=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_experts_are_packed_with_a_table_of_their_own() -> None:
    model = built(tree(MoE.Config(hidden_dim=16, experts=4)))
    for by in ("inputs", "gradients"):
        made = Palettize(by=by).apply(model, texts())
        grouped = [module for module in made.modules() if isinstance(module, GroupedLinear)]
        assert grouped and all(isinstance(module.format, Palette) for module in grouped)
        assert made(texts()[0].ids).isfinite().all()


def test_a_weight_that_no_palette_holds_is_named_and_kept_otherwise() -> None:
    model = built(tree(GatedMLP.Config(hidden_dim=39)))
    change = Palettize()
    made = change.apply(model, texts())
    assert isinstance(made.get_submodule(DOWN).format, Int8)
    assert [note.split(":")[0] for note in change.notes] == [DOWN, DOWN.replace("0", "1")]


def test_an_embedding_is_taken_by_name_without_weights() -> None:
    change = Palettize(targets=("all-linear", "embedding"))
    made = change.apply(built(tree()), texts())
    assert isinstance(made.embedding.format, Palette)
    assert len(change.notes) == 1 and change.notes[0].startswith("embedding: no text")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"bits": 3}, ConfigError),
        ({"rows": 0}, ConfigError),
        ({"by": "luck"}, ConfigError),
        ({"targets": ("nothing",)}, ConfigError),
        ({"two": ("nothing",)}, ConfigError),
        ({"targets": ()}, UsageError),
    ],
)
def test_settings_that_make_no_sense(arguments: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Palettize(**arguments, weighted=False).apply(built(tree()))


def test_no_texts_and_damaged_models_are_refused_by_name() -> None:
    model = built(tree())
    with pytest.raises(UsageError, match="has none"):
        Palettize().apply(model)
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(NotFinite, match="gradients of stack"):
        Palettize(by="gradients").apply(model, texts())
    with torch.no_grad():
        model.get_submodule(DOWN).weight[3, 2] = torch.inf  # type: ignore[index]
    with pytest.raises(NotFinite, match=DOWN):
        Palettize().apply(model, texts())
