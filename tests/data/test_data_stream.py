"""The whole way from files to batches: exact resumption at any step, made ahead by a thread, and in linear time."""

from __future__ import annotations

import json
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard.core.batch import Batch
from orchard.core.config import REQUIRED, BaseConfig, Config, config
from orchard.core.errors import ConfigError
from orchard.data import BadSample, Batches, Encode, Jsonl, Mix, Pack, Prefetch, Repeat, Row, Shuffle, Text
from orchard.data.source import Stage
from tests.data.data_tools import resumed, tokenizer_for, write_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"q{i} " * (i % 7 + 1)},
                {"role": "assistant", "content": "a " * (i % 5 + 1)},
            ]
        }
        for i in range(30)
    ]
    write_lines(folder / "talks.jsonl", [*talks[:11], b"{", *talks[11:]])
    write_lines(folder / "asked.jsonl", [{"prompt": f"p{i}", "completion": "yes " * (i % 4 + 1)} for i in range(17)])
    (folder / "book.txt").write_text("\n\n".join(f"Paragraph {i}. " + "word " * (i % 50) for i in range(40)))
    return folder


def whole(folder: Path, rows: int = 4) -> Batches.Config:
    talks = Jsonl.Config(paths=str(folder / "talks.jsonl"), on_bad="skip", order="shuffled", seed=1)
    asked = Shuffle.Config(source=Jsonl.Config(paths=str(folder / "asked.jsonl")), buffer=5, seed=2)
    book = Text.Config(paths=str(folder / "book.txt"), split="blank")
    mix = Mix.Config(sources=[talks, asked, book], weights=[0.5, 0.2, 0.3], seed=3)
    return Batches.Config(source=Pack.Config(source=Encode.Config(source=mix), length=48, mode="cut"), rows=rows)


def same(one: Any, two: Any) -> bool:
    names = ("ids", "targets", "positions", "documents")
    return all(np.array_equal(getattr(one, name), getattr(two, name)) for name in names)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 60))
def test_a_whole_stream_goes_on_bit_for_bit_at_any_step(folder: Path, cut: int) -> None:
    first, second = resumed(whole(folder), cut, take=12, tokenizer=tokenizer_for())
    assert len(first) == 12 and all(map(same, first, second))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 9))
def test_made_ahead_it_is_the_same_stream_and_goes_on_at_what_was_taken(
    folder: Path, cut: int, depth: int, every: int
) -> None:
    cfg = Prefetch.Config(source=whole(folder), depth=depth, every=every)
    plain = list(islice(whole(folder).build(tokenizer=tokenizer_for()), cut + 6))
    first, second = resumed(cfg, cut, take=6, tokenizer=tokenizer_for())
    assert all(map(same, first, plain[cut:])) and all(map(same, second, plain[cut:]))


def test_a_config_tree_survives_json(folder: Path) -> None:
    cfg = Prefetch.Config(source=whole(folder))
    again = Config.from_dict(json.loads(json.dumps(cfg.to_dict())))
    one, two = (tree.build(tokenizer=tokenizer_for()) for tree in (cfg, again))
    assert same(next(one), next(two))
    for source in (one, two):
        source.close()


def test_two_processes_made_ahead_are_one(folder: Path) -> None:
    cfg = Prefetch.Config(source=whole(folder))
    one = whole(folder).build(tokenizer=tokenizer_for())
    parts = [cfg.build(tokenizer=tokenizer_for()).shard(rank, 2) for rank in (0, 1)]
    for _ in range(20):
        wanted, shares = next(one), [next(part) for part in parts]
        assert np.array_equal(np.concatenate([share.ids for share in shares]), wanted.ids)
    assert parts[0].state() == parts[1].state()
    alone = whole(folder).build(tokenizer=tokenizer_for())  # and one process may go on where two were
    alone.restore(parts[0].state()["sources"][0])
    for _ in range(parts[0].state()["since"]):
        next(alone)
    assert same(next(alone), next(one))
    for part in parts:
        part.close()


def test_counts_and_summary_of_a_whole_stream(folder: Path) -> None:
    source = whole(folder).build(tokenizer=tokenizer_for())
    for _ in islice(source, 30):
        pass
    counts = source.counts()
    assert counts["bad"] >= 1 and counts["rows"] >= 120 and counts["encoded"] > 0
    assert "talks.jsonl:12" in source.summary()


class Slow(Stage[Row]):
    """Rows, and an error at one of them; counts how far it went."""

    made = 0

    @config
    class Config(BaseConfig):
        size: int = REQUIRED
        fails_at: int = -1

    def __init__(self, cfg: Config, *, tokenizer: Any = None) -> None:
        super().__init__()
        self.cfg, self.at = cfg, 0

    def __next__(self) -> Row:
        if self.at == self.cfg.fails_at:
            raise BadSample("broken", reason="x", place="f:3")
        if self.at >= self.cfg.size:
            raise StopIteration
        self.at += 1
        Slow.made = max(Slow.made, self.at)
        return Row({"text": str(self.at)})

    def _own(self) -> dict[str, Any]:
        return {"at": self.at}

    def _take(self, state: Any) -> None:
        self.at = state["at"]

    def _reset(self, epoch: int) -> None:
        self.at = 0


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "orchard-prefetch"]


