"""Averages of weights: the recurrence exactly, in and out of the model bit for bit, and through a stored state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchard.core.errors import ConfigError
from orchard.train.ema import EMA


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    made[1].bias.requires_grad_(False)
    return made


def move(module: nn.Module, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=make).to(parameter.dtype))


@pytest.mark.parametrize("ramp", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_recurrence(ramp: bool, dtype: torch.dtype) -> None:
    module = model(dtype)
    ema = EMA.Config(decay=0.9, ramp=ramp).build(model=module)
    want = {name: p.detach().double() for name, p in module.named_parameters() if p.requires_grad}
    for step in range(200):
        move(module, step)
        decay = min(0.9, (1 + step) / (10 + step)) if ramp else 0.9
        ema.update(module)
        for name, parameter in module.named_parameters():
            if name in want:
                want[name] = decay * want[name] + (1 - decay) * parameter.detach().double()
    assert set(ema.averages) == set(want) and ema.updates == 200
    for name, average in ema.averages.items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), want[name], atol=1e-5, rtol=1e-5)


def test_in_and_out_again_even_after_an_error() -> None:
    module = model(torch.bfloat16)
    ema = EMA.Config(decay=0.5).build(model=module)
    move(module, 1)
    ema.update(module)
    own = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="evaluation"), ema.applied(module):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter, ema.averages[name].bfloat16()) and not torch.equal(parameter, own[name])
        raise RuntimeError("evaluation")
    assert all(torch.equal(value, own[name]) for name, value in module.state_dict().items())


def test_a_resumed_average_goes_on_bit_for_bit() -> None:
    module = model()
    one = EMA.Config().build(model=module)
    for step in range(5):
        move(module, step)
        one.update(module)
    two = EMA.Config().build(model=model())
    two.load_state_dict(one.state_dict())
    move(module, 9)
    one.update(module)
    two.update(module)
    assert one.updates == two.updates
    assert all(torch.equal(one.averages[name], two.averages[name]) for name in one.averages)


def test_another_model_is_refused() -> None:
    ema = EMA.Config().build(model=model())
    with pytest.raises(ConfigError, match=r"0\.bias"):
        ema.load_state_dict(EMA.Config().build(model=nn.Linear(2, 2)).state_dict())
    with pytest.raises(ConfigError, match="no parameter"):
        ema.update(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="decay"):
        EMA.Config(decay=1.0).build(model=model())
