"""Readers: what is in the files comes out, in order, resumable at any row; what is wrong is named, with its place."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard.core.errors import BadFile, ConfigError, MissingExtra, UsageError
from orchard.data import BadSample, Jsonl, Parquet, StateError, Text
from tests.data.data_tools import resumed, write_lines

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
GOOD: list[dict[str, Any]] = [
    {"messages": [USER, ANSWER], "id": 7},
    {"messages": [{"role": "developer", "content": "s"}, USER, CALLS, {"role": "tool", "content": "1"}, ANSWER]},
    {"prompt": "q", "completion": "a"},
    {"prompt": [USER], "completion": [ANSWER]},
    {"prompt": [USER], "completion": "a", "tools": [{"name": "f"}]},
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": [USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "b"}]},
    {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "b"}]},
    {"text": "plain"},
]
BAD: dict[str, list[Any]] = {
    "not-json": [b"{", b"{'a': 1}", b"[" * 100_000, b'{"text": ' + b"9" * 5000 + b"}x"],
    "not-utf8": [b'{"text": "\xff\xfe"}'],
    "wrong-type": [
        b"[1]",
        b"3",
        b'"text"',
        {"text": 3},
        {"messages": "q"},
        {"messages": [1]},
        {"messages": [{"role": "user", "content": 3}, ANSWER]},
        {"messages": [{"role": "robot", "content": "x"}, ANSWER]},
        {"prompt": 3, "completion": "a"},
        {"prompt": "q", "completion": ["a"]},
        {"messages": [USER, ANSWER], "tools": {"name": "f"}},
        {"prompt": "q", "chosen": "a", "rejected": [ANSWER]},
    ],
    "no-form": [{}, {"content": "x"}, {"prompt": "q"}, {"completion": "a"}, {"prompt": "q", "chosen": "a"}],
    "roles": [
        {"messages": [USER, USER, ANSWER]},
        {"messages": [ANSWER, USER, ANSWER]},
        {"messages": [USER, ANSWER, ANSWER]},
        {"messages": [USER, {"role": "system", "content": "late"}, ANSWER]},
        {"messages": [USER, {"role": "tool", "content": "1"}, ANSWER]},
        {"messages": [USER, ANSWER, {"role": "tool", "content": "1"}, ANSWER]},
        {"messages": [USER, ANSWER, USER]},
        {"messages": [USER, CALLS, ANSWER]},
    ],
    "no-answer": [{"messages": [USER]}],
    "empty-answer": [
        {"messages": [USER, {"role": "assistant", "content": " \n"}]},
        {"prompt": "q", "completion": " "},
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": []}]},
    ],
    "empty": [{"text": " "}, {"messages": []}, {"prompt": "", "completion": "a"}],
    "not-unicode": [b'{"text": "\\ud800"}'],
    "same-answers": [{"prompt": "q", "chosen": "a", "rejected": "a"}],
    "other-prompts": [{"chosen": [USER, ANSWER], "rejected": [{"role": "user", "content": "p"}, ANSWER]}],
    "line-too-long": [b'{"text": "' + b"x" * 3000 + b'"}', b"y" * 5_000_000],
}


def test_every_form_is_read_and_other_fields_are_left_alone(tmp_path: Path) -> None:
    rows = list(Jsonl.Config(paths=str(write_lines(tmp_path / "a.jsonl", GOOD))).build())
    assert [sorted(row.data) for row in rows] == [
        ["messages"],
        ["messages"],
        ["completion", "prompt"],
        ["messages"],
        ["messages", "tools"],
        ["chosen", "rejected"],
        ["chosen", "rejected"],
        ["chosen", "rejected"],
        ["text"],
    ]
    assert rows[1].data["messages"][0]["role"] == "system"
    assert rows[8].place == f"{tmp_path / 'a.jsonl'}:9"


@pytest.mark.parametrize(("reason", "row"), [(reason, row) for reason, rows in BAD.items() for row in rows])
def test_a_bad_line_is_named_with_file_line_and_reason_or_skipped_and_counted(
    tmp_path: Path, reason: str, row: Any
) -> None:
    lines = [GOOD[0], b"", row, {"text": "after"}]
    cfg = Jsonl.Config(
        paths=str(write_lines(tmp_path / "a.jsonl", lines)), longest=2000 if "long" in reason else 200_000
    )
    source = cfg.build()
    next(source)
    with pytest.raises(BadSample) as caught:
        next(source)
    assert caught.value.reason == reason and caught.value.message.startswith(f"{tmp_path / 'a.jsonl'}:3: ")
    assert caught.value.hint and len(caught.value.message) < 500
    source = cfg.clone(on_bad="skip").build()
    assert [row.place[-2:] for row in source] == [":1", ":4"]
    assert source.counts() == {"bad": 1} and source.state()["tally"]["reasons"] == {reason: 1}
    assert f"1 rows were left out: {reason} (1)" in source.summary() and "a.jsonl:3" in source.summary()
    shuffled = cfg.clone(on_bad="skip", order="shuffled").build()
    assert sorted(row.place[-2:] for row in shuffled) == [":1", ":4"]
    assert shuffled.state()["tally"]["reasons"] == {reason: 1}


def test_folders_patterns_and_packed_files_in_one_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "sub/a.jsonl", "sub/.hidden.jsonl", "note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, [{"text": name}, {"text": name + " 2"}])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf{"text": "packed"}\r\n{"text": "two"}'))

    def texts(*paths: str) -> list[str]:
        return [row.data["text"] for row in Jsonl.Config(paths=[str(tmp_path / path) for path in paths]).build()]

    assert texts("") == ["b.jsonl", "b.jsonl 2", "packed", "two", "sub/a.jsonl", "sub/a.jsonl 2"]
    assert texts("sub", "b.jsonl")[0] == "sub/a.jsonl"
    assert texts("*.jsonl", "**/a.jsonl") == ["b.jsonl", "b.jsonl 2", "sub/a.jsonl", "sub/a.jsonl 2"]
    assert texts("b.jsonl", "b.jsonl", "") == texts("b.jsonl", "c.jsonl.gz", "sub")  # each file once
    with pytest.raises(UsageError, match="no files at"):
        texts("missing.jsonl")
    with pytest.raises(ConfigError, match="is packed"):
        next(Jsonl.Config(paths=str(tmp_path / "c.jsonl.gz"), order="shuffled").build())


def test_a_damaged_packed_file_is_an_error_and_never_skipped(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"text": "x"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(BadFile, match=r"a\.jsonl\.gz"):
        list(Jsonl.Config(paths=str(tmp_path), on_bad="skip").build())


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_jsonl_goes_on_at_any_row(tmp_path: Path, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.sampled_from([{"text": "ü" * 50}, {"text": "b"}, b"{", b"", b"x" * 300]), max_size=25))
    split = data.draw(st.integers(0, len(rows)))
    packed = data.draw(st.booleans())
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    write_lines(folder / "a.jsonl", rows[:split])
    rest = write_lines(folder / "b.jsonl", [*rows[split:], {"text": "last"}])
    if packed:
        (folder / "b.jsonl.gz").write_bytes(gzip.compress(rest.read_bytes()))
        rest.unlink()
    order = "file" if packed else data.draw(st.sampled_from(["file", "shuffled"]))
    cfg = Jsonl.Config(paths=str(folder), on_bad="skip", order=order, seed=3, longest=200)
    first, second = resumed(cfg, data.draw(st.integers(0, len(rows) + 1)))
    assert first == second


@pytest.mark.parametrize("packed", [False, True])
def test_places_after_a_line_that_is_too_long_are_right(tmp_path: Path, packed: bool) -> None:
    rows = [{"text": "a"}, b"x" * 3_000_000, {"text": "b"}, b"y" * 201, b"z" * 199, {"text": "c"}, {"text": "d"}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    if packed:
        path = tmp_path / "b.jsonl.gz"
        path.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes(), 1))
    cfg = Jsonl.Config(paths=str(path), on_bad="skip", longest=200)
    for cut in range(5):
        first, second = resumed(cfg, cut)
        assert first == second and [row.data["text"] for row in first] == list("abcd")[cut:]
    source = cfg.build()
    assert [row.place.rsplit(":", 1)[1] for row in source] == ["1", "3", "6", "7"]
    assert source.state()["tally"]["reasons"] == {"line-too-long": 2, "not-json": 1}


@pytest.mark.parametrize("chunk", [1, 14, 15, 100, 1 << 20])  # where a chunk ends, a line may or may not
def test_a_shuffled_reader_gives_every_row_once_in_another_order_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("orchard.data.jsonl._CHUNK", chunk)
    write_lines(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(100)])
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": str(i)}) for i in range(100, 150)))  # no last \n
    source = Jsonl.Config(paths=str(tmp_path), order="shuffled", seed=1).build()
    orders = []
    for epoch in range(3):
        source.begin(epoch)
        orders.append([int(row.data["text"]) for row in source])
        assert sorted(orders[-1]) == list(range(150))
    assert orders[0] != orders[1] != orders[2] and orders[0] != sorted(orders[0])
    again = Jsonl.Config(paths=str(tmp_path), order="shuffled", seed=1).build()
    assert [int(row.data["text"]) for row in again] == orders[0]


def test_states_of_other_files_and_settings_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    cfg = Jsonl.Config(paths=str(tmp_path))
    state = cfg.build().state()
    with pytest.raises(StateError, match="order"):
        cfg.clone(order="shuffled").build().restore(state)
    with pytest.raises(StateError, match="not of Text"):
        (tmp_path / "t.txt").write_text("x")
        Text.Config(paths=str(tmp_path)).build().restore(state)
    with pytest.raises(StateError, match="damaged"):
        cfg.build().restore({name: value for name, value in state.items() if name != "epoch"})
    write_lines(tmp_path / "a.jsonl", [{"text": "longer"}])
    with pytest.raises(StateError, match="are not those of the state"):
        cfg.build().restore(state)


# Text -------------------------------------------------------------------------------------------------------------------


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(["a", "\n", "\r\n", " ", "\t", "日本", "<|end|>", "<|", "x" * 90, "\n\n"]), max_size=60
    ).map("".join),
    st.sampled_from(["file", "blank", "<|end|>"]),
    st.integers(0, 12),
    st.sampled_from([64, 300, 1 << 20]),
)
def test_text_is_split_completely_and_goes_on_at_any_document(
    tmp_path: Path, text: str, split: str, cut: int, longest: int
) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    cfg = Text.Config(paths=str(tmp_path / "a.txt"), split=split, longest=longest)
    documents = [row.data["text"] for row in cfg.build()]
    assert all(0 < len(document.encode()) <= longest for document in documents)
    kept = "".join("".join(documents).split())
    assert kept == "".join((text.replace(split, "") if split == "<|end|>" else text).split())
    if split == "blank" and longest > 1000:
        assert not any("\n\n" in document.strip() for document in documents)
    first, second = resumed(cfg, cut)
    assert first == second


def test_documents_end_at_separators_wherever_chunks_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"document {i} " + "x" * (i % 37) for i in range(400)]
    for split, between in (("blank", "\r\n \r\n\n"), ("<|endoftext|>", "<|endoftext|>")):
        (tmp_path / "a.txt").write_bytes(between.join(words).encode())
        for chunk in (1, 7, 64, 5000):
            monkeypatch.setattr("orchard.data.text._CHUNK", chunk)
            rows = list(Text.Config(paths=str(tmp_path / "a.txt"), split=split).build())
            assert [row.data["text"] for row in rows] == words
        assert rows[2].place.endswith(":7" if split == "blank" else ":1")


def test_text_folders_shuffle_by_file_and_bad_bytes_are_named(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"text {number}")
    cfg = Text.Config(paths=str(tmp_path), order="shuffled", seed=5)
    source = cfg.build()
    first = [row.data["text"] for row in source]
    source.begin(1)
    second = [row.data["text"] for row in source]
    assert first != second and sorted(first) == sorted(second) and len(set(first)) == 20
    assert resumed(cfg, 7)[0] == resumed(cfg, 7)[1]
    (tmp_path / "03.txt").write_bytes(b"\xff")
    with pytest.raises(BadSample, match=r"03\.txt:1: not UTF-8"):
        list(cfg.build())
    skipping = cfg.clone(on_bad="skip").build()
    assert len(list(skipping)) == 19 and skipping.counts()["bad"] == 1


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "txt"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    line = b'{"text": "' + b"word " * 200 + b'"}\n'
    data = line * 8000  # 8 MB
    path = tmp_path / f"a.{kind}"
    path.write_bytes(gzip.compress(data, 1) if kind.endswith("gz") else data)
    cfg = Jsonl.Config(paths=str(path)) if "jsonl" in kind else Text.Config(paths=str(path), split="\n")
    tracemalloc.start()
    count = sum(1 for _ in cfg.build())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 8000 and peak < 2_000_000


# Parquet ----------------------------------------------------------------------------------------------------------------


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra) as caught:
        Parquet.Config(paths=str(tmp_path)).build()
    assert "orchard[data]" in caught.value.hint


def test_parquet_columns_row_groups_and_places(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    talk = [[USER, ANSWER], [USER, {"role": "assistant", "content": "", "tool_calls": CALLS["tool_calls"]}]]
    table = arrow.table({"messages": talk * 50, "other": list(range(100))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    words = [b"good", b"\xff", b"", b"fine"]
    column = arrow.Array.from_buffers(arrow.string(), 4, arrow.array(words, arrow.binary()).buffers())
    parquet.write_table(arrow.table({"content": column}), tmp_path / "b.parquet")
    cfg = Parquet.Config(paths=str(tmp_path), rename={"content": "text"}, on_bad="skip", rows=4)
    source = cfg.build()
    rows = list(source)
    assert len(rows) == 102 and rows[0].data["messages"] == [USER, ANSWER]
    assert rows[1].data["messages"][1]["tool_calls"] and rows[99].place.endswith("a.parquet:100")
    assert [row.data.get("text") for row in rows[100:]] == ["good", "fine"] and rows[-1].place.endswith("b.parquet:4")
    assert source.state()["tally"]["reasons"] == {"not-utf8": 1, "empty": 1}
    for cut in (0, 3, 7, 8, 50, 99, 100, 101, 102):
        first, second = resumed(cfg, cut)
        assert first == second == rows[cut:]
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(BadFile, match=r"c\.parquet"):
        list(cfg.build())
    (tmp_path / "c.parquet").unlink()
    with pytest.raises(BadFile, match="has the columns content"):
        list(islice(Parquet.Config(paths=str(tmp_path / "b.parquet")).build(), 1))
