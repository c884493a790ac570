"""Learned levels: the values that packed formats keep, gradients as LSQ has them, and scales that begin at the best there are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.formats import Int2, Int4, Int8, Learned
from orchard.nn.formats.learned import DEAD
from orchard.nn.formats.learned_scales import best_scales
from orchard.nn.linear import Embedding, GroupedLinear, Linear

CASES: dict[str, Any] = {
    "two": Learned.Config(bits=2, group=8),
    "two, rows": Learned.Config(bits=2, group=None),
    "four": Learned.Config(bits=4, group=8),
    "four, rows": Learned.Config(bits=4, group=None),
    "four, upright": Learned.Config(bits=4, group=8, flip=False),
    "eight": Learned.Config(bits=8, group=8),
    "eight, wide scales": Learned.Config(bits=8, group=None, half=False),
}
UNBALANCED = Learned.Config(bits=2, group=8, levels="unbalanced")


def formed(cfg: Any) -> Learned:
    made: Learned = cfg.build()
    return made


def values(form: Learned, packed: dict[str, Tensor]) -> Tensor:
    return form.unpack(packed, torch.float32)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(-6, 3), st.floats(-3, 3))
def test_packing_changes_no_value(name: str, seed: int, size: float, drift: float) -> None:
    """Also after scales and weights went elsewhere in training, with dead groups and values of all sizes."""
    form, random = formed(CASES[name]), torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 5, 16, generator=random) * 10.0**size
    weight[0, 1] = 0
    weight[1, :, :8] *= 1e-4
    packed = form.pack(weight)
    packed["weight"] = packed["weight"] + 0.1 * 10.0**size * torch.randn(weight.shape, generator=random)
    packed["log_scale"] = packed["log_scale"] + drift * torch.randn(packed["log_scale"].shape, generator=random)
    cfg, kept = form.packed_as(packed)
    dense = cfg.build().unpack(kept, torch.float32)
    assert torch.equal(dense, values(form, packed)) and dense.isfinite().all()
    assert {name: part.shape for name, part in cfg.build().layout((3, 5, 16)).items()} == {
        name: tuple(part.shape) for name, part in kept.items()
    }


def test_the_levels_are_what_they_are_called() -> None:
    weight, ten = torch.linspace(-40, 40, 16)[None], math.log(10.0)
    levels = {}
    for name, cfg in {"balanced": CASES["two, rows"], "unbalanced": UNBALANCED.clone(group=None)}.items():
        parts = {"weight": weight, "log_scale": torch.full((1, 1), ten), "sign": torch.ones(1, 1, dtype=torch.int8)}
        levels[name] = sorted(set(values(formed(cfg), parts)[0].tolist()))
    assert levels == {"balanced": [-15.0, -5.0, 5.0, 15.0], "unbalanced": [-20.0, -10.0, 0.0, 10.0]}


def test_scales_are_used_as_they_are_packed() -> None:
    parts = {"weight": torch.randn(2, 16), "log_scale": torch.full((2, 2), math.log(0.3))}
    exact, rounded = formed(CASES["two"].clone(half=False)), formed(CASES["two"])
    assert rounded.scales(parts).unique().tolist() == [torch.tensor(0.3).half().item()]
    assert exact.scales(parts).unique().tolist() == pytest.approx([0.3], rel=1e-6)


@pytest.mark.parametrize("name", [*CASES, "unbalanced"])
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_those_of_the_expression_with_rounding_left_out(name: str, scaled: bool) -> None:
    cfg = (UNBALANCED if name == "unbalanced" else CASES[name]).clone(scaled=scaled)
    form = formed(cfg)
    torch.manual_seed(0)
    packed = {
        part: value.requires_grad_() if value.is_floating_point() else value
        for part, value in form.pack(torch.randn(6, 16)).items()
    }
    g = torch.randn(6, 16)
    trained = [packed["weight"], packed["log_scale"]]
    made = values(form, packed)
    got = torch.autograd.grad(made, trained, g)
    scale = packed["log_scale"].exp()
    scale = scale + (form.scales(packed).abs() - scale).detach()
    scale = (scale if "sign" not in packed else scale * packed["sign"])[..., None]
    places = packed["weight"].unflatten(-1, (scale.shape[-2], -1)) / scale + form.zero
    rounded = places + (places.round() - places).detach()
    plain = ((rounded.clamp(0, form.top) - form.zero) * scale).flatten(-2)
    assert torch.allclose(plain, made, atol=1e-6)
    of_weight, of_scale = torch.autograd.grad(plain, trained, g)
    width = 16 if cfg.group is None else 8
    factor = (width * max(form.zero, form.top - form.zero)) ** -0.5 if scaled else 1.0
    assert torch.allclose(got[0], of_weight) and torch.allclose(got[1], of_scale * factor, atol=1e-5, rtol=1e-3)
    assert (got[0] == 0).any() or cfg.bits > 2  # somebody lies outside


@pytest.mark.parametrize("sign", [1, -1])
def test_what_weights_outside_get(sign: int) -> None:
    weight = torch.tensor([[-100.0, -100.0, 0.2, 0.2, 100.0, 100.0, 0.1, 0.3]])
    g = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]])
    wanted = {"stop": [0, 0, 1, -1, 0, 0, 1, -1], "inward": [0, -1, 1, -1, 1, 0, 1, -1], "pass": g[0].tolist()}
    for outside, want in wanted.items():
        form = formed(Learned.Config(bits=4, group=8, outside=outside))
        packed = {"weight": weight.clone().requires_grad_(), "log_scale": torch.zeros(1, 1)}
        packed["sign"] = torch.full((1, 1), sign, dtype=torch.int8)
        assert torch.autograd.grad(values(form, packed), packed["weight"], g)[0][0].tolist() == want


def test_a_dead_group_stays_dead_and_harms_nobody() -> None:
    for cfg in (CASES["two"], CASES["four"], CASES["two"].clone(half=False)):
        form = formed(cfg)
        weight = torch.randn(4, 16)
        weight[2, :8] = 0
        packed = {n: v.requires_grad_() if v.is_floating_point() else v for n, v in form.pack(weight).items()}
        assert packed["log_scale"][2, 0] == DEAD and (packed["log_scale"] > -10).sum() == 7
        made = values(form, packed)
        assert (made[2, :8] == 0).all() and (made[2, 8:] != 0).any()
        of_weight, of_scale = torch.autograd.grad(made.sum(), [packed["weight"], packed["log_scale"]])
        assert (of_weight[2, :8] == 0).all() and of_scale[2, 0] == 0 and of_weight[0].abs().sum() > 0
        average = packed["log_scale"].detach().clone().lerp_(packed["log_scale"].detach(), 0.1)
        assert average.isfinite().all()


def test_what_is_not_finite_shows_in_its_group_alone() -> None:
    weight = torch.randn(3, 16)
    weight[1, 3], weight[2, 9] = float("nan"), float("inf")
    for cfg in CASES.values():
        made = values(formed(cfg), formed(cfg).pack(weight))
        broken = made.isnan().unflatten(-1, (-1, 8)).all(-1)
        rows = cfg.group is None
        assert broken.tolist() == [[False, False], [True, rows], [rows, True]]


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 4, 8]), st.sampled_from(["normal", "heavy", "one-sided"]))
def test_first_scales_are_no_worse_than_those_of_packed_formats(seed: int, bits: int, kind: str) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 64, generator=random)
    weight = weight.pow(3) if kind == "heavy" else weight.abs() + 0.1 if kind == "one-sided" else weight
    form: Any = {2: Int2.Config(group=32), 4: Int4.Config(group=32), 8: Int8.Config(group=32, half=True)}[bits].build()
    learned = formed(Learned.Config(bits=bits, group=32))
    mine, theirs = ((one.unpack(one.pack(weight), torch.float32) - weight).square().sum() for one in (learned, form))
    assert mine <= theirs * 1.01  # grids differ


def test_importance_moves_the_error_to_where_it_costs_least() -> None:
    torch.manual_seed(1)
    weight, weighs = torch.randn(64, 64), torch.rand(64).pow(4) * 50
    form = formed(Learned.Config(bits=2, group=64))
    plain, heeded = (values(form, form.pack(weight, one)) - weight for one in (None, weighs))
    assert (heeded.square() * weighs).sum() < 0.97 * (plain.square() * weighs).sum()
    assert heeded.square().sum() > plain.square().sum()
    silent = form.pack(weight, torch.zeros(64))
    assert silent["log_scale"].isfinite().all() and values(form, silent).isfinite().all()


def test_a_search_finds_the_best_scale_of_a_fine_grid() -> None:
    torch.manual_seed(2)
    rows = torch.randn(20, 32)
    found = best_scales(rows, zero=1.5, bits=2, half=False)
    grid = torch.linspace(0.2, 2.5, 1500)[:, None, None]
    errors = (((rows / grid + 1.5).round().clamp(0, 3) - 1.5) * grid - rows).square().sum(-1)
    mine = (((rows / found[:, None] + 1.5).round().clamp(0, 3) - 1.5) * found[:, None] - rows).square().sum(-1)
    assert (mine <= errors.min(0).values * 1.03).all() and mine.sum() <= errors.min(0).values.sum() * 1.005


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"bits": 3}, {"levels": "odd"}, {"bits": 4, "levels": "unbalanced"}, {"outside": "back"}):
        with pytest.raises(ConfigError):
            Learned.Config(**wrong).build()
    with pytest.raises(ConfigError, match="do not divide a width of 20"):
        Linear.Config(in_dim=20, out_dim=4, format=Learned.Config(group=8)).build()
    with pytest.raises(UnsupportedPair, match="unbalanced"):
        formed(UNBALANCED).packed_as(formed(UNBALANCED).pack(torch.randn(2, 8)))
    with pytest.raises(UnsupportedPair, match="half"):
        Learned.Config(bits=2, half=False).packed()
    with pytest.raises(ConfigError, match="unbalanced"):
        Int2.Config(levels="unbalanced").build()


# In modules -----------------------------------------------------------------------------------------------------------


def test_tables_and_experts_compute_with_levels() -> None:
    torch.manual_seed(0)
    table: Embedding = Embedding.Config(vocab=9, dim=16, scale=2.0, format=CASES["four"]).build()
    ids, x = torch.tensor([[1, 8, 1]]), torch.randn(3, 16)
    assert torch.equal(table(ids, torch.float32), 2 * table.dense()[ids])
    assert torch.allclose(table.scores(x), x @ table.dense().T, atol=1e-6)
    (table(ids, torch.float32).sum() + table.scores(x).sum()).backward()
    assert table.weight.grad.abs().sum() > 0 and table.log_scale.grad.abs().sum() > 0  # type: ignore[union-attr]
    experts: GroupedLinear = GroupedLinear.Config(count=3, in_dim=16, out_dim=4, format=CASES["two"]).build()
    assert torch.allclose(experts(x, 1), x @ experts.dense()[1].T, atol=1e-6)
    experts(x, 1).sum().backward()
    grad: Any = experts.log_scale.grad
    assert grad[1].abs().sum() > 0 and grad[0].abs().sum() == 0


def test_autocast_casts_the_values_and_leaves_the_weight_alone() -> None:
    map_: Any = Linear.Config(in_dim=16, out_dim=4, format=CASES["two"]).build()
    x = torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = map_(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, x.bfloat16() @ map_.dense(torch.bfloat16).T)
    y.float().sum().backward()
    assert map_.weight.dtype == map_.weight.grad.dtype == map_.log_scale.grad.dtype == torch.float32


def test_nothing_but_the_parameters_is_kept_for_the_backward_pass() -> None:
    form = formed(CASES["two"])
    packed = {name: value.requires_grad_() for name, value in form.pack(torch.randn(8, 16)).items()}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        values(form, packed)
    assert {tensor.data_ptr() for tensor in kept} == {value.data_ptr() for value in packed.values()}


def test_one_graph_for_the_compiler() -> None:
    torch.manual_seed(0)
    map_: Any = Linear.Config(in_dim=16, out_dim=4, format=CASES["four"]).build()
    x = torch.randn(5, 16)
    whole = torch.compile(map_, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        plain, made = map_(x), whole(x)
    assert made.dtype == plain.dtype == torch.bfloat16 and torch.equal(made, plain)
    trained = [map_.weight, map_.log_scale]
    for one, other in zip(*(torch.autograd.grad(y.float().square().sum(), trained) for y in (plain, made))):
        assert torch.allclose(one, other, atol=1e-5)


def test_the_engine_reads_a_weight_in_training_as_if_it_were_packed() -> None:
    map_: Any = Linear.Config(in_dim=64, out_dim=8, format=Learned.Config(bits=2, group=None)).build()
    cfg, kept = map_.format.packed_as(map_.packed())
    native, same = map_.native(), cfg.build().native(kept, (8, 64))
    assert (native.kind, native.group) == (same.kind, same.group) == ("q2", 64)
    assert native.data.tobytes() == same.data.tobytes()
