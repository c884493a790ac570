"""Processes that find each other, that are told different things, and that die."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from orchard.core.errors import UsageError
from orchard.train.parallel import Mesh
from orchard.train.parallel_sums import gathered, same_everywhere
from orchard.train.world import WorkerLost, world
from tests.train.parallel_start import start


def told(how: str) -> list[tuple[int, dict[str, Any] | None]]:
    found = start("lost_program", how, wait=60)
    return [(code, json.loads(out) if out else None) for code, out, _ in found]


def test_one_process_alone_starts_nothing() -> None:
    with world(device="cpu", environment={}) as here:
        assert (here.rank, here.size, here.first, here.device.type) == (0, 1, True, "cpu")
        assert not dist.is_initialized()
        assert gathered({"a": 1}, here) == [{"a": 1}]
        same_everywhere(Mesh.Config(), here)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "rank 2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "'x'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(said: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named), world(device="cpu", environment=said):
        pass


@pytest.mark.loopback
def test_a_process_that_never_comes_is_not_waited_for_forever() -> None:
    said = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.raises(WorkerLost, match="all 2 processes"), world(device="cpu", timeout=1, environment=said):
        pass
    assert not dist.is_initialized()


@pytest.mark.loopback
def test_notes_are_gathered_and_equal_configs_pass() -> None:
    for code, said in told("well"):
        assert code == 0 and said is not None
        assert said["notes"] == [{"rank": 0, "text": "é"}, {"rank": 1, "text": "éé"}]


@pytest.mark.loopback
def test_different_configs_are_refused_on_every_process() -> None:
    for _, said in told("told differently"):
        assert said is not None and said["error"] == "ConfigError"
        assert said["message"] == "the seed of rank 1 is not that of rank 0"


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("how", "gone"),
    [
        ("killed", 1),
        *(pytest.param(how, gone, marks=pytest.mark.long) for how, gone in (("first killed", 0), ("hangs", 1))),
    ],
)
def test_a_process_that_is_killed_or_hangs_is_named(how: str, gone: int) -> None:
    """Long before the timeout of 30 seconds where it was killed; one that hangs is given 5."""
    found = told(how)
    code, said = found[1 - gone]
    assert code == 0 and said is not None
    assert (said["error"], said["code"], said["ranks"]) == ("WorkerLost", "worker-lost", [gone])
    assert said["took"] < 15
    if how.endswith("killed"):
        assert found[gone] == (-9, None)


@pytest.mark.loopback
@pytest.mark.parametrize(("how", "gone"), [("raises", 1), pytest.param("first raises", 0, marks=pytest.mark.long)])
def test_a_process_that_fails_says_why_to_the_others(how: str, gone: int) -> None:
    found = told(how)
    other, own = found[1 - gone][1], found[gone][1]
    assert other is not None and own is not None
    assert own["message"] == "the third batch is bad"
    assert other["message"] == f"rank {gone} failed: ValueError: the third batch is bad"
    assert other["ranks"] == [gone] and other["took"] < 15
