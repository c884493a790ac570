"""What holds for every optimiser: it learns, it repeats itself, it resumes bit for bit, narrow parameters lose nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orchard.core.config import Config
from orchard.core.errors import ConfigError, UsageError
from orchard.train.optim import AdamW, Optimizer
from orchard.train.schedule import set_rate
from tests.train.optim_cases import EVERY, Small, build, loss_of, train

NARROW = ["float32", "rest", "none"]


def stored(optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """A state that went through a safetensors file and a JSON file, and nothing else."""
    state = optimizer.state_dict()
    tensors = {f"{n}/{key}": value for n, values in state["state"].items() for key, value in values.items()}
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    save_file(tensors, folder / "state.safetensors")
    groups = json.loads(json.dumps(state["param_groups"]))
    states: dict[int, dict[str, Any]] = {}
    for path, value in load_file(folder / "state.safetensors").items():
        number, key = path.split("/")
        states.setdefault(int(number), {})[key] = value
    return {"state": states, "param_groups": groups}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for narrow in NARROW if dtype == torch.bfloat16 else NARROW[:1]:
        cfg = Config.from_dict(EVERY[name].to_dict()).set("narrow", narrow)
        whole = Small(dtype)
        optimizer = build(cfg, whole)
        losses = train(whole, optimizer, range(10))

        first = Small(dtype)
        begun = build(cfg, first)
        assert train(first, begun, range(6)) == losses[:6]  # the same run twice
        set_rate(begun, 0.5)
        second = Small(dtype)
        second.load_state_dict(first.state_dict())
        resumed = build(cfg, second)
        resumed.load_state_dict(stored(begun, tmp_path))
        assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in begun.param_groups]
        set_rate(resumed, 1.0)
        assert train(second, resumed, range(6, 10)) == losses[6:]
        for a, b in zip(whole.parameters(), second.parameters()):
            assert torch.equal(a, b)
        assert resumed.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.parametrize("name", EVERY)
def test_it_learns(name: str) -> None:
    model = Small()
    losses = train(model, build(EVERY[name], model), range(150))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", EVERY)
def test_small_steps_are_not_rounded_away(name: str) -> None:
    """Bfloat16 with a float32 copy takes the very steps of the float32 run; with what rounding cut off nearly; with neither
    most of them are lost."""
    cfg = Config.from_dict(EVERY[name].to_dict()).set("lr", 1e-4)
    if hasattr(cfg, "matrix_lr"):
        cfg.matrix_lr = None
    start = Small(torch.bfloat16)
    way: dict[str, torch.Tensor] = {}
    for narrow in ("wide", *NARROW):
        model = Small(torch.float32 if narrow == "wide" else torch.bfloat16)
        model.load_state_dict(start.state_dict())
        optimizer = build(cfg.set("narrow", "none" if narrow == "wide" else narrow), model)
        make = torch.Generator().manual_seed(1)
        for _ in range(40):
            for parameter in model.parameters():
                gradient = (torch.rand(parameter.shape, generator=make) + 0.5).bfloat16()
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
        kept = [optimizer._widen(parameter, optimizer.state[parameter]) for parameter in model.parameters()]
        way[narrow] = torch.cat([(a - b.float()).detach().flatten() for a, b in zip(kept, start.parameters())])
    off = {narrow: float((way[narrow] - way["wide"]).norm() / way["wide"].norm()) for narrow in NARROW}
    assert off["float32"] == 0
    assert off["rest"] < 0.1 and off["rest"] < 0.2 * off["none"], off


@pytest.mark.parametrize("name", EVERY)
def test_torchs_distributed_checkpoints_read_and_write_it(name: str) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    one, two = Small(torch.bfloat16), Small(torch.bfloat16)
    begun, resumed = build(EVERY[name], one), build(EVERY[name], two)
    train(one, begun, range(3))
    two.load_state_dict(one.state_dict())
    named = get_optimizer_state_dict(one, begun)
    assert set(named["state"]) == {name for name, _ in one.named_parameters()}
    set_optimizer_state_dict(two, resumed, named)
    assert train(one, begun, range(3, 6)) == train(two, resumed, range(3, 6))


def test_groups_by_rule() -> None:
    model = Small()
    optimizer = build(AdamW.Config(decay=0.3), model)
    decayed = {name for group in optimizer.param_groups if group["decay"] for name in group["names"]}
    matrices = {name for group in optimizer.param_groups if group["matrix"] for name in group["names"]}
    assert decayed == {"up.weight", "experts", "down.weight", "head.weight"}
    assert matrices == {"up.weight", "experts", "down.weight"}
    assert {group["decay"] for group in optimizer.param_groups} == {0.0, 0.3}
    model.head.weight.requires_grad_(False)
    named = [name for group in build(AdamW.Config(), model).param_groups for name in group["names"]]
    assert "head.weight" not in named and len(named) == 7


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    model = Small()
    optimizer = build(AdamW.Config(), model)
    before = model.head.weight.detach().clone()
    loss_of(model, 0).backward()
    model.head.weight.grad = None
    optimizer.step()
    assert torch.equal(before, model.head.weight) and model.head.weight not in optimizer.state


def test_what_does_not_fit_is_refused() -> None:
    model = Small()
    optimizer = build(AdamW.Config(), model)
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    model.head.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"head\.weight"):
        build(AdamW.Config(), model).load_state_dict(state)
    with pytest.raises(UsageError, match="no parameter"):
        build(AdamW.Config(), Small().requires_grad_(False))
    with pytest.raises(ConfigError, match="narrow"):
        build(AdamW.Config(narrow="half"), model)
    with pytest.raises(ConfigError, match="lr"):
        build(AdamW.Config(lr=-1.0), model)
