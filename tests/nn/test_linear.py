"""Linear maps, grouped maps and embeddings in every format."""

from __future__ import annotations

import pytest
import torch

from orchard.nn.linear import Embedding, GroupedLinear, Linear
from tests.matrix import axes

FORMATS = axes.formats()
each_format = pytest.mark.parametrize("name", FORMATS)


@each_format
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_linear_is_rows_times_vector_plus_bias(name: str, bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear.Config(in_dim=16, out_dim=5, bias=bias, format=FORMATS[name]).build()
    layer.assign(torch.randn(5, 16))
    if bias:
        torch.nn.init.normal_(layer.bias)
    x, weight = torch.randn(2, 3, 16), layer.dense()
    y = layer(x)
    for b in range(2):
        for t in range(3):
            want = [float(x[b, t] @ weight[o]) + (float(layer.bias[o]) if bias else 0.0) for o in range(5)]
            torch.testing.assert_close(y[b, t], torch.tensor(want), atol=1e-5, rtol=1e-5)
    assert (layer.bias is not None) == bias


@each_format
def test_grouped_linear_applies_one_expert(name: str) -> None:
    torch.manual_seed(0)
    layer = GroupedLinear.Config(count=3, in_dim=16, out_dim=5, format=FORMATS[name]).build()
    layer.assign(torch.randn(3, 5, 16))
    x = torch.randn(4, 16)
    for expert in range(3):
        torch.testing.assert_close(layer(x, expert), x @ layer.dense()[expert].T, atol=1e-5, rtol=1e-5)


@each_format
@pytest.mark.parametrize("scale", [None, 4.0])
def test_an_embedding_looks_up_and_scores_with_one_table(name: str, scale: float | None) -> None:
    torch.manual_seed(0)
    table = Embedding.Config(vocab=7, dim=16, scale=scale, format=FORMATS[name]).build()
    table.assign(torch.randn(7, 16))
    ids = torch.tensor([[3, 0, 6], [3, 3, 1]])
    rows = table(ids, torch.float32)
    for b in range(2):
        for t in range(3):
            torch.testing.assert_close(rows[b, t], table.dense()[ids[b, t]] * (scale or 1.0))
    x = torch.randn(2, 16)
    torch.testing.assert_close(table.scores(x), x @ table.dense().T, atol=1e-5, rtol=1e-5)
    assert table(ids, torch.bfloat16).dtype == torch.bfloat16


@each_format
def test_bytes_are_those_of_the_tensors_that_a_checkpoint_holds(name: str) -> None:
    layer = Linear.Config(in_dim=16, out_dim=6, format=FORMATS[name]).build()
    assert layer.nbytes == sum(value.nbytes for value in layer.state_dict().values())
    assert layer.nbytes == layer.format.nbytes((6, 16), torch.float32)


@each_format
def test_a_weight_can_be_assigned_after_building_on_meta(name: str) -> None:
    with torch.device("meta"):
        layer = Linear.Config(in_dim=16, out_dim=6, format=FORMATS[name]).build()
    assert all(value.is_meta for value in layer.state_dict().values())
    weight = torch.randn(6, 16)
    layer.assign(weight)
    real = Linear.Config(in_dim=16, out_dim=6, format=FORMATS[name]).build()
    real.assign(weight)
    assert layer(torch.ones(1, 16)).equal(real(torch.ones(1, 16)))
    assert [key for key, _ in layer.named_parameters()] == [key for key, _ in real.named_parameters()]


def test_assigning_keeps_what_is_trained_and_what_is_frozen() -> None:
    layer = Linear.Config(in_dim=4, out_dim=2).build()
    layer.weight.requires_grad_(False)
    layer.assign(torch.ones(2, 4))
    assert isinstance(layer.weight, torch.nn.Parameter) and not layer.weight.requires_grad
    layer = Linear.Config(in_dim=4, out_dim=2).build()
    layer.assign(torch.ones(2, 4, requires_grad=True) * 2)
    assert layer.weight.requires_grad and layer.weight.is_leaf


def test_new_weights_are_small_and_random() -> None:
    torch.manual_seed(0)
    one, other = (Linear.Config(in_dim=100, out_dim=100).build().weight.detach() for _ in range(2))
    assert 0.015 < float(one.std()) < 0.025 and not one.equal(other)
