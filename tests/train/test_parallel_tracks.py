"""Tracks in two processes give what they give in one: scores, gradients, answers, and whole runs of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchard.core.errors import ConfigError, UnsupportedPair, UsageError
from orchard.nn.tracks_apart import keep_tracks
from orchard.train.parallel import Mesh
from orchard.train.world import World
from tests.train.parallel_start import start
from tests.train.tracks_program import build, learnt

CLOSE = 1e-5
CASES: list[list[Any]] = [
    ["compared", "", 2],
    ["compared", "sum tied moe", 4],
    ["learnt", "tied", 6, 0],
    ["learnt", "moe", 4, 1],
    ["refused", "", 3],
    ["refused", "odd", 2],
]


_kept: list[Any] = []


@pytest.fixture
def found(tmp_path: Path) -> list[list[dict[str, Any]]]:
    """What each process found, by case. They are started once, by the first test: a fixture of the module would be made before
    the test that is allowed to open sockets."""
    if not _kept:
        for code, _, said in start("tracks_program", json.dumps({"cases": CASES, "folder": str(tmp_path)})):
            assert code == 0, said[-3000:]
        _kept.extend(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    return [list(case) for case in zip(*_kept, strict=True)]


@pytest.mark.loopback
@pytest.mark.parametrize("case", [0, 1])
def test_apart_they_say_what_they_say_together(found: list[list[dict[str, Any]]], case: int) -> None:
    kind, tracks = CASES[case][1:]
    for one in found[case]:
        assert one["each"] == tracks // 2
        assert one["scores"] < CLOSE and one["slopes"] < CLOSE
        assert one["answers"][0] == one["answers"][1] and len(one["answers"][0]) == 12
        whole, mine = one["losses"]
        assert len(whole) == (tracks * 4 if "moe" in kind else 0)
        assert mine == pytest.approx(whole, abs=CLOSE)


@pytest.mark.loopback
def test_each_process_keeps_and_sends_its_share(found: list[list[dict[str, Any]]]) -> None:
    for one in found[0]:
        whole, mine = one["parameters"]
        outside = 2 * 48 * 32 + 32  # the table, the head and the last norm
        assert mine - outside == (whole - outside) // 2
        assert one["stores"][1] * 2 == one["stores"][0]
        assert one["messages"] == one["meetings"] == 2  # a block of two layers each: 2 L would be 8
        assert one["sent"] == 2 * 4 * 12 * 32 * 4  # blocks, rows, tokens, width, bytes


@pytest.mark.loopback
@pytest.mark.parametrize("case", [2, 3])
def test_training_with_mesh_track_is_training_in_one_process(found: list[list[dict[str, Any]]], case: int) -> None:
    kind, steps, _ = CASES[case][1:]
    alone = learnt(kind, World(), steps, 0, Mesh.Config())
    weights: dict[str, float] = {}
    for one in found[case]:
        assert one["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert one["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert one["shared"] == found[case][0]["shared"]  # bit for bit, though nothing of them is exchanged
        weights |= one["weights"]
    assert weights == pytest.approx(alone["weights"], rel=1e-4)  # and both together have every parameter


@pytest.mark.loopback
def test_what_cannot_be_apart_is_refused_by_name(found: list[list[dict[str, Any]]]) -> None:
    for one in found[4]:
        assert "3 tracks for 2 processes" in one["said"]
    for one in found[5]:
        assert "differ from each other" in one["said"] and "unsupported" in one["said"]
    with pytest.raises(UsageError, match="belongs to no group"):
        keep_tracks(build())
    with pytest.raises(UnsupportedPair, match=r"mesh\.track 2 with mesh\.tensor 2"):
        Mesh.Config(track=2, tensor=2).complete()
    with pytest.raises(ConfigError, match="for 1 processes"):
        Mesh.Config(track=2).build(here=World())
