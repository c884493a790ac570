"""Convolutional nets: traced as they are, masked as asked, and exported to smaller nets that compute the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.errors import BadFile, ConfigError, UnsupportedPair
from orchard.studies._upscale_fuzz import RandomNet, mismatches
from orchard.studies._upscale_nets import DenseNet, ResNet
from orchard.transforms import upscale_export
from orchard.transforms.prune_scores import IMPORTANCES
from orchard.transforms.upscale_channels import channels_of
from orchard.transforms.upscale_export import export, mock
from orchard.transforms.upscale_masks import Masks, kept_by_zeros
from orchard.transforms.upscale_net import ChannelNet, Step, plain_torch
from orchard.transforms.upscale_trace import trace
from orchard.weights.safetensors import SafetensorsFile, write_safetensors

NETS = {"resnet": lambda: ResNet((6, 8, 10)), "densenet": lambda: DenseNet(6, 4, 3, 2)}


def stirred(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
            layer.running_mean.normal_()  # type: ignore[union-attr]
            layer.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model.eval()


@pytest.fixture(params=NETS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, ChannelNet, Tensor]:
    torch.manual_seed(1)
    model, x = stirred(NETS[request.param]()).double(), torch.randn(3, 1, 16, 16).double()
    return model, trace(model, x), x


def both(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = net(x)
    return out


# Exports --------------------------------------------------------------------------------------------------------------


def test_a_traced_net_is_the_net(case: Any) -> None:
    model, net, x = case
    assert torch.equal(both(net, x), both(model, x)) and torch.equal(both(plain_torch(net), x), both(model, x))
    whole = export(net, x)
    assert torch.equal(both(whole.net, x), both(model, x)) and not whole.copied and not whole.views


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("kind", IMPORTANCES)
def test_an_export_is_the_masked_net(case: Any, kind: str, constrained: bool) -> None:
    _, net, x = case
    masked = Masks(keep=0.6, importance=kind, constrained=constrained).apply(net, x)
    want = both(masked, x)
    made = export(masked, x)
    assert torch.allclose(both(made.net, x), want, atol=1e-10)
    assert torch.allclose(both(mock(masked, made), x), want, atol=1e-10)
    plain = export(masked, x, reorder=False, push=False)
    assert made.parameters <= plain.parameters < sum(part.numel() for part in net.parameters())
    assert made.copied == 0 if constrained else made.copied <= 0.5 * plain.copied
    assert not torch.allclose(want, both(net, x), atol=1e-3)


def test_single_precision_to_the_last_bits() -> None:
    model, x = stirred(ResNet((6, 8, 10))), torch.randn(5, 1, 16, 16)
    masked = Masks(keep=0.6).apply(trace(model, x), x)
    want, made = both(masked, x), export(masked, x)
    assert (both(made.net, x) - want).abs().max() <= 1e-5 * want.abs().max()
    assert (both(made.net, x) - both(mock(masked, made), x)).abs().max() <= 1e-5 * want.abs().max()


def test_two_readers_of_one_layer_copy_nothing() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made, self.one, self.two = nn.Conv2d(1, 12, 3), nn.Conv2d(12, 2, 3), nn.Conv2d(12, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = functional.relu(self.made(x))
            return self.one(y) + self.two(y)

    x = torch.randn(2, 1, 8, 8)
    for seed in range(20):
        torch.manual_seed(seed)
        masked = Masks(keep=0.5).apply(trace(Two(), x), x)
        made = export(masked, x)
        assert made.copied == 0 and len(made.views) == 2
        assert torch.allclose(both(made.net, x), both(masked, x), atol=1e-5)


@pytest.mark.parametrize("seed", range(25))
def test_random_nets(seed: int) -> None:
    assert mismatches(seed)[0] == []


def test_the_random_nets_notice_a_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    arrange = upscale_export.arrange
    right = upscale_export._Exporting._places

    def wrong(self: Any, classes: tuple[int, ...]) -> tuple[int, ...]:
        found = right(self, classes)
        return found[::-1] if len(classes) == 3 else found

    monkeypatch.setattr(upscale_export._Exporting, "_places", wrong)
    assert sum(_wrong(seed) for seed in range(6)) > 1
    monkeypatch.setattr(upscale_export._Exporting, "_places", right)
    monkeypatch.setattr(upscale_export, "arrange", lambda blocks, readers: arrange(blocks, readers[:0]))
    assert not any(_wrong(seed) for seed in range(3))  # no order at all is still right


def _wrong(seed: int) -> bool:
    try:
        return bool(mismatches(seed)[0])
    except (RuntimeError, IndexError):
        return True


# Patterns -------------------------------------------------------------------------------------------------------------


def test_zeros_are_exact_and_dead_layers_are_named(case: Any) -> None:
    _, net, x = case
    net = copy.deepcopy(net)
    channels = channels_of(net, x)
    name = next(name for name in channels.consumers if len(channels.free(name)) > 3)
    weight = net.held.get_submodule(name).weight
    with torch.no_grad():
        weight[:, 1] = 0
        weight[:, 2] = 1e-300
        assert kept_by_zeros(net, channels)[name].tolist() == [i for i in range(weight.shape[1]) if i != 1]
        weight.zero_()
    made = export(net, x)
    assert made.dead == [name] and torch.allclose(both(made.net, x), both(net, x), atol=1e-10)


def test_shares_and_thresholds(case: Any) -> None:
    _, net, x = case
    channels = channels_of(net, x)
    free = {name: len(channels.free(name)) for name in channels.consumers if len(channels.free(name))}
    each = Masks(keep=0.5).choose(net, x)
    assert {name: len(kept) for name, kept in each.items()} == {name: max(1, round(n / 2)) for name, n in free.items()}
    every = Masks(keep=0.5, together=True, importance="lamp").choose(net, x)
    assert abs(sum(map(len, every.values())) - sum(free.values()) / 2) <= 1
    for how in (
        {"constrained": True},
        {"constrained": True, "averaged": True},
        {"constrained": True, "side": "output"},
    ):
        kept = Masks(keep=0.5, **how).choose(net, x)
        rows = {name: channels.rows[value].classes for name, value in channels.consumers.items()}
        alive = {rows[name][place] for name, places in kept.items() for place in places.tolist()}
        for name, places in kept.items():  # all readers of a channel agree about it
            assert [i for i, kind in enumerate(rows[name]) if kind in alive] == places.tolist()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"side": "output"}, "layer by layer"),
        ({"side": "left"}, "left"),
        ({"importance": "hrank"}, "hrank"),
        ({"keep": 0.0}, "keep is 0"),
        ({"side": "output", "constrained": True, "importance": "activation"}, "activation"),
    ],
)
def test_masks_that_make_no_sense(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Masks(**wrong)


def test_broken_weights_are_named(case: Any) -> None:
    _, net, x = case
    net = copy.deepcopy(net)
    name = list(channels_of(net, x).consumers)[-1]
    with torch.no_grad():
        net.held.get_submodule(name).weight.fill_(torch.nan)
    with pytest.raises(ConfigError, match=f"{name} has weights that are not finite"):
        Masks().apply(net, x)


# Tracing --------------------------------------------------------------------------------------------------------------


def test_layers_that_cannot_change_are_named() -> None:
    x = torch.randn(2, 2, 4, 4)
    shared: Any = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 3, 1))
    made = export(trace(shared, x), x)
    assert "groups" in made.pinned["_1"]
    twice = nn.Conv2d(4, 4, 1)
    again = export(trace(nn.Sequential(nn.Conv2d(2, 4, 1), twice, nn.ReLU(), twice), x), x)
    assert any("more than once" in reason for reason in again.pinned.values())


class Odd(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.conv = what, nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        match self.what:
            case "softmax":
                return x.softmax(1)
            case "rows":
                return torch.cat([x, x], 2)
            case "step":
                return x[:, ::2]
            case "first":
                return x[0]
            case "branch":
                return x if x.sum() > 0 else -x
            case "flatten":
                return x.flatten(0)
            case "height":
                return x.mean(2)
            case "minus":
                return 1 - x
        out: Tensor = self.conv(x)
        return out


@pytest.mark.parametrize(
    "what", ["softmax", "rows", "step", "first", "branch", "flatten", "height", "minus", "reflect"]
)
def test_what_cannot_be_followed_is_refused_by_name(what: str) -> None:
    with pytest.raises(UnsupportedPair) as caught:
        trace(Odd(what), torch.randn(2, 4, 6, 6))
    assert caught.value.hint


def test_a_model_is_not_changed_by_any_of_this() -> None:
    model = RandomNet(5).train()
    before = {name: part.clone() for name, part in model.state_dict().items()}
    x = torch.randn(2, model.first, 5, 5)
    export(Masks(keep=0.5).apply(trace(model, x), x), x)
    assert model.training and all(torch.equal(part, before[name]) for name, part in model.state_dict().items())


# Files ----------------------------------------------------------------------------------------------------------------


def test_a_net_is_stored_and_read(case: Any, tmp_path: Path) -> None:
    _, net, x = case
    made = export(Masks(keep=0.6).apply(net, x), x)
    said, tensors = made.net.parts()
    write_safetensors(tmp_path / "net.safetensors", tensors, metadata={"orchard.net": said})
    with SafetensorsFile.open(tmp_path / "net.safetensors") as file:
        again = ChannelNet.from_parts(file.metadata["orchard.net"], {name: file.read(name) for name in file.tensors})
        assert torch.equal(both(again, x), both(made.net, x))


@pytest.mark.parametrize(
    "change",
    [
        ('"op": "conv"', '"op": "eval"'),
        ('"version": 1', '"version": 2'),
        ('"output": "head"', '"output": "tail"'),
        ('"name": "stem_0"', '"name": "../stem"'),
        ('"steps"', '"stops"'),
        ('"op": "relu"', '"op": "add"'),
        ("{", ""),
    ],
)
def test_damaged_descriptions_are_refused(change: tuple[str, str]) -> None:
    x = torch.randn(1, 1, 16, 16)
    said, tensors = trace(ResNet((2, 2, 2)), x).parts()
    assert change[0] in said
    with pytest.raises(BadFile):
        ChannelNet.from_parts(said.replace(*change), tensors)
    with pytest.raises(BadFile):
        ChannelNet.from_parts(said, {name: part for name, part in tensors.items() if "weight" not in name})


def test_steps_are_checked() -> None:
    with pytest.raises(ConfigError, match="not there"):
        ChannelNet(["x"], [Step("a", "relu", ("x",))], "b", {})
    with pytest.raises(ConfigError, match="twice"):
        ChannelNet(["x"], [Step("x", "relu", ("x",))], "x", {})
