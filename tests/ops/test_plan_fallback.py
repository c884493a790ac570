"""What has no native form runs in torch, by node and with the reason; everything round it stays native and right."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orchard.cache.codecs import Plain as PlainCodec
from orchard.cache.policies import KeepAll, Window
from orchard.cache.store import Store
from orchard.core.config import BaseConfig, Config, Configurable, config
from orchard.core.context import Context
from orchard.generate.lowering import lower
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.formats import Format
from orchard.nn.formats.base import NotLowered, Packed, PackedPart
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack
from orchard.ops.plan import steps
from orchard.ops.plan.reference import Reference
from tests.matrix import axes

BAR = 1e-4


class Bent(Attention):
    """Attention with something added: what it inherits no longer describes it."""

    @config
    class Config(Attention.Config):
        pass

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return torch.tanh(super().forward(x, context)) + 0.1 * x


class Halved(Configurable, Format):
    """A format without a native form."""

    @config
    class Config(BaseConfig):
        pass

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        return {"halved": PackedPart(shape)}

    def pack(self, weight: Tensor) -> Packed:
        return {"halved": weight / 2}

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return packed["halved"].to(dtype) * 2

    def fake(self, weight: Tensor) -> Tensor:
        return weight


class Rounded(PlainCodec):
    """A codec that inherits, but is not, a native one."""

    @config
    class Config(BaseConfig):
        pass

    def encode(self, x: Tensor, role: Any) -> dict[str, Tensor]:
        return {"x": (x * 4).round() / 4}


class Everything(KeepAll):
    """A policy that inherits a native one."""

    @config
    class Config(BaseConfig):
        pass


class Doubled(GatedMLP):
    @config
    class Config(GatedMLP.Config):
        pass

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return 2 * super().forward(x, context)


def attention(**changes: Any) -> Attention.Config:
    return Attention.Config(heads=4, kv_heads=2, head_dim=8, **changes)


def make(*mixers: Config, mlps: dict[int, Config] | None = None, seed: int = 0, **changes: Any) -> Decoder:
    """A decoder with one layer per mixer, its weights large enough for everything to matter."""
    torch.manual_seed(seed)
    plain = GatedMLP.Config(hidden_dim=40)
    layers = [
        Block.Config(mixer=mixer, mlp=(mlps or {}).get(layer, plain).clone()) for layer, mixer in enumerate(mixers)
    ]
    model: Decoder = Decoder.Config(vocab=50, dim=32, context=64, stack=Stack.Config(layers=layers), **changes).build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


class InTorch:
    """Runs a plan's torch steps with the model's own modules and stores; one context per call of the plan."""

    def __init__(self, model: Decoder, sequences: int, length: int) -> None:
        self.model, self.sequences = model, sequences
        with torch.inference_mode():
            self.cache = model.cache(batch=sequences, length=length)
        self.context: Context | None = None
        self.seen: Any = None
        self.ran: list[str] = []

    @torch.inference_mode()
    def __call__(self, node: str, x: np.ndarray, sequences: np.ndarray, positions: np.ndarray) -> np.ndarray:
        self.ran.append(node)
        module = self.model.get_submodule(node)
        if list(inspect.signature(module.forward).parameters) == ["x"]:
            return module(torch.from_numpy(x)).numpy()
        places = [np.flatnonzero(sequences == each) for each in range(self.sequences)]
        most = max(map(len, places))
        if self.seen is not positions:
            padded = np.full((self.sequences, most), -1)
            for each, rows in enumerate(places):
                padded[each, : len(rows)] = positions[rows]
            self.seen, self.context = positions, Context(positions=torch.from_numpy(padded), cache=self.cache)
        wide = torch.zeros(self.sequences, most, x.shape[1])
        for each, rows in enumerate(places):
            wide[each, : len(rows)] = torch.from_numpy(x[rows])
        y = module(wide, self.context).numpy()
        out = np.zeros_like(x)
        for each, rows in enumerate(places):
            out[rows] = y[each, : len(rows)]
        return out


@torch.inference_mode()
def agrees(model: Decoder, plan: steps.Plan) -> list[str]:
    """Hold a plan against its model: two sequences, in chunks, then token by token. Returns the nodes run in torch."""
    ids = torch.randint(0, 50, (2, 14), generator=torch.Generator().manual_seed(3))
    cache, expected = model.cache(batch=2, length=14), []
    chunks = ((0, 6), (6, 7), (7, 12), (12, 13), (13, 14))
    for start, stop in chunks:
        positions = torch.arange(start, stop).expand(2, -1)
        expected.append(model(ids[:, start:stop], Context(positions=positions, cache=cache)).numpy())
    module = InTorch(model, 2, 14)
    run = Reference(plan, 2, 14, module)
    for (start, stop), scores in zip(chunks, expected):
        count = stop - start
        tokens = [*ids[0, start:stop].tolist(), *ids[1, start:stop].tolist()]
        places = [*range(start, stop)] * 2
        got = run.run(tokens, [0] * count + [1] * count, places, [2 * count - 1, count - 1])
        assert np.abs(got - scores[::-1, -1]).max() <= BAR
    assert np.std(expected[-1]) > 0.05
    return module.ran


def in_torch(plan: steps.Plan) -> dict[str, str]:
    return {step.node: step.reason for step in plan.steps if isinstance(step, steps.Torch)}


def test_a_plain_model_lowers_whole() -> None:
    model = make(attention(), attention(window=4))
    plan = lower(model, stores="f32")
    assert plan.whole and agrees(model, plan) == []


def test_a_mixer_that_inherits_lowering_runs_in_torch_alone() -> None:
    model = make(attention(), Bent.Config(heads=4, kv_heads=2, head_dim=8), attention())
    plan = lower(model, stores="f32")
    assert in_torch(plan) == {"stack.layers.1.mixer": "Bent does not say how it lowers"}
    assert [spec.layer for spec in plan.stores] == [0, 2]
    assert set(agrees(model, plan)) == {"stack.layers.1.mixer"}


def test_an_mlp_of_another_class_runs_in_torch_alone() -> None:
    model = make(attention(), attention(), mlps={0: Doubled.Config(hidden_dim=40)})
    plan = lower(model, stores="f32")
    assert in_torch(plan) == {"stack.layers.0.mlp": "Doubled does not say how it lowers"}
    agrees(model, plan)


@pytest.mark.parametrize("side", ["q", "k", "v", "o"])
def test_a_linear_of_unknown_format_runs_in_torch_alone(side: str) -> None:
    model = make(attention().set(f"{side}.format", Halved.Config()), attention())
    plan = lower(model, stores="f32")
    assert in_torch(plan) == {f"stack.layers.0.mixer.{side}": "format Halved has no native layout"}
    assert len(plan.stores) == 2
    agrees(model, plan)


def test_a_gate_of_unknown_format_falls_back_alone() -> None:
    """The gate itself is a native step of its own then."""
    cut = GatedMLP.Config(hidden_dim=40).set("gate.format", Halved.Config())
    model = make(
        attention(), attention(), mlps={0: cut, 1: GatedMLP.Config(hidden_dim=40).set("down.format", Halved.Config())}
    )
    plan = lower(model, stores="f32")
    assert set(in_torch(plan)) == {"stack.layers.0.mlp.gate", "stack.layers.1.mlp.down"}
    assert "gate" in [step.kind for step in plan.steps]
    assert "stack.layers.0.mlp.gate.weight" not in plan.tensors
    agrees(model, plan)


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        (Store.Config(codec=Rounded.Config()), "the codec Rounded has no native form"),
        (Store.Config(policy=Everything.Config()), "the policy Everything has no native form"),
    ],
)
def test_a_store_that_is_not_native_takes_its_borrowers_along(store: Store.Config, reason: str) -> None:
    borrower = attention(store=Store.Config(owner=0))
    model = make(attention(store=store), attention(), borrower)
    plan = lower(model, stores="f32")
    reasons = in_torch(plan)
    assert reasons["stack.layers.0.mixer"] == reason
    assert reasons["stack.layers.2.mixer"] == f"it shares a store with layer 0: {reason}"
    assert len(reasons) == 2 and [spec.layer for spec in plan.stores] == [1]
    kinds = [step.kind for step in plan.steps]
    assert "torch" not in kinds[kinds.index("narrow") :]
    agrees(model, plan)


def test_a_borrower_in_torch_takes_the_owner_along() -> None:
    bent = Bent.Config(heads=4, kv_heads=2, head_dim=8, store=Store.Config(owner=0))
    model = make(attention(), bent, attention())
    assert set(in_torch(lower(model))) == {"stack.layers.0.mixer", "stack.layers.1.mixer"}
    agrees(model, lower(model, stores="f32"))


def test_borrowed_stores_narrow_what_follows() -> None:
    owner = {"store": Store.Config(owner=1)}
    model = make(attention(), attention(), attention(**owner), attention(window=5, **owner))
    plan = lower(model, stores="f32")
    assert plan.whole and len(plan.stores) == 2
    kinds = [step.kind for step in plan.steps]
    attends = [index for index, kind in enumerate(kinds) if kind == "attend"]
    assert kinds.index("narrow") == attends[1] + 1 and kinds.count("narrow") == 1
    assert [plan.steps[at].k is None for at in attends] == [False, False, True, True]  # type: ignore[attr-defined]
    agrees(model, plan)
    agrees(model, lower(model, stores="f32", fused=False))


def test_nothing_is_narrowed_before_a_step_in_torch() -> None:
    model = make(
        *(attention(), attention(store=Store.Config(owner=0)), attention(store=Store.Config(owner=0))),
        mlps={1: Doubled.Config(hidden_dim=40)},
    )
    plan = lower(model, stores="f32")
    kinds = [step.kind for step in plan.steps]
    assert kinds.index("narrow") == kinds.index("torch") + 1
    agrees(model, plan)


@pytest.mark.parametrize("policy", [Window.Config(window=3), Window.Config(window=4, sinks=2)])
def test_policies_are_part_of_the_store(policy: Config) -> None:
    model = make(attention(store=Store.Config(policy=policy)), attention(store=Store.Config(owner=0)), attention())
    plan = lower(model, stores="f32")
    assert plan.whole
    assert (plan.stores[0].keep, plan.stores[0].sinks) == (policy.window, policy.sinks)  # type: ignore[attr-defined]
    agrees(model, plan)


def test_hooks_are_still_called() -> None:
    model = make(attention(), attention())
    model.stack.layers[1].mlp.register_forward_hook(lambda module, args, y: y * 3)
    plan = lower(model, stores="f32")
    assert in_torch(plan) == {"stack.layers.1.mlp": "GatedMLP has hooks, which only torch calls"}
    agrees(model, plan)


def test_a_forward_of_its_own_is_still_called() -> None:
    model = make(attention(), attention())
    o: Any = model.stack.layers[0].mixer.o
    inner = o.forward
    o.forward = lambda x: inner(x) * 2
    plan = lower(model, stores="f32")
    assert in_torch(plan) == {"stack.layers.0.mixer.o": "this Linear has a forward of its own"}
    agrees(model, plan)


def test_no_scores_wanted() -> None:
    model = make(attention(), attention(store=Store.Config(owner=0)))
    plan = lower(model, stores="f32")
    run = Reference(plan, 1, 8)
    assert run.run([1, 2, 3], [0] * 3, range(3), []).shape == (0, 50)
    whole = Reference(plan, 1, 8).run([1, 2, 3, 4], [0] * 4, range(4), [3])
    assert np.abs(run.run([4], [0], [3], [0]) - whole).max() < 1e-5


def test_windows_longer_than_anything_are_kept_in_bounds() -> None:
    far = Store.Config(policy=Window.Config(window=2**40, sinks=2**35))
    model = make(attention(window=2**33, store=far))
    agrees(model, lower(model, stores="f32"))


def test_a_table_without_a_native_form_cannot_be_lowered() -> None:
    model = make(attention(), head=Linear.Config(format=Halved.Config()))
    with pytest.raises(NotLowered, match="Halved"):
        lower(model)


@pytest.mark.parametrize("name", sorted(axes.mixers()))
def test_every_variation_of_attention(name: str) -> None:
    model = make(axes.mixers()[name], attention())
    plan = lower(model, stores="f32")
    kind = type(model.stack.layers[0].mixer)
    assert plan.whole or in_torch(plan) == {"stack.layers.0.mixer": f"{kind.__name__} does not say how it lowers"}
    assert plan.whole is (kind is Attention)
    agrees(model, plan)


@pytest.mark.parametrize("name", sorted(axes.formats()))
def test_every_format_is_native_or_gives_a_reason(name: str) -> None:
    """Widths here are multiples of 32 on purpose: whole rows then are groups the native engine has."""
    cut = axes.formats()[name]
    mlp = GatedMLP.Config(hidden_dim=64)
    for side in ("gate", "up", "down"):
        mlp.set(f"{side}.format", cut.clone())
    model = make(attention().set("q.format", cut.clone()), mlps={0: mlp})
    plan = lower(model, stores="f32")
    assert all(in_torch(plan).values())
    agrees(model, plan)


def test_norms_over_all_heads_before_a_torch_step() -> None:
    norms = {"q_norm": RMSNorm.Config(), "k_norm": RMSNorm.Config(), "norm_over": "all", "clip": 0.7}
    model = make(attention(**norms).set("q.format", Halved.Config()), attention(softcap=3.0, rotary=None))
    plan = lower(model, stores="f32")
    assert set(in_torch(plan)) == {"stack.layers.0.mixer.q"}
    agrees(model, plan)
