"""What is loaded is what was saved, bit for bit, and a run that was interrupted ends like one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from orchard.core.errors import ConfigError, UsageError
from orchard.train.checkpoint import Checkpoints, TrainState
from orchard.train.checkpoint_tensors import DTYPES, Piece, TensorFile, file_digest, write_tensors
from orchard.train.state import named
from tests.train.checkpoint_cases import assert_same, bits, contents, go_on, made, scrambled
from tests.train.optim_cases import EVERY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY)
def test_ten_steps_are_five_and_five(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    whole = made(name, dtype, steps=10)
    first = made(name, dtype, steps=5)
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(5, first)
    kept = contents(first)
    go_on(first, range(5, 7))  # while it is written
    checkpoints.wait()
    second = scrambled(made(name, dtype))
    assert Checkpoints(tmp_path / "run").load(second) == 5
    assert second.extra == {"step": 5}
    assert_same(kept, contents(second))
    go_on(second, range(5, 10))
    second.extra["step"] = 10
    assert_same(contents(whole), contents(second))


def test_a_used_optimiser_forgets_what_it_knew(tmp_path: Path) -> None:
    fresh, used = made("adamw"), made("adamw", steps=3)
    before = contents(fresh)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, fresh, wait=True)
    checkpoints.load(used)
    assert_same(before, contents(used))
    assert not used.optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_optimisers_of_torch(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    def build() -> TrainState:
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.1}]
        return TrainState(model, kind(groups, lr=0.1))

    def go(state: TrainState, steps: int) -> None:
        for _ in range(steps):
            state.optimizer.zero_grad()
            state.model(torch.ones(2, 4)).square().sum().backward()
            state.optimizer.step()

    one, other = build(), build()
    go(one, 2)
    for group in one.optimizer.param_groups:
        group["lr"] *= 0.25
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, one, wait=True)
    checkpoints.load(other)
    assert_same(contents(one), contents(other))
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.125, 0.025]
    assert all(type(group.get("betas", ())) is tuple for group in other.optimizer.param_groups)
    go(one, 3), go(other, 3)
    assert_same(contents(one), contents(other))


class Odd(nn.Module):
    """One of everything that can be stored: narrow, wide, small, empty, shared, turned, and what is not kept."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        self.turned = nn.Parameter(torch.randn(6, 4, generator=make).T)
        self.narrow = nn.Parameter(torch.randn(5, generator=make).bfloat16())
        self.one = nn.Parameter(torch.randn((), generator=make))
        self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.embedding.weight.data = torch.randn(7, 3, generator=make)
        self.head.weight = self.embedding.weight
        self.register_buffer("codes", torch.randint(-128, 128, (9,), generator=make).to(torch.int8))
        self.register_buffer("mask", torch.rand(3, 3, generator=make) > 0.5)
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("wide", torch.tensor([float("nan"), -0.0, seed], dtype=torch.float64))
        self.register_buffer("eight", torch.randn(3, generator=make).to(torch.float8_e4m3fn))
        self.register_buffer("window", torch.randn(8, 8, generator=make)[2:6, ::2])
        self.register_buffer("passing", torch.randn(2, generator=make), persistent=False)


def test_dtypes_shapes_strides_and_sharing(tmp_path: Path) -> None:
    one, other = (TrainState(m := Odd(seed), torch.optim.SGD(m.parameters(), lr=1.0)) for seed in (1, 2))
    passing = other.model.get_buffer("passing").clone()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, one, wait=True)
    checkpoints.load(other)
    assert_same(contents(one), contents(other))
    assert torch.equal(other.model.get_buffer("passing"), passing)
    assert other.model.get_parameter("turned").stride() == one.model.get_parameter("turned").stride()
    assert other.model.get_parameter("head.weight") is other.model.get_parameter("embedding.weight")

    stored = load_file(checkpoints.weights(1))  # by the format's own package
    assert set(stored) == set(named(one.model).tensors)
    assert "head.weight" not in stored and "passing" not in stored
    for name, tensor in stored.items():
        assert torch.equal(bits(tensor), bits(one.model.state_dict()[name])), name


def test_a_shared_tensor_fills_two_that_are_not_shared(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            if tied:
                self.b.weight = self.a.weight
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            self.one = nn.Parameter(torch.ones(()))

    tied, apart = (TrainState(m := Pair(tied=tied), torch.optim.SGD([m.one], lr=1.0)) for tied in (True, False))
    Checkpoints(tmp_path / "tied").save(1, tied, wait=True)
    Checkpoints(tmp_path / "tied").load(apart)
    for name in ("a.weight", "b.weight"):
        assert torch.equal(apart.model.get_parameter(name), tied.model.get_parameter("a.weight"))
    Checkpoints(tmp_path / "apart").save(1, apart, wait=True)
    with pytest.raises(ConfigError, match=r"model/b\.weight: is not in this model"):
        Checkpoints(tmp_path / "apart").load(tied)


def test_what_is_frozen_may_stay_out(tmp_path: Path) -> None:
    def build() -> TrainState:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        return TrainState(model, torch.optim.SGD(model[1].parameters(), lr=1.0), frozen=False)

    one, other = build(), build()
    base = other.model.get_parameter("0.weight").clone()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, one, wait=True)
    assert set(load_file(checkpoints.weights())) == {"1.weight", "1.bias"}
    checkpoints.load(other)
    assert torch.equal(other.model.get_parameter("1.weight"), one.model.get_parameter("1.weight"))
    assert torch.equal(other.model.get_parameter("0.weight"), base)


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    plain = made("adamw", steps=2, ema=False)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, plain, wait=True)
    other = made("adamw", ema=False)
    wrapped = TrainState(Wrapped(other.model), other.optimizer)
    checkpoints.load(wrapped)
    assert_same(contents(plain), contents(wrapped))


def test_averages_as_weights(tmp_path: Path) -> None:
    state = made("adamw", torch.bfloat16, steps=3)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(3, state, wait=True)
    path = checkpoints.weights(average=True)
    assert state.ema is not None
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, state.ema.averages[name]) and tensor.dtype == torch.float32
    checkpoints.save(4, state, wait=True)
    assert not path.exists()  # it goes with its checkpoint
    state.ema = None
    checkpoints.save(5, state, wait=True)
    with pytest.raises(UsageError, match="no averages"):
        checkpoints.weights(average=True)


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_tensor_files(tmp_path_factory: pytest.TempPathFactory, described: dict[str, tuple[str, list[int]]]) -> None:
    path = tmp_path_factory.mktemp("file") / "some.safetensors"
    tensors = {}
    for name, (dtype, shape) in described.items():
        values = torch.randint(0, 2 if dtype == "BOOL" else 256, (*shape, DTYPES[dtype].itemsize), dtype=torch.uint8)
        tensors[name] = values.reshape(-1).view(DTYPES[dtype]).reshape(shape)
    pieces = [Piece(name, tensor.dtype, tensor.shape, lambda t=tensor: t) for name, tensor in tensors.items()]  # type: ignore[misc]
    size, digest = write_tensors(path, pieces)
    assert path.stat().st_size == size and file_digest(path) == digest
    theirs, ours = load_file(path), TensorFile(path)
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for read in (theirs[name], ours.read(name)):
            assert read.dtype == tensor.dtype and read.shape == tensor.shape and torch.equal(bits(read), bits(tensor))
