"""Plans as JSON: exact there and back, and whatever is wrong with one is a `BadFile` before native code sees it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.errors import BadFile
from orchard.generate.lowering import lower
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack
from orchard.ops.plan import steps
from orchard.ops.plan.check import check
from orchard.ops.plan.file import from_json, to_json


def every_step() -> steps.Plan:
    """A plan with every kind of step in it."""
    torch.manual_seed(0)
    norms: Any = {"q_norm": RMSNorm.Config(), "k_norm": RMSNorm.Config()}

    def mixer(**changes: Any) -> Attention.Config:
        return Attention.Config(heads=4, kv_heads=2, head_dim=8, **changes)

    layers = [
        Block.Config(mixer=mixer(**norms), mlp=GatedMLP.Config(hidden_dim=40), mlp_out_norm=RMSNorm.Config()),
        Block.Config(
            mixer=mixer(
                **norms, norm_over="all", clip=0.5, store=Store.Config(policy=Window.Config(window=4, sinks=1))
            ),
            mlp=MoE.Config(hidden_dim=16, experts=4),
        ),
        Block.Config(
            mixer=mixer(store=Store.Config(owner=0), softcap=5.0, window=3), mlp=GatedMLP.Config(hidden_dim=40)
        ),
    ]
    layers[0].set("mixer.q.bias", True)
    model: Decoder = Decoder.Config(vocab=50, dim=32, context=64, stack=Stack.Config(layers=layers)).build()
    model.stack.layers[1].mixer.o.register_forward_hook(lambda module, args, y: y)
    return lower(model)


PLAN = every_step()
DATA = to_json(PLAN)


def test_the_example_has_every_kind_of_step() -> None:
    assert {step.kind for step in PLAN.steps} == {
        *("embed", "linear", "gated", "attend", "norm", "add", "clip", "experts", "narrow", "head", "torch")
    }


def test_there_and_back() -> None:
    written = json.loads(json.dumps(DATA, allow_nan=False))
    assert from_json(written, PLAN.tensors) == PLAN
    assert to_json(from_json(written, PLAN.tensors)) == DATA


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.5])
def test_other_versions_are_refused(version: Any) -> None:
    with pytest.raises(BadFile, match="version"):
        from_json({**DATA, "version": version}, PLAN.tensors)


@pytest.mark.parametrize("data", [None, [], "plan", 7, {}, {"version": 1}, {**DATA, "more": 1}])
def test_what_is_no_plan_is_refused(data: Any) -> None:
    with pytest.raises(BadFile):
        from_json(data, PLAN.tensors)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside a piece of JSON."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*path, key)
        yield from places(value, (*path, key))


PLACES = list(places(DATA))
JUNK = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 70), st.integers(), st.text(max_size=8)),
    *(st.floats(), st.just([]), st.just({}), st.lists(st.integers(-2, 9), max_size=3)),
    st.sampled_from(sorted(PLAN.tensors)),
    st.sampled_from([2**31, 2**63, 10**40, -1, 1e308, "q4", "f32", "silu"]),
)


def changed(data: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    copied = copy.deepcopy(data)
    parent = copied
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return copied


def check_reading(data: Any, tensors: dict[str, np.ndarray]) -> None:
    """Reading gives `BadFile`, or a plan that says exactly what was written; nothing else may happen."""
    try:
        plan = from_json(data, tensors)
    except BadFile as error:
        assert error.hint
        return
    check(plan)
    assert to_json(plan) == data


@given(st.sampled_from(PLACES), JUNK)
def test_a_changed_value(path: tuple[Any, ...], junk: Any) -> None:
    check_reading(changed(DATA, path, lambda parent, key: parent.__setitem__(key, junk)), PLAN.tensors)


@given(st.sampled_from(PLACES))
def test_a_missing_value(path: tuple[Any, ...]) -> None:
    data = changed(DATA, path, lambda parent, key: parent.pop(key))
    if isinstance(path[-1], str):
        with pytest.raises(BadFile):
            from_json(data, PLAN.tensors)
    else:
        check_reading(data, PLAN.tensors)


@given(st.data())
def test_steps_in_another_order(data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(DATA["steps"]))))
    check_reading({**DATA, "steps": [DATA["steps"][at] for at in order]}, PLAN.tensors)


@given(st.sampled_from(sorted(PLAN.tensors)), st.integers(0, 5))
def test_wrong_tensors(name: str, way: int) -> None:
    value = PLAN.tensors[name]
    wrong: dict[int, Any] = {
        0: value[:-1],
        1: np.concatenate([value, value[:1]]),
        2: value.astype(np.float64),
        3: value[None],
        4: np.concatenate([value, value])[::2],
    }
    if name.startswith("rotary"):
        way = max(way, 1)  # fewer frequencies turn fewer channels, which is sound
    tensors = {key: old for key, old in PLAN.tensors.items() if key != name}
    if way in wrong:
        tensors[name] = wrong[way]
    with pytest.raises(BadFile):
        from_json(DATA, tensors)


def step_of(kind: type) -> tuple[int, Any]:
    return next((index, step) for index, step in enumerate(PLAN.steps) if isinstance(step, kind))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (steps.Linear, {"src": 1}, "before it is written"),
        (steps.Linear, {"outputs": ()}, "missing"),
        (steps.Attend, {"kv_heads": 3}, "cannot share"),
        (steps.Attend, {"k": None}, "keys without values"),
        (steps.Attend, {"k": None, "v": None}, "before it is written"),
        (steps.Attend, {"scale": float("nan")}, "scale"),
        (steps.Attend, {"softcap": float("inf")}, "softcap"),
        (steps.Attend, {"store": 5}, "store"),
        (steps.Attend, {"rotary": 1}, "rotary"),
        (steps.Gated, {"activation": "tanh"}, "activation"),
        (steps.Gated, {"to": 0}, "at once"),
        (steps.Experts, {"k": 5}, "k is 5"),
        (steps.Normalise, {"groups": 3}, "divide"),
        (steps.Clip, {"bound": -1.0}, "bound"),
        (steps.Narrow, {"buffers": ()}, "missing"),
        (steps.Embed, {"to": 99}, "buffer"),
        (steps.Torch, {"node": ""}, "path"),
        (steps.Head, {"softcap": -1.0}, "softcap"),
    ],
)
def test_each_number_is_held_against_the_others(kind: type, changes: dict[str, Any], words: str) -> None:
    index, step = step_of(kind)
    plan = replace(PLAN, steps=[*PLAN.steps])
    plan.steps[index] = replace(step, **changes)
    with pytest.raises(BadFile, match=words):
        check(plan)


def test_a_plan_begins_and_ends_as_it_must() -> None:
    for wrong in (PLAN.steps[1:], PLAN.steps[:-1], [], [*PLAN.steps, PLAN.steps[-1]]):
        with pytest.raises(BadFile):
            check(replace(PLAN, steps=list(wrong)))


def test_no_store_is_written_after_rows_were_dropped() -> None:
    index, narrow = step_of(steps.Narrow)
    first, _ = step_of(steps.Attend)
    moved = [step for step in PLAN.steps if step is not narrow]
    moved.insert(first, steps.Narrow((0, *(getattr(PLAN.steps[first], side) for side in "qkv"))))
    with pytest.raises(BadFile, match="dropped"):
        check(replace(PLAN, steps=moved))
    assert index > first
