"""Fusing: what is joined, what is added in place, which buffers are reused, and that none of it changes a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from orchard.cache.store import Store
from orchard.core.errors import ConfigError
from orchard.generate.lowering import lower
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.linear import Linear
from orchard.nn.lowering import floats, linear_of
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.stack import Block, Stack
from orchard.ops.kernels import packing
from orchard.ops.plan import steps
from orchard.ops.plan.builder import Builder, NoStep, Rotation, Value, _float_matrix
from orchard.ops.plan.check import check
from orchard.ops.plan.fuse import fuse
from orchard.ops.plan.reference import Reference


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def scores(plan: steps.Plan, ids: list[int]) -> np.ndarray:
    check(plan)
    return Reference(plan, 1, len(ids)).run(ids, [0] * len(ids), range(len(ids)), range(len(ids)))


def start() -> tuple[Builder, Value]:
    builder = Builder(context=16, stores="f32")
    return builder, builder.embed(_float_matrix(random(20, 8)), path="table")


def finish(builder: Builder, x: Value) -> tuple[steps.Plan, steps.Plan]:
    builder.head(x, _float_matrix(random(20, x.width, seed=9)), path="head")
    return fuse(builder), fuse(builder, fused=False)


def linear(builder: Builder, x: Value, rows: int, name: str) -> Value:
    return builder.linear(x, _float_matrix(random(rows, x.width, seed=len(name))), path=name)


class Adapted(nn.Module):
    """A linear map with a low-rank side path, as an adapter would put in its place."""

    def __init__(self, inner: nn.Module, rank: int = 3) -> None:
        super().__init__()
        assert isinstance(inner, Linear | Adapted)
        self.inner = inner
        out_dim, in_dim = inner.shape
        self.shape = inner.shape
        self.a = nn.Parameter(torch.randn(rank, in_dim) * 0.3)
        self.b = nn.Parameter(torch.randn(out_dim, rank) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) + 1.5 * (x @ self.a.T @ self.b.T)
        return y

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        y = linear_of(builder, self.inner, x, f"{path}.inner", self.shape[0])
        a, b = floats(self.a), floats(self.b)
        assert a is not None and b is not None
        return builder.low_rank(x, a, b, 1.5, y, path=path)


def decoder(mlp: Any = None, **changes: Any) -> Decoder:
    torch.manual_seed(0)
    mlp = mlp or GatedMLP.Config(hidden_dim=40)
    layers = [
        Block.Config(mixer=Attention.Config(heads=4, kv_heads=2, head_dim=8, **changes), mlp=mlp.clone())
        for _ in range(2)
    ]
    model: Decoder = Decoder.Config(vocab=50, dim=32, context=64, stack=Stack.Config(layers=layers), head=None).build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def test_a_llama_layer_is_five_steps() -> None:
    plan = lower(decoder())
    layer = ["linear", "attend", "linear", "gated", "linear"]
    assert [step.kind for step in plan.steps] == ["embed", *layer, *layer[:2], "narrow", *layer[2:], "head"]
    q_k_v, _, o, gated, down = plan.steps[1:6]
    assert isinstance(q_k_v, steps.Linear) and len(q_k_v.outputs) == 3 and q_k_v.norm is not None
    assert isinstance(o, steps.Linear) and o.outputs[0].add and o.outputs[0].to == q_k_v.src
    assert isinstance(gated, steps.Gated) and gated.norm is not None
    assert isinstance(down, steps.Linear) and down.outputs[0].add
    head = plan.steps[-1]
    assert isinstance(head, steps.Head) and head.norm is not None
    assert head.matrix.tensor == "embedding.weight" and "head.weight" not in plan.tensors
    assert sorted(plan.widths) == [16, 16, 32, 32, 32, 40]  # the second layer needs no buffers of its own


def test_experts_add_to_what_they_read() -> None:
    plan = lower(decoder(mlp=MoE.Config(hidden_dim=16, experts=4)))
    assert [step.kind for step in plan.steps[1:5]] == ["linear", "attend", "linear", "experts"]
    experts = plan.steps[4]
    assert isinstance(experts, steps.Experts) and experts.add and experts.norm is not None and experts.src == experts.to


def test_equal_rotary_tables_are_kept_once() -> None:
    assert len(lower(decoder()).rotaries) == 1
    builder, x = start()
    for layer, (theta, gain) in enumerate([(1.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, 1.5)]):
        rotary = Rotation(np.full(2, theta, np.float32), gain)
        k, v = linear(builder, x, 4, f"k{layer}"), linear(builder, x, 4, f"v{layer}")
        common: dict[str, Any] = {"layer": layer, "owner": None, "heads": 2, "kv_heads": 1, "dim": 4, "scale": 0.5}
        x = builder.add(x, builder.attend(linear(builder, x, 8, f"q{layer}"), k, v, rotary=rotary, **common))
    plan, plain = finish(builder, x)
    assert [step.rotary for step in plan.steps if isinstance(step, steps.Attend)] == [0, 1, 0, 2]
    assert np.abs(scores(plan, [1, 2, 3]) - scores(plain, [1, 2, 3])).max() < 1e-4


@pytest.mark.parametrize("where", ["mixer.q", "mixer.k", "mixer.v", "mixer.o", "mlp.down", "all"])
@pytest.mark.parametrize("times", [1, 2])
def test_adapters_are_side_paths(where: str, times: int) -> None:
    model = decoder()
    places = ["mixer.q", "mixer.v", "mixer.o", "mlp.down"] if where == "all" else [where]
    for layer in model.stack.layers:
        for place in places * times:
            parent = layer.get_submodule(place.split(".")[0])
            setattr(parent, place.split(".")[1], Adapted(getattr(parent, place.split(".")[1])))
    plan = lower(model, stores="f32")
    assert plan.whole and not any(isinstance(step, steps.Add) for step in plan.steps)
    ids = [3, 1, 4, 1, 5, 9]
    with torch.inference_mode():
        expected = model(torch.tensor([ids]))[0].numpy()
        bare = lower(decoder(), stores="f32")
    assert np.abs(scores(plan, ids) - expected).max() < 1e-4
    assert np.abs(scores(lower(model, stores="f32", fused=False), ids) - expected).max() < 1e-4
    assert np.abs(scores(bare, ids) - expected).max() > 0.01  # the side path matters


def test_the_first_half_of_an_adapter_joins_its_main_path() -> None:
    model = decoder()
    mixer: Any = model.stack.layers[0].mixer
    mixer.q = Adapted(mixer.q)
    first = lower(model).steps[1]
    assert isinstance(first, steps.Linear) and first.norm is not None
    names = [output.matrix.tensor for output in first.outputs]
    assert [name.removeprefix("stack.layers.0.mixer.") for name in names] == [
        *("q.inner.weight", "q.a.weight", "k.weight", "v.weight")
    ]


def test_a_norm_that_others_read_stays_a_step() -> None:
    builder, x = start()
    normal = builder.norm(x, random(8), 1e-5, path="norm")
    y = builder.add(linear(builder, normal, 8, "w"), normal)
    plan, plain = finish(builder, y)
    assert [step.kind for step in plan.steps] == ["embed", "norm", "linear", "add", "head"]
    assert np.abs(scores(plan, [1, 2]) - scores(plain, [1, 2])).max() < 1e-4


def test_nothing_is_added_to_a_buffer_that_is_read_at_once() -> None:
    """x + W x: the map must not write where it reads."""
    builder, x = start()
    plan, plain = finish(builder, builder.add(x, linear(builder, x, 8, "w")))
    assert [step.kind for step in plan.steps] == ["embed", "linear", "add", "head"]
    assert np.abs(scores(plan, [5]) - scores(plain, [5])).max() < 1e-5


def test_what_is_read_later_is_not_added_to() -> None:
    builder, x = start()
    y = linear(builder, x, 8, "w")
    total = builder.add(y, x)
    last = builder.add(total, x)  # x once more: only y's buffer may take the first sum
    plan, plain = finish(builder, last)
    assert np.abs(scores(plan, [5, 7]) - scores(plain, [5, 7])).max() < 1e-5
    builder, x = start()
    y = linear(builder, x, 8, "w")
    total = builder.add(x, y)
    both = builder.add(builder.add(total, x), y)
    with pytest.raises(NoStep, match="before and after"):
        finish(builder, both)


def test_grouped_norms() -> None:
    builder, x = start()
    plan, plain = finish(builder, linear(builder, builder.norm(x, random(4), 1e-5, groups=2, path="norm"), 8, "w"))
    assert plan.steps[1] == plain.steps[1] and isinstance(plan.steps[1], steps.Normalise)
    table, weight, norm = packing_values(plan, "table"), packing_values(plan, "w"), plan.tensors["norm.weight"]
    parts = table[3].reshape(2, 4)
    normal = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-5) * norm
    expected = packing_values(plan, "head") @ (weight @ normal.reshape(8))
    assert np.abs(scores(plan, [3])[0] - expected).max() < 1e-4


def packing_values(plan: steps.Plan, name: str) -> np.ndarray:
    found = {
        matrix.tensor: matrix
        for step in plan.steps
        for matrix in (getattr(step, "matrix", None), *(output.matrix for output in getattr(step, "outputs", ())))
        if matrix is not None
    }[f"{name}.weight"]
    return Reference(plan, 1, 1).matrix(found)[0]


@given(st.data())
def test_any_straight_line_of_maps_means_the_same_fused(data: st.DataObject) -> None:
    """Random programs: norms, maps, gates, sums and clips of whatever values there are, or a refusal."""
    builder, x = start()
    values = [x]
    for number in range(data.draw(st.integers(1, 10))):
        kind = data.draw(st.sampled_from(["norm", "linear", "gate", "add", "clip", "low"]))
        one = data.draw(st.sampled_from(values))
        fitting = [value for value in values if value.width == one.width]
        if kind == "norm":
            values.append(builder.norm(one, random(one.width), 1e-3, path=f"n{number}"))
        elif kind == "linear":
            values.append(linear(builder, one, data.draw(st.sampled_from([4, 8])), f"w{number}"))
        elif kind == "gate":
            sides = [linear(builder, one, 8, f"{side}{number}") for side in ("g", "up")]
            values.append(builder.gate(*sides, "silu"))
        elif kind == "add":
            values.append(builder.add(one, data.draw(st.sampled_from(fitting))))
        elif kind == "clip":
            values.append(builder.clip(one, 0.5))
        else:
            onto = data.draw(st.sampled_from(fitting))
            a, b = random(2, one.width, seed=number), random(onto.width, 2, seed=number)
            values.append(builder.low_rank(one, a, b, 0.5, onto, path=f"l{number}"))
    builder.head(values[-1], _float_matrix(random(20, values[-1].width, seed=9)), path="head")
    try:
        plain = fuse(builder, fused=False)
    except NoStep:
        plain = None
    try:
        plan = fuse(builder)
    except NoStep:
        return
    if plain is not None:
        assert len(plan.steps) <= len(plain.steps)
        expected = scores(plain, [1, 7])
        assert np.abs(scores(plan, [1, 7]) - expected).max() <= 1e-3 * max(1.0, float(np.abs(expected).max()))
    check(plan)


def test_wrong_shapes_are_refused_by_name() -> None:
    builder, x = start()
    with pytest.raises(ConfigError, match=r"w: a weight 1 × \[8, 4\] on 8 values"):
        builder.linear(x, _float_matrix(random(8, 4)), path="w")
    with pytest.raises(ConfigError, match="norm"):
        builder.norm(x, random(3), 1e-5, path="n")
    with pytest.raises(ConfigError, match="added"):
        builder.add(x, linear(builder, x, 4, "w"))
    with pytest.raises(NoStep, match="tanh"):
        builder.gate(linear(builder, x, 4, "g"), linear(builder, x, 4, "up"), "tanh")
    with pytest.raises(ConfigError, match="two different tensors"):
        linear(builder, linear(builder, x, 8, "twice"), 4, "twice")


def test_stores_are_kept_as_asked() -> None:
    from orchard.cache.codecs import Int8

    assert {spec.codec for spec in lower(decoder(), stores="f32").stores} == {"f32"}
    assert {spec.codec for spec in lower(decoder()).stores} == {"bf16"}
    assert {spec.codec for spec in lower(decoder(store=Store.Config(codec=Int8.Config()))).stores} == {"int8"}
    with pytest.raises(ConfigError, match="int4"):
        lower(decoder(), stores="int4")


def test_an_int8_store_rounds_as_the_codec_does() -> None:
    from orchard.cache.codecs import Int8
    from orchard.core.context import Context

    model = decoder(store=Store.Config(codec=Int8.Config()))
    ids = [3, 1, 4, 1, 5, 9]
    with torch.inference_mode():
        context = Context(positions=torch.arange(6)[None], cache=model.cache(batch=1, length=6))
        expected = model(torch.tensor([ids]), context)[0].numpy()
        exact = model(torch.tensor([ids]))[0].numpy()
    assert np.abs(exact - expected).max() > 1e-3
    assert np.abs(scores(lower(model), ids) - expected).max() < 1e-4


def test_packed_matrices_have_the_size_the_layout_says() -> None:
    plan = lower(decoder())
    for step in plan.steps:
        if isinstance(step, steps.Gated):
            size = packing.matrix_bytes(step.gate.kind, step.gate.rows, step.gate.cols, step.gate.group, False)
            assert len(plan.tensors[step.gate.tensor]) == size
