"""Scenes: the same from the same seed, every class there, families apart, and a source that goes on where it was."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from orchard.core.errors import ConfigError, UsageError
from orchard.data import Scenes
from orchard.data.errors import StateError
from orchard.data.scene_families import FAMILIES, KINDS
from orchard.data.scenes import CLASSES, TINTS, draw, meanings


def test_the_same_seed_and_name_give_the_same_images() -> None:
    one, again, other = (draw(20, 3, name, side=16) for name in ("a", "a", "b"))
    assert np.array_equal(one.images, again.images) and np.array_equal(one.labels, again.labels)
    assert not np.array_equal(one.images, other.images)
    assert one.images.shape == (20, 3, 16, 16) and one.images.dtype == np.float32


def test_images_are_centred_and_labels_belong_to_their_family() -> None:
    batch = draw(600, 0, "all", side=12)
    assert np.abs(batch.images.mean((2, 3))).max() < 1e-5 and np.allclose(batch.images.std((1, 2, 3)), 1, atol=0.01)
    assert set(batch.labels) == set(range(CLASSES)) and np.array_equal(batch.groups, batch.labels // KINDS)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_drawings_of_a_family_differ_and_are_ink(family) -> None:  # type: ignore[no-untyped-def]
    line = torch.linspace(-1.2, 1.2, 24)
    u, v = (part.expand(KINDS, 24, 24) for part in (line[None, None, :], line[None, :, None]))
    ink = family(u, v, torch.arange(KINDS)[:, None, None], 15.0)
    assert ink.shape == (KINDS, 24, 24) and ink.isfinite().all() and (ink >= 0).all() and (ink <= 1).all()
    assert (ink.mean((1, 2)) > 0.02).all() and (ink.mean((1, 2)) < 0.9).all()
    apart = torch.cdist(ink.flatten(1), ink.flatten(1)) + 9 * torch.eye(KINDS)
    assert apart.min() > 1


def test_a_class_is_another_drawing_in_each_tint() -> None:
    table = meanings()
    assert table.shape == (len(FAMILIES), len(TINTS), KINDS)
    assert (table.sort(-1).values == torch.arange(KINDS)).all()
    assert all(len({tuple(row) for row in family.tolist()}) == len(TINTS) for family in table)


def test_without_jitter_and_noise_the_nearest_image_tells_the_class() -> None:
    kept, asked = (draw(2500, seed, "plain", side=12, jitter=0, noise=0) for seed in (0, 1))
    flat = [torch.from_numpy(part.images).flatten(1) for part in (kept, asked)]
    near = torch.cdist(flat[1], flat[0]).argmin(1).numpy()
    assert (kept.labels[near] == asked.labels).mean() > 0.9 > 0.2 > (kept.labels == asked.labels).mean()


def test_a_source_goes_on_where_it_was() -> None:
    cfg = Scenes.Config(rows=4, batches=3, side=8, seed=5)
    source = cfg.build()
    first = next(source)
    state = json.loads(json.dumps(source.state()))
    rest = list(source)
    again = cfg.build()
    again.restore(state)
    assert len(rest) == 2 and all(np.array_equal(a.images, b.images) for a, b in zip(rest, again, strict=True))
    source.begin(1)
    assert np.array_equal(next(source).images, first.images)
    with pytest.raises(StateError, match="seed"):
        cfg.clone(seed=6).build().restore(state)


def test_processes_share_a_batch() -> None:
    cfg = Scenes.Config(rows=6, side=8)
    whole = next(cfg.build())
    parts = [next(cfg.build().shard(rank, 3)) for rank in range(3)]
    assert np.array_equal(np.concatenate([part.images for part in parts]), whole.images)
    assert [part.tokens for part in parts] == [2, 2, 2]
    with pytest.raises(ConfigError, match="do not go into 4"):
        cfg.build().shard(0, 4)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows is 0"):
        Scenes.Config(rows=0).build()
    with pytest.raises(ConfigError, match="side is 2"):
        draw(1, 0, "a", side=2)
    with pytest.raises(UsageError, match="noise -1"):
        draw(1, 0, "a", noise=-1)
