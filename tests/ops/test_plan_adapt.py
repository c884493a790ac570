"""Adapted plans: the same scores as the torch model with the same side paths, on the same tensors, for every family."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import orchard
from orchard.cache.store import Store
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.formats import Int4, Int8
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.stack import Block, Stack
from orchard.ops.plan import steps
from orchard.ops.plan.adapt import SHARED_RANKS, adapted, parts
from orchard.ops.plan.check import check
from orchard.ops.plan.reference import Reference
from orchard.session.adapters import Adapters
from orchard.transforms.lora import with_sides
from orchard.weights.adapters import Side, write_adapter
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from tests.parity.families import CASES, reference, save

EXACT = 1e-4
IDS = [5, 17, 3, 38, 41, 2, 9, 20, 33, 7, 11, 12]
Sides = dict[str, list[Any]]


def linears(model: Decoder) -> dict[str, tuple[int, ...]]:
    """The maps that adapters go beside."""
    found = {path: module.shape for path, module in model.named_modules() if type(module) is Linear}
    return {path: shape for path, shape in found.items() if path != "head" and ".router." not in path}


def random_sides(shapes: dict[str, tuple[int, ...]], *ranks: int, seed: int = 0) -> Sides:
    make = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        return make.normal(size=shape).astype(np.float32) * np.float32(0.3)

    return {path: [(some(r, i), some(o, r), 0.7) for r in ranks] for path, (o, i) in shapes.items()}


def small(mlp: Any = None, stores: Any = (None, None), **more: Any) -> Decoder:
    torch.manual_seed(1)
    layers = [
        Block.Config(
            mixer=Attention.Config(heads=4, kv_heads=2, head_dim=8, store=store or Store.Config()),
            mlp=(mlp or GatedMLP.Config(hidden_dim=40)).clone(),
        )
        for store in stores
    ]
    model: Decoder = Decoder.Config(vocab=50, dim=32, context=64, stack=Stack.Config(layers=layers), **more).build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def torch_scores(model: Decoder, ids: list[int] = IDS) -> np.ndarray:
    return model(torch.tensor([ids]))[0].float().numpy()


def plain_scores(plan: steps.Plan, ids: list[int] = IDS) -> np.ndarray:
    return Reference(plan, 1, len(ids)).run(ids, [0] * len(ids), range(len(ids)), range(len(ids)))


def worst(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max())


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_family_scores_as_its_torch_model_does(case: str, tmp_path: Any) -> None:
    with open_checkpoint(save(reference(case), tmp_path)) as checkpoint:
        model = load_decoder(checkpoint)
    sides = random_sides(linears(model), 3, 5)
    plan = lower(model, stores="f32")
    beside = adapted(plan, sides)
    want = torch_scores(with_sides(model, sides))
    assert worst(torch_scores(model), want) > 0.1  # the side paths do something
    assert worst(plain_scores(beside), want) < EXACT
    for level in (0, 2):
        native = NativeRunner(beside, level=level)
        assert worst(native.scores(IDS), want) < EXACT
    run = native.begin([IDS[:7], IDS[2:4]], length=len(IDS))
    run.read(0, 7)
    assert worst(run.first()[0], want[6]) < EXACT
    assert worst(run.step([IDS[7], 3])[0], want[7]) < EXACT


def test_no_tensor_of_the_plan_is_copied_or_changed() -> None:
    model = small()
    plan = lower(model)
    before = {name: tensor.copy() for name, tensor in plan.tensors.items()}
    count, widths = len(plan.steps), list(plan.widths)
    beside = adapted(plan, random_sides(linears(model), 4))
    assert all(beside.tensors[name] is tensor for name, tensor in plan.tensors.items())
    assert all(np.array_equal(plan.tensors[name], tensor) for name, tensor in before.items())
    assert (len(plan.steps), plan.widths) == (count, widths)
    own = [tensor.nbytes for name, tensor in beside.tensors.items() if name not in plan.tensors]
    assert len(own) == len(linears(model)) + 2 * 4  # one B each, and one A for each of four steps of two layers
    assert parts(beside)[0] == parts(plan)[0]


def test_a_layer_has_one_step_more_for_every_step_with_side_paths() -> None:
    model = small()
    kinds = [step.kind for step in adapted(lower(model), random_sides(linears(model), 4)).steps]
    layer = ["linear", "linear", "attend", "linear", "linear", "linear", "linear", "gate", "linear", "linear"]
    assert [kind for kind in kinds if kind != "narrow"] == ["embed", *layer, *layer, "head"]
    only_o = [step.kind for step in adapted(lower(model), random_sides({"stack.layers.0.mixer.o": (32, 32)}, 4)).steps]
    assert only_o.count("gated") == 2 and only_o.count("linear") == 7


def test_large_ranks_get_an_a_of_their_own() -> None:
    model = small()
    shapes, rank = linears(model), SHARED_RANKS // 2
    beside = adapted(lower(model, stores="f32"), random_sides(shapes, rank))
    q_k_v = next(step for step in beside.steps if isinstance(step, steps.Linear))
    assert [output.matrix.rows for output in q_k_v.outputs] == [32, 16, 16, rank, rank, rank]
    assert worst(plain_scores(beside), torch_scores(with_sides(model, random_sides(shapes, rank)))) < EXACT * 20


def test_adapting_twice_is_adapting_together() -> None:
    model = small()
    one, other = random_sides(linears(model), 2, seed=1), random_sides(linears(model), 3, seed=2)
    plan = lower(model, stores="f32")
    together = adapted(plan, {path: one[path] + other[path] for path in one})
    twice = adapted(adapted(plan, one), other)
    want = torch_scores(with_sides(with_sides(model, one), other))
    assert worst(plain_scores(together), want) < EXACT
    assert worst(plain_scores(twice), want) < EXACT
    assert worst(NativeRunner(twice, level=2).scores(IDS), want) < EXACT


@settings(max_examples=25)
@given(st.data())
def test_any_choice_of_maps_ranks_and_kinds(data: st.DataObject) -> None:
    owner = data.draw(st.sampled_from([None, Store.Config(owner=0)]))  # with it the plan drops rows early
    model = small(stores=(None, owner), head=None)
    shapes = {path: shape for path, shape in linears(model).items() if data.draw(st.booleans())}
    sides: Sides = {}
    for number, (path, shape) in enumerate(shapes.items()):
        sides |= random_sides({path: shape}, *data.draw(st.lists(st.integers(1, 40), max_size=3)), seed=number)
    plan = lower(model, stores="f32")
    beside = adapted(plan, sides, kind=data.draw(st.sampled_from([None, "f32"])))
    check(beside)
    sides = {path: found for path, found in sides.items() if found}
    want = torch_scores(with_sides(model, sides))
    bound = EXACT * max(1.0, float(np.abs(want).max()))
    assert worst(plain_scores(beside), want) < bound
    assert worst(NativeRunner(beside, level=2).scores(IDS), want) < bound


@pytest.mark.parametrize("packed", [Int8.Config(group=32, half=True), Int4.Config(group=32, minimum=True)])
def test_beside_packed_weights_they_are_kept_in_half_the_bits(packed: Any) -> None:
    model = small(GatedMLP.Config(hidden_dim=64))
    model = model.config.rewrite(Linear, lambda node: node.clone(format=packed)).build().eval().requires_grad_(False)
    sides = random_sides(linears(model), 4)
    beside = adapted(lower(model, stores="f32"), sides)
    new = [m for step in beside.steps if isinstance(step, steps.Linear) for m in (o.matrix for o in step.outputs)]
    assert {matrix.kind for matrix in new if ".lora" in matrix.tensor} == {"bf16"}
    want = torch_scores(with_sides(model, sides))
    assert worst(plain_scores(beside), want) < 0.02 * float(np.abs(want).max())
    assert worst(plain_scores(adapted(lower(model, stores="f32"), sides, kind="f32")), want) < EXACT


def test_biases_stand_in_for_those_of_the_model() -> None:
    model = small()
    tree = model.config.rewrite(Linear, lambda node: node.clone(bias=True), "stack.*")
    torch.manual_seed(4)
    model = tree.build().eval().requires_grad_(False)
    shapes = linears(model)
    make = np.random.default_rng(0)
    biases = {path: [make.normal(size=shape[0]).astype(np.float32)] for path, shape in shapes.items()}
    plan = lower(model, stores="f32")
    assert worst(plain_scores(adapted(plan, {}, biases)), torch_scores(with_sides(model, {}, biases))) < EXACT
    own = {path: [parts(plan)[1][f"{path}.bias"]] for path in shapes}
    assert worst(plain_scores(adapted(plan, {}, own)), plain_scores(plan)) < EXACT
    both = {path: [*biases[path], *own[path]] for path in shapes}  # what is no change counts for nothing
    sides = random_sides(shapes, 2)
    want = torch_scores(with_sides(model, sides, biases))
    assert worst(plain_scores(adapted(plan, sides, both)), want) < EXACT


def test_a_module_in_torch_is_left_to_torch() -> None:
    model = small()
    model.stack.layers[1].mlp.gate.register_forward_hook(lambda *_: None)  # which only torch calls
    plan = lower(model, stores="f32")
    assert not plan.whole
    sides = random_sides(linears(model), 3)
    variant = with_sides(model, sides)
    beside = adapted(plan, sides)
    native = NativeRunner(beside, decoder=lambda: variant, level=2)
    assert worst(native.scores(IDS), torch_scores(variant)) < EXACT


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp.gate", "mlp.up", "mlp.down", "mlp.router.gate"])
def test_experts_are_refused_by_name(name: str) -> None:
    plan = lower(small(MoE.Config(hidden_dim=16, experts=4)))
    with pytest.raises(UnsupportedPair, match=rf"stack\.layers\.1\.{name}.*'experts'"):
        adapted(plan, random_sides({f"stack.layers.1.{name}": (16, 32)}, 2))


@pytest.mark.parametrize("name", ["head", "embedding.weight"])
def test_heads_and_embeddings_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedPair, match=name.split(".")[0]):
        adapted(lower(small()), random_sides({name: (50, 32)}, 2))


def test_what_is_not_there_or_does_not_fit_is_refused_by_name() -> None:
    plan = lower(small())
    with pytest.raises(ConfigError, match=r"stack\.layers\.7\.mixer\.q"):
        adapted(plan, random_sides({"stack.layers.7.mixer.q": (32, 32)}, 2))
    with pytest.raises(ConfigError, match=r"stack\.layers\.0\.mixer\.q"):
        adapted(plan, random_sides({"stack.layers.0.mixer.q": (32, 31)}, 2))
    with pytest.raises(ConfigError, match="bias"):
        adapted(plan, {}, {"stack.layers.0.mixer.q": [np.zeros(3, np.float32)]})
    with pytest.raises(ConfigError, match="q4"):
        adapted(plan, {}, kind="q4")


def test_no_side_paths_is_the_same_plan() -> None:
    plan = lower(small())
    same = adapted(plan, {"stack.layers.0.mixer.q": []})
    assert same.steps == plan.steps and same.widths == plan.widths and same.tensors == plan.tensors


# The default model ----------------------------------------------------------------------------------------------------


def random_adapter(adapters: Adapters, path: Path, rank: int) -> Path:
    shapes = {name.removesuffix(".weight"): shape for name, shape in adapters.base.shapes.items() if len(shape) == 2}
    made = random_sides({name: shape for name, shape in shapes.items() if "layers" in name}, rank)
    write_adapter(path, {name: Side(a / 10, b / 10, 2.0) for name, [(a, b, _)] in made.items()}, adapters.base)
    return path


@pytest.mark.long
@pytest.mark.real
def test_the_default_model_with_an_adapter_is_its_float32_reading_with_it(smollm2: Path, tmp_path: Path) -> None:
    """The bounds are those of the engine's benchmark, which is about the model alone, with room for so few tokens."""
    from orchard.bench.quality import agreement, prefill_scores, step_scores
    from orchard.bench.texts import TEXTS

    model = orchard.load(smollm2)
    adapters = Adapters(model)
    name = adapters.load(random_adapter(adapters, tmp_path / "one", 16))
    variant = adapters.model((name,))
    assert model.plan is not None and variant.plan is not None
    assert all(variant.plan.tensors[key] is tensor for key, tensor in model.plan.tensors.items())
    texts = [model.tokenizer.encode(text)[:60] for text in TEXTS[:2]]

    def exact(ids: Any) -> np.ndarray:
        return variant.logits(ids)[0].numpy()

    def read(ids: Any) -> np.ndarray:
        return prefill_scores(variant.runner, ids)

    def stepped(ids: Any) -> np.ndarray:
        return step_scores(variant.runner, ids)

    changed = agreement(exact, lambda ids: prefill_scores(model.runner, ids), texts)
    assert changed.nats > 0.05  # the adapter matters
    for way in (read, stepped):
        found = agreement(exact, way, texts)
        assert found.share >= 0.98 and found.nats <= 1e-3, found


@pytest.mark.real
def test_an_adapter_needs_no_torch(smollm2: Path, tmp_path: Path) -> None:
    model = orchard.load(smollm2)
    path = random_adapter(Adapters(model), tmp_path / "one", 4)
    program = (
        "import sys, orchard\n"
        "from orchard.session.adapters import Adapters\n"
        "adapters = Adapters(orchard.load(sys.argv[1]))\n"
        "model = adapters.model((adapters.load(sys.argv[2]),))\n"
        "print(len(model.generate('Hello', max_tokens=4).ids))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(smollm2), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4"
