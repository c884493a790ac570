"""Meshes and models that do not fit together are refused by name, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.models.language.decoder import Decoder
from orchard.nn.formats import Int8
from orchard.nn.norm import RMSNorm
from orchard.train.parallel import Mesh, Spread, spread
from orchard.train.parallel_experts import split_experts
from orchard.train.parallel_sums import total, totals
from orchard.train.parallel_tensor import split_tensors
from orchard.train.world import World
from orchard.transforms.lora import Lora
from tests.train.parallel_program import build


class Many:
    """As much of a mesh as is looked at before anything is cut."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size


def cut(model: Any, size: int, how: Any = split_tensors) -> None:
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    try:
        how(model, Many(size))
    finally:
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


@given(st.sampled_from([-1, 1, 2, 3, 4]), st.integers(1, 4), st.integers(1, 3), st.integers(1, 1))
def test_a_mesh_covers_one_process_or_says_both_numbers(data: int, tensor: int, expert: int, size: int) -> None:
    cfg = Mesh.Config(data=data, tensor=tensor, expert=expert)
    if tensor > 1 and expert > 1:
        with pytest.raises(UnsupportedPair, match=f"tensor {tensor} with mesh.expert {expert}"):
            cfg.build(here=World(size=size))
    elif max(data, 1) * tensor * expert == size:
        mesh = cfg.build(here=World(size=size))
        assert (mesh.dims, mesh.data, mesh.data_rank, mesh.data_group) == (None, 1, 0, None)
    else:
        need = max(data, 1) * tensor * expert
        with pytest.raises(ConfigError, match=rf"for {size} processes \(it would need {need}\)"):
            cfg.build(here=World(size=size))


def test_other_meshes_are_refused_with_both_numbers() -> None:
    for cfg, size in [(Mesh.Config(tensor=2), 3), (Mesh.Config(data=2, tensor=2), 2), (Mesh.Config(data=3), 4)]:
        with pytest.raises(ConfigError, match=f"for {size} processes"):
            cfg.build(here=World(size=size))
    for wrong in ({"tensor": 0}, {"data": 0}, {"data": -2}, {"expert": -1}):
        with pytest.raises(ConfigError, match=f"mesh.{next(iter(wrong))} is"):
            Mesh.Config(**wrong).build(here=World())
    with pytest.raises(ConfigError, match=r"spread.compute is 'half'"):
        spread(build(), Mesh.Config().build(here=World()), Spread.Config(compute="half"))


def test_tensors_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"stack.layers.0.mixer.kv_heads is 2, which mesh.tensor 4") as refused:
        cut(build(), 4)
    assert "mesh.tensor 2" in refused.value.hint
    with pytest.raises(ConfigError, match=r"stack.layers.0.mixer.heads is 4"):
        cut(build(), 3)
    with pytest.raises(UnsupportedPair, match=r"stack.layers.0.mixer.q has dropout"):
        cut(Lora(r=2, alpha=2, dropout=0.1).attach(build()), 2)
    shared = build()
    shared.head.weight = shared.embedding.weight  # type: ignore[union-attr]
    with pytest.raises(UnsupportedPair, match=r"embedding.weight and head.weight are the same tensor"):
        cut(shared, 2)
    tree = build().config.set("stack.layers[1].mlp.hidden_dim", 63)
    with pytest.raises(ConfigError, match=r"stack.layers.1.mlp.gate has 63 channels"):
        cut(tree.build(), 2)
    tree = build().config.set("stack.layers[1].mlp.up.format", Int8.Config())
    with pytest.raises(UnsupportedPair, match=r"stack.layers.1.mlp.up is packed \(Int8\)"):
        cut(tree.build(), 2)
    tree = build().config.set("stack.layers[0].mixer.norm_over", "all")
    tree = tree.set("stack.layers[0].mixer.q_norm", RMSNorm.Config())
    with pytest.raises(UnsupportedPair, match=r"stack.layers.0.mixer normalises all its heads"):
        cut(tree.build(), 2)


def test_experts_that_are_not_there_or_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="no mixture of experts"):
        cut(build(), 2, split_experts)
    with pytest.raises(ConfigError, match=r"stack.layers.0.mlp.gate holds 4 experts, which mesh.expert 3"):
        cut(build("moe"), 3, split_experts)


def test_one_process_is_left_as_it_is_and_sums_are_its_own() -> None:
    mesh, model = Mesh.Config().build(here=World()), build()
    assert spread(model, mesh) is model and type(model) is Decoder
    value = torch.tensor([0.1, 16777216.0])
    assert total(value, mesh).dtype == torch.float64 and total(value, mesh).tolist() == value.tolist()
    assert total(torch.tensor(3), mesh).dtype == torch.int64
    assert totals({"a": torch.tensor(2), "b": torch.tensor(0.5)}, mesh) == {"a": 2.0, "b": 0.5}
    assert totals({}, mesh) == {}
