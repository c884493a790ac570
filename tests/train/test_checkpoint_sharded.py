"""A checkpoint of one process loads on two, and theirs on one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from orchard.core.errors import UnsupportedPair
from orchard.train.checkpoint import Checkpoints
from orchard.train.checkpoint_manifest import Manifest
from orchard.train.checkpoint_storage import Reader
from tests.train.checkpoint_sharded_cases import EVERY, SHAPES, build, go, learn, tied

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.loopback
def test_one_two_one(tmp_path: Path) -> None:
    for name, (cfg, _) in EVERY.items():
        state = build(cfg)
        go(state, range(2))
        Checkpoints(tmp_path / name / "one").save(2, state, wait=True)
    two_processes(tmp_path)
    for name, (cfg, tolerance) in EVERY.items():
        checkpoints = Checkpoints(tmp_path / name / "two")
        assert checkpoints.steps() == [4]
        if name == "8bit":
            with pytest.raises(UnsupportedPair, match=r"optimizer/up/m is the state of shards of 2 processes"):
                checkpoints.load(build(cfg))
            continue
        loaded, expected = build(cfg, seed=3), build(cfg)
        assert checkpoints.load(loaded) == 4
        go(expected, range(4))
        mine = dict(loaded.model.named_parameters())
        for key, parameter in expected.model.named_parameters():
            torch.testing.assert_close(mine[key], parameter, atol=tolerance, rtol=tolerance)
            for part, value in expected.optimizer.state[parameter].items():
                torch.testing.assert_close(loaded.optimizer.state[mine[key]][part], value, atol=1e-4, rtol=1e-4)
        joined = load_file(checkpoints.weights(4))  # from the files of two processes
        assert joined.keys() == {*SHAPES, "seen"}
        assert all(torch.equal(joined[key], mine[key]) for key in SHAPES)
        go(loaded, range(4, 5))
    fsdp, expected = tied(5), tied(0)
    assert Checkpoints(tmp_path / "fsdp").load(fsdp) == 2
    learn(expected, range(2))
    for mine, theirs in zip(fsdp.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def two_processes(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.train.checkpoint_sharded_program"]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in running:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said[-4000:]
    finally:
        for process in running:
            process.kill()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_calls_read_and_write_these_folders(tmp_path: Path) -> None:
    """The storage is an ordinary one of torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    from orchard.train.checkpoint_storage import Writer

    tensors = {"model/a": torch.randn(3, 4), "b": torch.arange(5)}
    dcp.save(tensors, storage_writer=Writer(tmp_path / "x", step=3), no_dist=True)
    assert Manifest.read(tmp_path / "x").step == 3
    read = {"model/a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.int64)}
    dcp.load(read, storage_reader=Reader(tmp_path / "x"), no_dist=True)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        "manifest.json",
        "model-00000.safetensors",
        "state-00000.safetensors",
    ]
