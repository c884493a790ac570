"""The study of the server model: equal twins, windows that keep less, and the whole of it at the smallest size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from orchard.core.errors import ConfigError
from orchard.nn.moe import MoE
from orchard.nn.tracks import Tracks
from orchard.studies import _server_shapes as shapes
from orchard.studies import afm_2025_server
from orchard.studies._afm_ground import Ground
from orchard.studies._server_apart import ProcessesFailed, measured
from orchard.studies.harness import study

TINY = shapes.Shape(ground=Ground(dim=32, layers=8, rows=2, length=24, steps=3, held_out=8), window=8)


def test_twins_have_exactly_as_many_parameters() -> None:
    for depth in (2, 4):
        trees = shapes.one_way(TINY), shapes.with_tracks(TINY, depth)
        sizes = [sum(p.numel() for p in tree.build().parameters()) for tree in trees]
        assert sizes[0] == sizes[1]
        assert len(trees[1].stack.layers) == 8 // depth
    with pytest.raises(ConfigError, match="no whole number"):
        shapes.one_way(replace(TINY, tracks=2))


def test_the_server_model_has_all_of_it() -> None:
    tree = shapes.server(TINY)
    assert all(isinstance(layer, Tracks.Config) and len(layer.tracks) == 4 for layer in tree.stack.layers)
    assert len(tree.find(MoE)) == 4 * 4
    for layer in tree.stack.layers:
        for track in layer.tracks:  # type: ignore[attr-defined]
            assert [block.mixer.window for block in track.layers] == [8, 8, 8, None]
            assert track.layers[3].mixer.rotary is None


def test_a_process_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shapes.one_way(TINY).build()
    monkeypatch.setattr("subprocess.Popen.communicate", lambda self, timeout=None: ("", self.wait() and "it broke"))
    monkeypatch.setattr("sys.executable", "/bin/false")
    monkeypatch.setattr("socket.socket.bind", lambda self, address: None)
    monkeypatch.setattr("socket.socket.getsockname", lambda self: ("127.0.0.1", 9))
    with pytest.raises(ProcessesFailed, match="process 0 of 2 failed"):
        measured({"one": model}, torch.zeros(1, 4, dtype=torch.long), 2, 2)


@pytest.mark.long
@pytest.mark.loopback
def test_the_study_runs_and_every_claim_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = afm_2025_server.Scale(shape=TINY, processes=2, rows=2, answer=4)
    monkeypatch.setitem(afm_2025_server.SCALES, "small", tiny)
    report = study("afm-2025-server", seed=1)
    assert all(claim.value is not None for claim in report.claims)
    for name, wanted in {
        "syncs_tracks": 4,
        "syncs_tensor": 16,
        "syncs_deep": 2,
        "server_syncs": 2,
        "meetings": 4,
        "syncs_fewer": 0.75,
        "syncs_fewer_deep": 0.875,
        "weights_ratio": 1,
        "processes_answers_different": 0,
        "server_answers_different": 0,
        "processes_kv_share": 0.5,
        "server_kv_share": 0.5,
    }.items():
        assert report[name] == wanted, name
    for name in ("processes_scores_off", "processes_slopes_off", "server_scores_off", "server_slopes_off"):
        assert report[name] < 1e-5
    # Two layers of eight keep all of 96 tokens, the others eight; one slot more is a bin for padding.
    assert report["far_kv_bytes_ratio"] == pytest.approx((2 * 97 + 6 * 9) / (8 * 97))
