"""DoRA in plans: rows with a gain, run unmerged by every engine as the torch model has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import BadFile, ConfigError, UnsupportedPair
from orchard.generate.cuda.runner import CudaRunner
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.protocol import Work
from orchard.models.language.decoder import Decoder
from orchard.nn.formats import Int2, Int4, Int8
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.ops.plan import steps
from orchard.ops.plan.adapt import adapted, parts
from orchard.ops.plan.check import check
from orchard.ops.plan.early import early_plan
from orchard.ops.plan.file import from_json, to_json
from orchard.ops.plan.text import describe
from orchard.transforms.lora import with_sides
from tests.ops.test_plan_adapt import EXACT, IDS, Sides, linears, plain_scores, random_sides, small, torch_scores, worst


def random_lengths(shapes: dict[str, tuple[int, ...]], seed: int = 5) -> dict[str, np.ndarray]:
    make = np.random.default_rng(seed)
    return {path: make.uniform(0.5, 1.5, shape[0]).astype(np.float32) for path, shape in shapes.items()}


def dora(model: Decoder, rank: int = 3) -> tuple[Sides, dict[str, np.ndarray]]:
    shapes = linears(model)
    return random_sides(shapes, rank), random_lengths(shapes)


def test_every_engine_scores_as_torch_does() -> None:
    model = small()
    sides, lengths = dora(model)
    twin = with_sides(model, sides, None, lengths)
    want = torch_scores(twin)
    assert worst(torch_scores(with_sides(model, sides)), want) > 0.1  # lengths do something
    for plan in (adapted(lower(model, stores="f32"), sides, None, lengths), lower(twin, stores="f32")):
        assert plan.whole and worst(plain_scores(plan), want) < EXACT
        for level in (0, 1, 2):
            native = NativeRunner(plan, level=level)
            assert worst(native.scores(IDS), want) < EXACT
        run = native.begin([IDS[:7], IDS[2:4]], length=len(IDS))
        run.read(0, 7)
        assert worst(run.first()[0], want[6]) < EXACT
        assert worst(run.step([IDS[7], 3])[0], want[7]) < EXACT
        slots = CudaRunner(plan, device="cpu").slots(1)
        slots.open(0, len(IDS))
        got = np.concatenate(slots.run([Work(0, IDS, len(IDS), True)]))
        assert worst(got, want) < 0.02 * float(np.abs(want).max())  # its stores are bfloat16


def test_a_gain_stands_before_the_bias_and_beside_what_it_is_added_to() -> None:
    """The rows of `o` and `down` are added to the residual in place: only they have the gain, neither it nor the bias."""
    tree = small().config.rewrite(Linear, lambda node: node.clone(bias=True), "stack.*")
    torch.manual_seed(4)
    model: Decoder = tree.build().eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.5) if name.endswith("bias") else parameter.mul_(6 if parameter.dim() > 1 else 1)
    sides, lengths = dora(model)
    want = torch_scores(with_sides(model, sides, None, lengths))
    plan = adapted(lower(model, stores="f32"), sides, None, lengths)
    scaled = [output for step in plan.steps if isinstance(step, steps.Linear) for output in step.outputs if output.gain]
    assert len(scaled) == len(sides) and {output.add for output in scaled} == {True, False}
    assert worst(plain_scores(plan), want) < EXACT
    assert worst(NativeRunner(plan, level=2).scores(IDS), want) < EXACT
    assert worst(NativeRunner(plan, level=0).scores(IDS), want) < EXACT


@pytest.mark.parametrize(
    "packed", [Int8.Config(group=32, half=True), Int4.Config(group=32, minimum=True), Int2.Config(group=32)]
)
def test_beside_packed_weights(packed: Any) -> None:
    model = small(GatedMLP.Config(hidden_dim=64))
    model = model.config.rewrite(Linear, lambda node: node.clone(format=packed)).build().eval().requires_grad_(False)
    sides, lengths = dora(model)
    plan = adapted(lower(model, stores="f32"), sides, None, lengths, kind="f32")
    want = torch_scores(with_sides(model, sides, None, lengths))
    assert worst(plain_scores(plan), want) < EXACT
    assert worst(NativeRunner(plan, level=2).scores(IDS), want) < 0.005 * float(np.abs(want).max())  # rounded inputs


@settings(max_examples=20)
@given(st.data())
def test_any_choice_of_maps(data: st.DataObject) -> None:
    """Side paths with and without lengths of their own, of any rank, in one plan."""
    model = small(head=None)
    shapes = {path: shape for path, shape in linears(model).items() if data.draw(st.booleans())}
    sides = {}
    for number, (path, shape) in enumerate(shapes.items()):
        sides |= random_sides({path: shape}, data.draw(st.integers(1, 40)), seed=number)
    lengths = random_lengths({path: shape for path, shape in shapes.items() if data.draw(st.booleans())})
    plan = adapted(lower(model, stores="f32"), sides, None, lengths)
    want = torch_scores(with_sides(model, sides, None, lengths))
    bound = EXACT * max(1.0, float(np.abs(want).max()))
    assert worst(plain_scores(plan), want) < bound
    assert worst(NativeRunner(plan, level=2).scores(IDS), want) < bound


def test_a_row_has_the_same_bits_alone_and_in_company() -> None:
    model = small()
    sides, lengths = dora(model)
    runner = NativeRunner(adapted(lower(model), sides, None, lengths))
    both = runner.begin([IDS, IDS[3:9]], length=20)
    both.read(0, len(IDS))
    alone = runner.begin([IDS], length=20)
    alone.read(0, len(IDS))
    assert np.array_equal(both.first()[0], alone.first()[0])
    assert np.array_equal(both.step([4, 5])[0], alone.step([4])[0])


def test_the_base_is_still_seen_as_what_it_is() -> None:
    model = small()
    sides, lengths = dora(model)
    plan = lower(model)
    for other in (adapted(plan, sides, None, lengths), lower(with_sides(model, sides, None, lengths))):
        assert parts(other)[0] == parts(plan)[0]


def test_written_and_read_again() -> None:
    model = small()
    plan = adapted(lower(model, stores="f32"), *_with(dora(model)))
    again = from_json(to_json(plan), plan.tensors)
    assert again.steps == plan.steps
    assert "rows scaled" in " ".join(entry["what"] for entry in describe(plan))
    assert "gain" not in str(to_json(lower(model))["steps"])  # plans without are what they were
    early = early_plan(plan, 1)
    assert (
        sum(
            output.gain is not None for step in early.steps if isinstance(step, steps.Linear) for output in step.outputs
        )
        == 7
    )
    check(early)


def test_a_damaged_gain_is_refused() -> None:
    model = small()
    plan = adapted(lower(model), *_with(dora(model)))
    name = next(name for name in plan.tensors if name.endswith(".gain"))
    for bad in (plan.tensors[name][:-1], plan.tensors[name].astype(np.float64), None):
        tensors = {key: value for key, value in (plan.tensors | {name: bad}).items() if value is not None}
        with pytest.raises(BadFile, match="gain"):
            check(replace(plan, tensors=tensors))


def test_what_does_not_go_together_is_refused_by_name() -> None:
    model = small()
    plan = lower(model)
    sides, lengths = dora(model)
    path = "stack.layers.0.mixer.q"
    one, own = {path: sides[path]}, {path: lengths[path]}
    with pytest.raises(UnsupportedPair, match=rf"{path}.*DoRA"):
        adapted(plan, {path: sides[path] * 2}, None, own)
    with pytest.raises(UnsupportedPair, match=rf"{path}.*DoRA"):
        adapted(adapted(plan, one), one, None, own)
    with pytest.raises(UnsupportedPair, match=rf"{path}.*DoRA"):
        adapted(adapted(plan, one, None, own), one)
    with pytest.raises(UnsupportedPair, match=rf"{path}.*DoRA"):
        adapted(lower(with_sides(model, one, None, own)), one)
    with pytest.raises(ConfigError, match=rf"{path}.*without"):
        adapted(plan, {}, None, own)
    with pytest.raises(ConfigError, match=rf"{path}.*\(3,\)"):
        adapted(plan, one, None, {path: np.ones(3, np.float32)})


def _with(found: tuple[Sides, dict[str, np.ndarray]]) -> tuple[Any, ...]:
    return found[0], None, found[1]
