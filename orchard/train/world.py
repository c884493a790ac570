"""The processes of a run: who this one is, how they find each other, and what is said when one of them is gone.

`with world() as here:` reads what torchrun writes into the environment, or stands for one process alone, which opens no socket
and starts nothing. A process that fails leaves its reason in the store that all of them share; one that is killed leaves nothing.
Whoever then waits for it gets torch's error about a broken connection: here it becomes `WorkerLost`, with rank and reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from orchard.core.errors import OrchardError, UsageError

TIMEOUT = 600.0
"""Seconds that a process waits for the others before it gives up."""
PATIENCE = 3.0
"""Seconds that the survivors take to find out who is missing."""
_KEYS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIGNS = ("gloo", "nccl", "processgroup", "connection closed by peer", "connection reset by peer", "broken pipe")
"""What errors of a broken group have in their text: torch raises plain RuntimeErrors for many of them."""


class WorkerLost(OrchardError):
    """A process of the run died, failed or fell silent, so the others cannot go on. `ranks`: which, where that is known."""

    code = "worker-lost"
    retryable = True

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint or "start the run again: it goes on from its last checkpoint")
        self.ranks = ranks


@dataclass(frozen=True)
class World:
    """This process among the processes of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Any = field(default=None, repr=False, compare=False)
    """What all processes can write notes into; None: alone."""
    timeout: float = field(default=TIMEOUT, compare=False)
    """Seconds that this process waits for the others."""

    @property
    def first(self) -> bool:
        """Whether this is the process that writes reports and shows progress."""
        return self.rank == 0


@contextmanager
def world(
    *,
    device: str | torch.device | None = None,
    timeout: float = TIMEOUT,
    environment: Mapping[str, str] | None = None,
) -> Iterator[World]:
    """The world of this process, for the length of a `with`. `device` is "cpu" or "cuda"; None: CUDA where there is any."""
    said = os.environ if environment is None else environment
    rank, size, local_rank = _places(said)
    where = _device(device, local_rank)
    if "RANK" not in said:
        yield World(device=where)
        return
    if dist.is_initialized():
        raise UsageError("this process belongs to a group already", hint="open one world() at a time")
    here = World(rank, size, local_rank, where, _start(said, rank, size, where, timeout), timeout)
    try:
        yield here
        dist.barrier()  # the first process holds the store: it may not leave while others still use it
    except BaseException as error:
        found = _understood(error, here)
        _end()
        _linger(here, found.ranks if isinstance(found, WorkerLost) else ())
        if found is error:
            raise
        raise found from error
    finally:
        _end()


def _places(said: Mapping[str, str]) -> tuple[int, int, int]:
    if "RANK" not in said:
        if int(said.get("WORLD_SIZE", "1") or 1) > 1:
            raise UsageError("WORLD_SIZE is set and RANK is not", hint="start the program with torchrun")
        return 0, 1, 0
    missing = [key for key in _KEYS if not said.get(key)]
    if missing:
        raise UsageError(f"RANK is set, but not {', '.join(missing)}", hint="start the program with torchrun")
    try:
        rank, size = int(said["RANK"]), int(said["WORLD_SIZE"])
        local_rank = int(said.get("LOCAL_RANK", said["RANK"]))
        int(said["MASTER_PORT"])
    except ValueError as error:
        raise UsageError(f"the environment has a number that is none: {error}", hint="start with torchrun") from error
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} in a world of {size}", hint="ranks go from 0 to WORLD_SIZE - 1")
    return rank, size, local_rank


def _device(asked: str | torch.device | None, local_rank: int) -> torch.device:
    kind = torch.device(asked if asked is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if kind.type != "cuda":
        return kind
    count = torch.cuda.device_count()
    index = local_rank if kind.index is None else kind.index
    if index >= count:
        raise UsageError(
            f"local rank {index} has no GPU of its own: this machine shows {count}",
            hint=f"start at most {count} processes (--nproc-per-node {count}), or use device='cpu'",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _start(said: Mapping[str, str], rank: int, size: int, device: torch.device, timeout: float) -> Any:
    """Meet the others and start the group; the store they share."""
    limit = timedelta(seconds=timeout)
    host, port = said["MASTER_ADDR"], int(said["MASTER_PORT"])
    # torchrun keeps the store itself, so that it outlives every worker.
    agent = said.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(host, port, size, is_master=rank == 0 and not agent, timeout=limit, multi_tenant=True)
        attempt = said.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"group{attempt}", store),
            rank=rank,
            world_size=size,
            timeout=limit,
            device_id=device if device.type == "cuda" else None,
        )
        return PrefixStore(f"orchard{attempt}", store)
    except (RuntimeError, ValueError) as error:
        _end()
        raise WorkerLost(
            f"rank {rank} did not meet all {size} processes at {host}:{port} within {timeout:g} s",
            hint="see whether every process was started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
        ) from error


def _end() -> None:
    if dist.is_initialized():
        with suppress(RuntimeError, ValueError):  # a group that is broken cannot be ended better than this
            dist.destroy_process_group()


# When something went wrong ------------------------------------------------------------------------------------------------


def _understood(error: BaseException, here: World) -> BaseException:
    """The error to raise: the process's own one, noted for the others, or whom of the others it lost."""
    if not _broken(error):
        with suppress(RuntimeError):
            here.store.set(f"failed{here.rank}", f"{type(error).__name__}: {error}"[:500])
        return error
    try:
        here.store.set(f"waits{here.rank}", "yes")
        reasons, silent = _absent(here)
        here.store.set(f"read{here.rank}", "yes")
    except RuntimeError:
        return WorkerLost(
            f"rank {here.rank} lost the process that the run is held together by (rank 0, or torchrun itself)",
            ranks=(0,),
        )
    if reasons:
        told = "; ".join(f"rank {rank} failed: {reason}" for rank, reason in reasons.items())
        return WorkerLost(told, ranks=tuple(reasons))
    if silent:
        names = ", ".join(map(str, silent))
        plural = "ranks" if len(silent) > 1 else "rank"
        return WorkerLost(f"{plural} {names} of {here.size} died or fell silent", ranks=silent)
    return WorkerLost(f"rank {here.rank} lost its connection to the others: {_short(error)}")


def _linger(here: World, lost: tuple[int, ...]) -> None:
    """The first process may hold the store: those who are still there are given time to read in it what happened."""
    until = time.monotonic() + PATIENCE
    others = [rank for rank in range(1, here.size) if rank not in lost] if here.first else []
    with suppress(RuntimeError):
        while others and time.monotonic() < until:
            others = [r for r in others if not here.store.check([f"read{r}"]) and not here.store.check([f"failed{r}"])]
            time.sleep(0.05)


def _absent(here: World) -> tuple[dict[int, str], tuple[int, ...]]:
    """The ranks that said why they failed, and those that say nothing. Whoever lost somebody says that it is still there."""
    others = [rank for rank in range(here.size) if rank != here.rank]
    until = time.monotonic() + PATIENCE
    while True:
        failed = {r: here.store.get(f"failed{r}").decode() for r in others if here.store.check([f"failed{r}"])}
        silent = tuple(r for r in others if r not in failed and not here.store.check([f"waits{r}"]))
        if failed or not silent or time.monotonic() > until:
            return failed, silent
        time.sleep(0.1)


def _broken(error: BaseException) -> bool:
    """Whether an error comes from the group and not from the program; also one of ours that was raised because of such an error
    (a checkpoint that others do not finish)."""
    if isinstance(error, OrchardError) and error.__cause__ is not None:
        return _broken(error.__cause__)
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def _short(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