def test_no_more_is_made_ahead_than_asked_for_and_closing_ends_the_thread() -> None:
    Slow.made = 0
    with Prefetch.Config(source=Slow.Config(size=1000), depth=3).build() as source:
        assert threads() == []  # nothing runs before something is taken
        assert next(source).data["text"] == "1"
        time.sleep(0.3)
        assert Slow.made <= 1 + 3 + 1
        assert len(threads()) == 1
    assert threads() == []
    source.close()  # twice is fine
    assert [row.data["text"] for row in islice(source, 2)] == ["2", "3"]  # and it goes on where it was
    source.close()


def test_errors_come_out_in_their_place_and_stay() -> None:
    source = Prefetch.Config(source=Slow.Config(size=9, fails_at=2)).build()
    assert [next(source).data["text"], next(source).data["text"]] == ["1", "2"]
    for _ in range(2):
        with pytest.raises(BadSample, match="f:3: broken"):
            next(source)
    assert threads() == [] and source.state()["since"] == 2


def test_the_end_stays_the_end_until_it_begins_again() -> None:
    source = Prefetch.Config(source=Slow.Config(size=5), every=2).build()
    assert len(list(source)) == 5 and list(source) == []
    end = source.state()
    source.begin(1)
    assert len(list(source)) == 5
    source.restore(end)
    assert list(source) == [] and threads() == []


def test_a_forgotten_prefetcher_takes_its_thread_along() -> None:
    source = Prefetch.Config(source=Slow.Config(size=1000)).build()
    next(source)
    assert len(threads()) == 1
    del source
    for _ in range(50):
        if not threads():
            break
        time.sleep(0.05)
    assert threads() == []


def test_a_missing_tokenizer_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        whole(folder).build()


def test_encoding_errors_are_placed_and_counted(tmp_path: Path) -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    user = {"role": "user", "content": "q"}
    write_lines(tmp_path / "a.jsonl", [{"messages": [user, thought, user, thought]}, {"messages": [user, thought]}])
    cfg = Encode.Config(source=Jsonl.Config(paths=str(tmp_path)))
    tokenizer = tokenizer_for("thinking")
    with pytest.raises(Exception, match=r"a\.jsonl:1: message 3"):
        next(cfg.build(tokenizer=tokenizer))
    source = cfg.clone(on_bad="skip").build(tokenizer=tokenizer)
    assert len(list(source)) == 1 and source.state()["tally"]["reasons"] == {"template": 1}
    assert len(list(cfg.clone(turns="last").build(tokenizer=tokenizer))) == 2


def test_raw_prompts_and_texts(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"prompt": "2 + 2 =", "completion": " 4"}, {"text": "Hello <|im_end|>"}])
    tokenizer = tokenizer_for()
    cfg = Encode.Config(source=Jsonl.Config(paths=str(tmp_path)), chat=False)
    asked, text = cfg.build(tokenizer=tokenizer)
    assert asked.ids.tolist() == [*tokenizer.encode("2 + 2 ="), *tokenizer.encode(" 4"), tokenizer.eos_id]
    assert asked.learnt.sum() == len(tokenizer.encode(" 4")) + 1
    assert text.ids.tolist() == [*tokenizer.encode("Hello <|im_end|>"), tokenizer.eos_id] and text.learnt[1:].all()
    bare = next(cfg.clone(end=False).build(tokenizer=tokenizer))
    assert bare.ids.tolist() == asked.ids.tolist()[:-1]
    beginning = next(cfg.build(tokenizer=tokenizer_for(None, "pieces")))
    assert beginning.ids[0] == tokenizer_for(None, "pieces").bos_id


def test_time_grows_with_the_text_and_no_faster(tmp_path: Path) -> None:
    """Four times the text, four times the work, or not much more: a shared machine measures roughly."""
    paragraph = "The quick brown fox jumps over the lazy dog. " * 20 + "\n\n"
    times = []
    for count in (200, 800):
        (tmp_path / "a.txt").write_text(paragraph * count)
        cfg = Text.Config(paths=str(tmp_path / "a.txt"), split="blank")
        source = Batches.Config(source=Pack.Config(source=Encode.Config(source=cfg), length=512, mode="cut"), rows=8)
        built = source.build(tokenizer=tokenizer_for())
        start = time.process_time()
        tokens = sum(batch.tokens for batch in built)
        times.append((time.process_time() - start) / tokens)
    assert times[1] < 3 * times[0]


def test_repeat_below_packing_keeps_rows_full_across_epochs(folder: Path) -> None:
    reader = Jsonl.Config(paths=str(folder / "asked.jsonl"), order="shuffled")
    pack = Pack.Config(source=Encode.Config(source=Repeat.Config(source=reader, epochs=5)), length=64)
    source = Batches.Config(source=pack, rows=2).build(tokenizer=tokenizer_for())
    tokens = sum(batch.tokens for batch in source if isinstance(batch, Batch))
    once = Batches.Config(source=Pack.Config(source=Encode.Config(source=reader), length=64), rows=2)
    assert tokens == 5 * sum(batch.tokens for batch in once.build(tokenizer=tokenizer_for()))
