"""Rows and batches: every target exactly once, no document sees another, little padding, and processes share a stream."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from orchard.core.batch import IGNORED, Batch, PairBatch
from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UsageError
from orchard.data import Batches, Encode, Jsonl, Mix, Pack, Pair, Sample, SampleTooLong, Shuffle, StateError
from orchard.data.source import Stage
from tests.data.data_tools import resumed, tokenizer_for, write_lines
from tests.generate.conftest import make_decoder


class Given(Stage[Any]):
    """Samples of the given lengths, all of whose tokens differ; from `pairs`, pairs of them."""

    @config
    class Config(BaseConfig):
        sizes: list[int] = REQUIRED
        learnt: int = 0
        """Of each sample only tokens from this one on are learnt."""
        pairs: bool = False

    def __init__(self, cfg: Config, *, tokenizer: Any = None) -> None:
        super().__init__()
        self.cfg, self.at = cfg, 0

    def __next__(self) -> Sample | Pair:
        if self.at >= len(self.cfg.sizes):
            raise StopIteration
        self.at += 1
        start, size = sum(self.cfg.sizes[: self.at - 1]), self.cfg.sizes[self.at - 1]
        learnt = [i >= self.cfg.learnt for i in range(size)]
        sample = Sample.of(range(start, start + size), learnt, f"s:{self.at}")
        return Pair(sample, sample) if self.cfg.pairs else sample

    def _own(self) -> dict[str, Any]:
        return {"at": self.at}

    def _take(self, state: Any) -> None:
        self.at = state["at"]


def batches(sizes: list[int], length: int, rows: int = 2, learnt: int = 0, **pack: Any) -> Any:
    cfg = Pack.Config(source=Given.Config(sizes=sizes, learnt=learnt), length=length, **pack)
    return Batches.Config(source=cfg, rows=rows)


def pairs_of(batch: Batch) -> list[tuple[int, int]]:
    """(token, target) of every place that is learnt from."""
    counted = batch.targets != IGNORED
    return list(zip(batch.ids[counted].tolist(), batch.targets[counted].tolist()))


def check_layout(batch: Batch) -> None:
    for ids, positions, documents in zip(batch.ids, batch.positions, batch.documents):
        padding = documents == -1
        assert np.array_equal(padding, positions == -1)
        used = int((~padding).sum())
        assert not padding[:used].any()  # padding is at the end
        for place in range(1, used):
            if documents[place] == documents[place - 1]:
                assert positions[place] == positions[place - 1] + 1 and ids[place] == ids[place - 1] + 1
            else:
                assert documents[place] == documents[place - 1] + 1 and positions[place] == 0
        assert used == 0 or (documents[0] == 0 and positions[0] == 0)
    assert (batch.targets[batch.documents == -1] == IGNORED).all()


sizes_of = st.lists(st.integers(2, 40), min_size=1, max_size=40)


@given(sizes_of, st.integers(4, 50), st.integers(1, 5), st.integers(1, 6), st.integers(0, 3))
def test_cut_and_packed_rows_hold_every_target_once(
    sizes: list[int], length: int, rows: int, open_rows: int, learnt: int
) -> None:
    found: list[tuple[int, int]] = []
    source = batches(sizes, length, rows, mode="cut", open_rows=open_rows, learnt=learnt).build()
    try:
        taken = list(source)
    except UsageError:
        taken = []
    for batch in taken:
        assert batch.ids.shape == (rows, length) and batch.ids.dtype == batch.targets.dtype == np.int64
        check_layout(batch)
        assert all(target == token + 1 for token, target in pairs_of(batch))
        found += pairs_of(batch)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    wanted = [(s + i - 1, s + i) for s, size in zip(starts, sizes) for i in range(max(learnt, 1), size)]
    assert sorted(found) == wanted


@given(sizes_of, st.integers(0, 50), st.sampled_from(["packed", "padded", "cut"]), st.integers(1, 5))
def test_rows_go_on_anywhere(sizes: list[int], cut: int, mode: str, open_rows: int) -> None:
    cfg = batches([*sizes, 9], 20, 2, mode=mode, too_long="skip", open_rows=open_rows)
    first, second = resumed(cfg, cut)
    assert len(first) == len(second)
    for one, two in zip(first, second):
        for name in ("ids", "targets", "positions", "documents"):
            assert np.array_equal(getattr(one, name), getattr(two, name))


@given(sizes_of, st.sampled_from([1, 2, 3, 6]), st.sampled_from(["packed", "padded"]), st.sampled_from([0, 8]))
def test_the_parts_of_all_processes_are_the_stream_of_one(
    sizes: list[int], world: int, mode: str, multiple: int
) -> None:
    cfg = batches([*sizes, 9], 40, 6, mode=mode)
    cfg.multiple = multiple
    parts = [cfg.build().shard(rank, world) for rank in range(world)]
    for whole in cfg.build():
        shares = [next(part) for part in parts]
        for name in ("ids", "targets", "positions", "documents"):
            together = np.concatenate([getattr(share, name) for share in shares])
            assert np.array_equal(together, getattr(whole, name))
        assert all(part.state() == parts[0].state() for part in parts)  # so a run may go on with other processes
    assert all(next(part, None) is None for part in parts)


def test_targets_are_shifted_once_and_the_last_token_is_only_a_target() -> None:
    batch = next(batches([3, 4], 8, 1).build())
    assert batch.ids.tolist() == [[0, 1, 3, 4, 5, 0, 0, 0]]
    assert batch.targets.tolist() == [[1, 2, 4, 5, 6] + [IGNORED] * 3]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, -1, -1, -1]]
    assert batch.documents.tolist() == [[0, 0, 1, 1, 1, -1, -1, -1]]
    assert batch.tokens == 5 and batch.weights is None


def test_what_follows_a_cut_is_learnt_once() -> None:
    sample = Sample.of(range(25), [i == 20 for i in range(25)])
    before, after = sample.cut(0, 20), sample.cut(20, 24)
    assert before.ids[before.learnt].tolist() == [20] and not after.learnt.any()
    assert before.targets().tolist() == [IGNORED] * 19 + [20]


def test_padded_rows_are_as_wide_as_the_longest_rounded_up() -> None:
    cfg = batches([4, 10, 30], 64, 2, mode="padded")
    cfg.multiple = 8
    assert [batch.ids.shape for batch in cfg.build()] == [(2, 16), (2, 32)]
    cfg.last = "drop"
    assert [batch.ids.shape for batch in cfg.build()] == [(2, 16)]


def test_samples_longer_than_a_row_stop_are_skipped_or_cut_and_counted() -> None:
    with pytest.raises(SampleTooLong, match="s:2: 30 tokens, and a row holds 21") as caught:
        list(batches([9, 30], 20).build())
    assert "too_long" in caught.value.hint
    for too_long, tokens in (("skip", 8 + 19), ("cut", 8 + 20 + 19)):
        source = batches([9, 30, 20], 20, too_long=too_long).build()
        assert sum(batch.tokens for batch in source) == tokens
        assert source.counts()["cut" if too_long == "cut" else "bad"] == 1
    whole = batches([21], 20).build()  # twenty are read, the last is a target
    assert next(whole).tokens == 20


def test_samples_of_which_nothing_is_learnt_are_counted_and_left_out() -> None:
    source = batches([3, 9], 20, learnt=5).build()
    assert [batch.tokens for batch in source] == [4]
    assert source.counts()["bad"] == 1 and "nothing-to-learn" in source.summary()
    with pytest.raises(UsageError, match=r"nothing to learn from.*nothing-to-learn"):
        next(batches([3], 20, learnt=5).build())
    cut = batches([30], 20, learnt=25, too_long="cut").build()  # its answer was cut off
    with pytest.raises(UsageError, match="nothing to learn from"):
        next(cut)


def test_little_is_padding() -> None:
    """Lengths as in chat data: most short, some long (log-normal). One a row would waste most of it."""
    dice = random.Random(0)
    sizes = [min(max(int(dice.lognormvariate(5, 1)), 2), 1025) for _ in range(4000)]
    source = batches(sizes, 1024, 4, open_rows=16).build()
    for _ in source:
        pass
    counts = source.counts()
    assert counts["placed"] == sum(sizes) - len(sizes)
    share = counts["padding"] / (counts["padding"] + counts["placed"])
    assert share < 0.01


def test_preferences_make_pairs_of_equal_shape(tmp_path: Path) -> None:
    rows = [{"prompt": "What?", "chosen": "this " * n, "rejected": "that " * (12 - n)} for n in range(1, 8)]
    rows += [{"prompt": "What?", "chosen": "x " * 300, "rejected": "y"}]
    reader = Jsonl.Config(paths=str(write_lines(tmp_path / "p.jsonl", rows)))
    pack = Pack.Config(source=Encode.Config(source=reader), length=64, mode="padded", too_long="skip")
    cfg = Batches.Config(source=pack, rows=2, multiple=16)
    tokenizer = tokenizer_for()
    source = cfg.build(tokenizer=tokenizer)
    taken = list(source)
    assert len(taken) == 4 and source.counts()["bad"] == 1
    for batch in taken:
        assert isinstance(batch, PairBatch) and batch.chosen.ids.shape == batch.rejected.ids.shape
    first = taken[0]
    learnt = first.chosen.targets[0][first.chosen.targets[0] != IGNORED].tolist()
    assert tokenizer.decode(learnt, skip_special=False).endswith("<|im_end|>") and "this" in tokenizer.decode(learnt)
    assert "What" not in tokenizer.decode(learnt)
    parts = [cfg.build(tokenizer=tokenizer).shard(rank, 2) for rank in (0, 1)]
    for batch in taken:
        together = [next(part) for part in parts]
        assert np.array_equal(np.concatenate([part.rejected.ids for part in together]), batch.rejected.ids)
    with pytest.raises(ConfigError, match="cannot be cut"):
        list(Pack.Config(source=Encode.Config(source=reader), length=64, mode="cut").build(tokenizer=tokenizer))


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"mode": "x"}, {"too_long": "x"}, {"open_rows": 0}):
        with pytest.raises(ConfigError):
            batches([3], 8, **wrong).build()
    with pytest.raises(ConfigError, match="do not go into 4"):
        batches([3], 8, 6).build().shard(0, 4)
    with pytest.raises(UsageError):
        batches([3], 8, 6).build().shard(2, 2)
    with pytest.raises(ConfigError, match="length"):
        Batches.Config(source=Given.Config(sizes=[3]), rows=1).build()
    with pytest.raises(StateError, match="length"):
        batches([3], 8).build().restore(batches([3], 9).build().state())


def test_a_batch_goes_to_torch_and_a_state_is_small() -> None:
    source = batches([30] * 200, 64).build()
    moved = next(source).to("cpu")
    assert moved.ids.dtype.is_signed and tuple(moved.ids.shape) == (2, 64)
    assert len(str(source.state())) < 20_000


@settings(max_examples=20)
@given(sizes_of)
def test_rows_leave_in_about_the_order_samples_came(sizes: list[int]) -> None:
    source = Pack.Config(source=Given.Config(sizes=sizes), length=40, open_rows=4).build()
    for number, row in enumerate(islice(source, 100)):
        assert int(row[0].place[2:]) <= 1 + 40 * (number + 5)


def test_a_model_learns_from_packed_rows_what_it_learns_from_single_ones() -> None:
    """Also with an empty row at the end of a stream: gradients are the same and finite."""
    found = []
    for mode, rows in (("packed", 4), ("padded", 1)):
        model = make_decoder(60)
        total = 0.0
        for batch in batches([9, 14, 5, 12, 3], 16, rows, mode=mode).build():
            moved = batch.to("cpu")
            scores = model(moved.ids, Context(positions=moved.positions, documents=moved.documents))
            loss = cross_entropy(scores.flatten(0, 1), moved.targets.flatten(), ignore_index=IGNORED, reduction="sum")
            loss.backward()
            total += loss.item()
        found.append((total, [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]))
    (one, first), (two, second) = found
    assert one == pytest.approx(two, rel=1e-5) and first
    for a, b in zip(first, second):
        assert a.isfinite().all()
        assert torch.allclose(a, b, atol=1e-3, rtol=1e-3)


def test_states_taken_with_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    reader = Jsonl.Config(paths=str(write_lines(tmp_path / "a.jsonl", [{"text": "x y z"}])))
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (Shuffle.Config(source=reader), {"seed": 1}),
        (Mix.Config(sources=[reader], weights=[1]), {"at_end": "drop"}),
        (Encode.Config(source=reader), {"turns": "last"}),
        (Pack.Config(source=Encode.Config(source=reader), length=8), {"open_rows": 3}),
    ]
    for cfg, change in kinds:
        state = cfg.build(tokenizer=tokenizer_for()).state()
        with pytest.raises(StateError, match=next(iter(change))):
            cfg.clone(**change).build(tokenizer=tokenizer_for()).restore(state)
    state = kinds[2][0].build(tokenizer=tokenizer_for()).state()
    with pytest.raises(StateError, match="template"):
        kinds[2][0].build(tokenizer=tokenizer_for("zephyr")).restore(state)
