"""One of two processes: loads what one process saved, goes on, saves for one process again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from orchard.core.errors import ConfigError, DiskFull, UnsupportedPair, UsageError
from orchard.train import checkpoint_disk as disk
from orchard.train.checkpoint import CheckpointFailed, Checkpoints, TrainState
from tests.train.checkpoint_cases import assert_same, contents
from tests.train.checkpoint_sharded_cases import EVERY, build, go, learn, tied, whole


def main(rank: int, store: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def place(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, [Shard(0)])

    for name, (cfg, _) in EVERY.items():
        state = build(cfg, place, seed=1)
        one = Checkpoints(folder / name / "one")
        if name == "8bit":
            raises(UnsupportedPair, lambda one=one, state=state: one.load(state))
            state = build(cfg, place)
            go(state, range(2), place)
        else:
            assert one.load(state) == 2
            alike(state, cfg)
        two = Checkpoints(folder / name / "two", keep=1)
        go(state, range(2, 4), place)
        two.save(4, state)
        kept = local(state)
        go(state, range(4, 6), place)  # while the thread writes, messages of training cross its own
        again = build(cfg, place, seed=2)
        assert two.load(again, 4) == 4
        assert_same(kept, local(again))
        go(again, range(4, 6), place)
        assert_same(local(state), local(again))  # bit for bit what was never interrupted
    resumed(folder / "rows", place)
    fully_sharded(folder / "fsdp", mesh)
    refusals(rank, folder, build(EVERY["adamw"][0], place))
    left_alone(rank, folder / "refused", build(EVERY["adamw"][0], place))


def resumed(folder: Path, place: Callable[[Tensor], Tensor]) -> None:
    """States that are not shaped like their parameter (Adafactor's rows) come back as they lay."""
    cfg, _ = EVERY["adafactor"]
    state, again, checkpoints = build(cfg, place), build(cfg, place, seed=1), Checkpoints(folder)
    go(state, range(2), place)
    checkpoints.save(2, state, wait=True)
    checkpoints.load(again)
    kept, _ = contents(state)
    assert any(tensor.placements[0].is_shard() for name, tensor in kept.items() if name.endswith("/rows"))  # type: ignore[attr-defined]
    assert_same(local(state), local(again))
    go(state, range(2, 4), place), go(again, range(2, 4), place)
    assert_same(local(state), local(again))


def fully_sharded(folder: Path, mesh: DeviceMesh) -> None:
    """FSDP2, saved right after a forward pass, which leaves the outermost part's parameters gathered."""

    def spread(model: nn.Module) -> None:
        fully_shard(model.get_submodule("middle"), mesh=mesh)
        fully_shard(model, mesh=mesh)

    state, checkpoints = tied(0, spread), Checkpoints(folder)
    learn(state, range(2))
    with torch.no_grad():
        state.model(torch.arange(3))
    checkpoints.save(2, state)
    learn(state, range(2, 4))
    again = tied(1, spread)
    with torch.no_grad():
        again.model(torch.arange(3))
    assert checkpoints.load(again) == 2
    learn(again, range(2, 4))
    assert_same(local(state), local(again))


def alike(state: TrainState, cfg: object) -> None:
    """Loaded by two: together they have what one process had."""
    single = build(cfg)
    go(single, range(2))
    for name, parameter in single.model.named_parameters():
        shared = dict(state.model.named_parameters())[name]
        assert torch.equal(parameter, whole(shared)), name
        for key, value in single.optimizer.state[parameter].items():
            assert torch.equal(value, whole(state.optimizer.state[shared][key])), (name, key)
        assert single.ema and state.ema
        assert torch.equal(single.ema.averages[name], whole(state.ema.averages[name])), name
    assert state.extra == {"seed": 0} and state.model.get_buffer("seen").item() == 0


def local(state: TrainState) -> tuple[dict[str, Tensor], dict[str, object]]:
    tensors, document = contents(state)
    return {name: getattr(x, "to_local", lambda x=x: x)() for name, x in tensors.items()}, document


def refusals(rank: int, folder: Path, state: TrainState) -> None:
    """What one process cannot do, both say; and nobody is left waiting."""
    checkpoints = Checkpoints(folder / "refused")
    checkpoints.save(1, state, wait=True)
    real = disk.create

    def full(path: Path) -> int:
        raise OSError(28, "No space left on device")

    disk.create = full if rank == 1 else real
    raises(DiskFull, lambda: checkpoints.save(2, state, wait=True))
    disk.create = real
    dist.barrier()
    assert [path.name for path in (folder / "refused").iterdir()] == ["step-00000001-000001"]
    state.extra = {"bad": object()} if rank == 1 else {}
    raises(UsageError, lambda: checkpoints.save(3, state, wait=True))
    state.extra = {"digest": str(rank)}
    checkpoints.save(4, state, wait=True)
    raises(ConfigError, lambda: checkpoints.load(state))
    assert checkpoints.load(state, other_config=True) == 4 and checkpoints.steps() == [1, 4]


def left_alone(rank: int, folder: Path, state: TrainState) -> None:
    """The other process dies while both write: the one that is left says so, and the last checkpoint is still there."""
    checkpoints = Checkpoints(folder)
    real = disk.create
    disk.create = real if rank == 0 else lambda path: os._exit(0)
    raises(CheckpointFailed, lambda: checkpoints.save(5, state, wait=True))
    assert checkpoints.latest() == 4 and not list(folder.glob(".*"))
    os._exit(0)  # there is nobody to say goodbye to


def raises(kind: type[Exception], call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
