"""Each optimiser's own promises: torch's AdamW, 8-bit states near it, orthogonal steps, factored sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from orchard.core.errors import ConfigError
from orchard.train.optim import Adafactor, AdamW, AdamW8bit, Muon
from orchard.train.optim.blockwise import decode, encode, table
from orchard.train.optim.orthogonal import orthogonalize
from orchard.train.schedule import set_rate
from tests.train.optim_cases import Small, build, train

CPU = torch.device("cpu")


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_is_torchs_bit_for_bit(fused: bool) -> None:
    mine, theirs = Small(), Small()
    ours = build(AdamW.Config(lr=1e-2, decay=0.3, fused=fused), mine)
    rules = [{"params": [], "weight_decay": decay} for decay in (0.3, 0.0)]
    plain = dict(theirs.named_parameters())
    for group in ours.param_groups:
        rules[0 if group["decay"] else 1]["params"] += [plain[name] for name in group["names"]]  # type: ignore[operator]
    torchs = torch.optim.AdamW(rules, lr=1e-2, betas=(0.9, 0.95), fused=fused, foreach=False)
    assert train(mine, ours, range(30)) == train(theirs, torchs, range(30))
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters()))


def test_fused_is_near_the_plain_loop() -> None:
    one, two = Small(), Small()
    train(one, build(AdamW.Config(fused=True), one), range(20))
    train(two, build(AdamW.Config(fused=False), two), range(20))
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(one.parameters(), two.parameters()))


# 8 bits -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_is_sorted_dense_near_one_and_reaches_far_down(signed: bool) -> None:
    values = table(signed, CPU)
    assert len(values.unique()) == 256 and torch.equal(values, values.sort().values)
    assert values[-1] == 1 and 0 in values and (values[0] < -0.99) == signed
    positive = values[values > 0]
    assert positive[0] < 1e-6
    top = positive[positive >= 0.1]
    assert (top[1:] - top[:-1]).max() < (0.015 if signed else 0.008)


@given(st.integers(1, 700), st.floats(-30, 30), st.booleans())
@settings(max_examples=40)
def test_codes_are_the_nearest_and_zero_stays_zero(size: int, exponent: float, signed: bool) -> None:
    make = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=make) * torch.rand(size, generator=make).pow(8) * 10.0**exponent
    x[::7] = 0
    x = x if signed else x.abs()
    codes, scales = encode(x, signed=signed)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and len(scales) == -(-size // 256)
    back = decode(codes, scales, signed=signed)
    relative = (x - back).abs() / scales.repeat_interleave(256)[:size].clamp_min(1e-38)
    assert relative.max() <= 0.0075
    assert (back[x == 0] == 0).all()
    if not signed:
        assert (back[x > 0] > 0).all()


def test_eight_bits_follow_adamw_on_a_regression() -> None:
    torch.manual_seed(0)
    inputs, wanted = torch.randn(256, 64), torch.randn(64, 80)
    outputs = inputs @ wanted

    def fit(cfg: AdamW.Config | AdamW8bit.Config) -> tuple[torch.Tensor, list[float]]:
        model = nn.Linear(64, 80, bias=False)
        nn.init.zeros_(model.weight)
        optimizer, losses = cfg.build(named_parameters=model.named_parameters()), []
        for _ in range(300):
            loss = (model(inputs) - outputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model.weight.detach(), losses

    wide, exact = fit(AdamW.Config(lr=1e-2, decay=0.0))
    narrow, rounded = fit(AdamW8bit.Config(lr=1e-2, decay=0.0))
    assert (wide - narrow).norm() / wide.norm() < 0.02
    assert max(abs(a - b) for a, b in zip(exact, rounded)) < 0.02 * exact[0]
    assert rounded[-1] < 0.02 * rounded[0]


def test_eight_bit_states_take_two_bytes_and_scales() -> None:
    model = nn.Linear(512, 300, bias=True)
    optimizer = build(AdamW8bit.Config(), model)
    model(torch.randn(2, 512)).sum().backward()
    optimizer.step()
    big, small = optimizer.state[model.weight], optimizer.state[model.bias]
    count = 512 * 300
    held = sum(value.nbytes for name, value in big.items() if name != "step")
    assert held == 2 * count + 2 * 4 * (count // 256)
    assert small["m"].dtype == small["v"].dtype == torch.float32


# Muon ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16), (3, 16, 48), (3, 48, 16)])
def test_steps_are_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given_matrix = torch.randn(shape)
    found = orthogonalize(given_matrix)
    sizes = torch.linalg.svdvals(found)
    assert sizes.min() > 0.6 and sizes.max() < 1.3
    if len(shape) == 3:
        alone = torch.stack([orthogonalize(one) for one in given_matrix])
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)


def test_the_size_and_sign_of_a_matrix_do_not_matter_only_its_directions() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 12)
    torch.testing.assert_close(orthogonalize(x * 1e-12), orthogonalize(x * 1e3), atol=1e-4, rtol=1e-3)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert ((orthogonalize(x) * (u @ v)).sum() / 8) > 0.8
    assert not orthogonalize(torch.zeros(3, 4)).any()


@pytest.mark.parametrize(
    ("scale", "rows", "columns", "length"), [("adam", 8, 32, 0.2 * 32**0.5), ("shape", 32, 8, 2.0)]
)
def test_a_step_has_the_length_that_was_asked_for(scale: str, rows: int, columns: int, length: float) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(rows, columns))
    optimizer = Muon.Config(lr=0.1, decay=0.0, scale=scale).build(named_parameters=[("hidden", weight)])
    weight.grad = torch.randn(rows, columns)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -0.1 * length * orthogonalize(weight.grad), atol=1e-5, rtol=1e-4)
    sizes = torch.linalg.svdvals(weight.detach()) / (0.1 * length)
    assert sizes.min() > 0.6 and sizes.max() < 1.3


def test_muon_learns_an_ill_conditioned_map_faster_than_sgd() -> None:
    """Each at the best of several rates, the highest of which SGD does not survive."""
    torch.manual_seed(0)
    (left, _), (right, _) = (torch.linalg.qr(torch.randn(32, 32)) for _ in range(2))
    inputs = torch.randn(256, 32) @ left @ torch.diag(torch.logspace(0, -2, 32)) @ right
    truth = torch.randn(32, 32)

    def fit(make: Callable[[nn.Parameter], torch.optim.Optimizer]) -> tuple[float, float]:
        weight = nn.Parameter(torch.zeros(32, 32))
        optimizer = make(weight)
        for step in range(100):
            set_rate(optimizer, 1 - step / 100)
            loss = (inputs @ weight - inputs @ truth).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item(), float((weight.detach() - truth).norm() / truth.norm())

    def sgd(lr: float) -> tuple[float, float]:
        return fit(lambda w: torch.optim.SGD([{"params": [w], "initial_lr": lr}], lr=lr, momentum=0.9))

    def muon(lr: float) -> tuple[float, float]:
        return fit(lambda w: Muon.Config(lr=lr, decay=0.0).build(named_parameters=[("hidden", w)]))

    ours, theirs = [muon(lr) for lr in (0.3, 1.0, 3.0)], [sgd(lr) for lr in (3.0, 10.0, 30.0, 60.0, 100.0)]
    for measure in range(2):
        assert min(case[measure] for case in ours) < 0.5 * min(case[measure] for case in theirs)


def test_only_hidden_matrices_are_muons() -> None:
    model = Small()
    optimizer = build(Muon.Config(matrix_lr=0.02, lr=1e-3), model)
    train(model, optimizer, range(1))
    kinds = {name: set(optimizer.state[p]) for name, p in model.named_parameters()}
    assert {name for name, keys in kinds.items() if keys == {"momentum"}} == {"up.weight", "experts", "down.weight"}
    assert all(keys in ({"momentum"}, {"step", "m", "v"}) for keys in kinds.values())
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates["up.weight"] == 0.02 and rates["head.weight"] == 1e-3
    with pytest.raises(ConfigError, match="scale"):
        build(Muon.Config(scale="large"), model)


# Adafactor ----------------------------------------------------------------------------------------------------------------


def test_factored_states_are_rows_and_columns() -> None:
    model = Small()
    optimizer = build(Adafactor.Config(), model)
    train(model, optimizer, range(1))
    sizes = {name: {k: tuple(v.shape) for k, v in optimizer.state[p].items()} for name, p in model.named_parameters()}
    assert sizes["up.weight"] == {"step": (), "rows": (32,), "columns": (16,)}
    assert sizes["experts"] == {"step": (), "rows": (3, 8), "columns": (3, 32)}
    assert sizes["norm.weight"] == {"step": (), "v": (24,)}


@pytest.mark.parametrize("relative", [True, False])
def test_adafactor_is_transformers(relative: bool) -> None:
    from transformers.optimization import Adafactor as Theirs

    mine, theirs = Small(), Small()
    ours = build(Adafactor.Config(lr=1e-2, relative=relative), mine)
    peer = Theirs(theirs.parameters(), lr=1e-2, scale_parameter=relative, relative_step=False, warmup_init=False)
    torch.testing.assert_close(train(mine, ours, range(25)), train(theirs, peer, range(25)), atol=1e-5, rtol=1e-5)
    for a, b in zip(mine.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
