"""Damaged files, checkpoints of something else, and disks that refuse: each is named, and nothing is half done."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from orchard.core.errors import BadFile, ConfigError, DiskFull, OrchardError, UsageError
from orchard.train import checkpoint_disk as disk
from orchard.train.checkpoint import CheckpointFailed, Checkpoints, TrainState
from orchard.train.checkpoint_manifest import NAME, Manifest
from orchard.train.checkpoint_tensors import TensorFile
from orchard.train.state import DIGEST
from tests.train.checkpoint_cases import assert_same, contents, made, tiny


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    Checkpoints(folder).save(1, tiny(1), wait=True)
    return folder


@settings(max_examples=60)
@given(
    st.sampled_from(["model-00000.safetensors", "state-00000.safetensors", NAME]), st.floats(0, 1), st.integers(0, 7)
)
def test_every_bit_counts(
    tmp_path_factory: pytest.TempPathFactory, sound: Path, file: str, where: float, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("flipped") / "run"
    shutil.copytree(sound, folder)
    path = Checkpoints(folder).place(1) / file
    data = bytearray(path.read_bytes())
    data[min(int(where * len(data)), len(data) - 1)] ^= 1 << bit
    path.write_bytes(data)
    state = tiny(7)
    before = contents(state)
    try:
        Checkpoints(folder).load(state, 1)
    except BadFile as error:
        assert error.hint
        assert_same(before, contents(state))
    else:  # white space between values of the manifest means nothing
        assert file == NAME
        assert_same(contents(state), contents(tiny(1)))


@pytest.mark.parametrize("file", ["model-00000.safetensors", "state-00000.safetensors", NAME])
def test_truncated_and_missing_files(tmp_path: Path, sound: Path, file: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(sound, folder)
    path = Checkpoints(folder).place(1) / file
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 7, 0):
        path.write_bytes(whole[:length])
        assert Checkpoints(folder).latest() is None
        with pytest.raises(BadFile, match=file):
            Checkpoints(folder).load(tiny(0))
    path.unlink()
    with pytest.raises(BadFile):
        Checkpoints(folder).load(tiny(0))


@pytest.mark.parametrize("change", ["file", "key", "shape", "part", "dtype", "alias"])
def test_a_manifest_made_by_hand(tmp_path: Path, sound: Path, change: str) -> None:
    """Its digests are right, and what it says is not."""
    folder = tmp_path / "run"
    shutil.copytree(sound, folder)
    place = Checkpoints(folder).place(1)
    manifest = Manifest.read(place)
    about = manifest.tensors["model/weight"]
    if change == "file":
        outside = tmp_path / "outside.safetensors"
        shutil.copy(place / "model-00000.safetensors", outside)
        manifest.files["../../outside.safetensors"] = manifest.files["model-00000.safetensors"]
        about["parts"][0]["file"] = "../../outside.safetensors"
    elif change == "key":
        about["parts"][0]["key"] = "nobody"
    elif change == "shape":
        about["parts"][0]["at"] = [0]
    elif change == "part":
        about["parts"] = 3
    elif change == "dtype":
        about["dtype"] = "F128"
    else:
        manifest.aliases["model/more"] = "model/nothing"
    (place / NAME).unlink()
    manifest.write(place)
    with pytest.raises(BadFile):
        Checkpoints(folder).load(tiny(0), 1)


@given(st.binary(max_size=200))
def test_tensor_files_of_noise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("noise") / "x.safetensors"
    for content in (data, len(data).to_bytes(8, "little") + data):
        path.write_bytes(content)
        with pytest.raises(BadFile):
            TensorFile(path).read("weight")


def linear(shape: tuple[int, int] = (4, 3), *, bias: bool = True, dtype: torch.dtype = torch.float32) -> TrainState:
    model = nn.Sequential(nn.Linear(*shape, bias=bias, dtype=dtype))
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: linear((5, 3)), r"model/0\.weight is torch\.float32 \[3, 4\] there and torch\.float32 \[3, 5\] here"),
        (lambda: linear(dtype=torch.bfloat16), r"model/0\.bias is torch\.float32 \[3\] there and torch\.bfloat16"),
        (lambda: linear(bias=False), r"model/0\.bias: is not in this model.*optimizer/0\.bias: was trained"),
        (
            lambda: made("adamw", ema=False),
            r"model/down\.weight, model/embedding\.weight, model/experts and 5 more",
        ),
        (lambda: frozen(linear()), r"optimizer/0\.bias: was trained and is not here"),
        (lambda: with_optimizer(linear(), torch.optim.Adam), "was optimised by SGD, and this is Adam"),
        (lambda: linear(), "grouped in another way"),
    ],
)
def test_checkpoints_of_something_else(tmp_path: Path, other: Any, said: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    stored = linear()
    if "grouped" in said:
        groups = [{"params": [p], "lr": rate} for p, rate in zip(stored.model.parameters(), (1.0, 2.0))]
        stored.optimizer = torch.optim.SGD(groups)
    checkpoints.save(1, stored, wait=True)
    state = other()
    before = contents(state)
    with pytest.raises(ConfigError, match=said) as caught:
        checkpoints.load(state)
    assert caught.value.hint
    assert_same(before, contents(state))


def frozen(state: TrainState) -> TrainState:
    model: Any = state.model
    model[0].bias.requires_grad_(False)
    state.optimizer = torch.optim.SGD([model[0].weight], lr=1.0)
    return state


def with_optimizer(state: TrainState, kind: Any) -> TrainState:
    state.optimizer = kind(state.model.parameters())
    return state


def test_averages_that_only_one_side_has(tmp_path: Path) -> None:
    for ema in (True, False):
        checkpoints = Checkpoints(tmp_path / str(ema))
        checkpoints.save(1, made("adamw", ema=ema), wait=True)
        with pytest.raises(ConfigError, match="ema/.*" + ("is not in this model" if ema else "is missing")):
            checkpoints.load(made("adamw", ema=not ema))


def test_another_config(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    state = tiny(1)
    state.extra = {DIGEST: "aaaa"}
    checkpoints.save(1, state, wait=True)
    other = tiny(2)
    other.extra = {DIGEST: "bbbb"}
    with pytest.raises(ConfigError, match=r"another config.*aaaa.*bbbb"):
        checkpoints.load(other)
    assert checkpoints.load(other, other_config=True) == 1
    assert other.extra == {DIGEST: "aaaa"}
    assert checkpoints.load(tiny(3)) == 1  # it names none


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    state = tiny(1)
    state.extra = {"when": object()}
    with pytest.raises(UsageError, match="JSON"):
        checkpoints.save(1, state)
    state = tiny(1)
    state.model.register_buffer("complex", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UsageError, match=r"model/complex is torch\.complex128"):
        checkpoints.save(1, state)
    stranger = TrainState(tiny(1).model, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0))
    with pytest.raises(ConfigError, match=r"shape \[2\]"):
        checkpoints.save(1, stranger)
    assert checkpoints.latest() is None and not list(tmp_path.iterdir())


def large() -> TrainState:
    model = nn.Linear(100, 300)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_disk_full(tmp_path: Path) -> None:
    """The system refuses to let a file grow beyond a limit: the same place in the code as a full disk."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    state = large()
    checkpoints.save(1, state, wait=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        checkpoints.save(2, state)
        with pytest.raises(DiskFull, match="model-00000"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001-000001"]
    assert checkpoints.load(state) == 1
    checkpoints.save(3, state, wait=True)  # training went on
    assert checkpoints.steps() == [3]


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EACCES, CheckpointFailed), (errno.EROFS, CheckpointFailed), (errno.EDQUOT, DiskFull)]
)
def test_refusals_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[OrchardError]
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tiny(1), wait=True)

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    for name in ("make", "create", "flush", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(disk, name, refuse)
            checkpoints.save(2, tiny(2))
            with pytest.raises(kind) as caught:
                checkpoints.wait()
        assert caught.value.hint and caught.value.retryable
        assert checkpoints.latest() == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is allowed to this user")
def test_no_permission(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, tiny(1), wait=True)
    (tmp_path / "run").chmod(0o500)
    try:
        checkpoints.save(2, tiny(2))
        with pytest.raises(CheckpointFailed, match="permission"):
            checkpoints.wait()
        assert checkpoints.load(tiny(0)) == 1
    finally:
        (tmp_path / "run").chmod(0o700)


def test_a_folder_that_vanished_or_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, tiny(1), wait=True)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointFailed, match="vanished"):
        checkpoints.save(2, tiny(2))
    (tmp_path / "run").mkdir()
    checkpoints.save(3, tiny(3), wait=True)
    assert checkpoints.latest() == 3
    (tmp_path / "file").write_text("")
    none = Checkpoints(tmp_path / "file")
    assert none.latest() is None
    none.save(1, tiny(1))
    with pytest.raises(CheckpointFailed):
        none.wait()


def test_a_folder_that_vanishes_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    flush = disk.flush

    def gone(descriptor: int) -> None:
        flush(descriptor)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)

    monkeypatch.setattr(disk, "flush", gone)
    checkpoints.save(1, tiny(1))
    with pytest.raises(CheckpointFailed, match="gone"):
        checkpoints.wait()
    checkpoints.wait()  # it was said once
