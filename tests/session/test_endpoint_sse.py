"""Server-sent events: the same, however the bytes are cut; bounded; and no half of anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.session.errors import DecodingFailureError
from orchard.session.executors.sse import EventReader

texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=12)
ends = st.sampled_from([b"\n", b"\r", b"\r\n"])
noise = st.sampled_from(
    [b": keep alive", b":", b"event: message", b"id: 4", b"retry: 10", b"data", b"unknown: x", b"datax"]
)


def read(data: bytes, cuts: list[int]) -> list[str]:
    reader = EventReader()
    found: list[str] = []
    places = sorted({min(cut, len(data)) for cut in cuts})
    for start, end in zip([0, *places], [*places, len(data)]):
        found += reader.push(data[start:end])
    return found + reader.finish()


@given(
    st.lists(st.lists(texts, min_size=1, max_size=3), max_size=4),
    ends,
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_any_cut_gives_the_same_events(
    events: list[list[str]], end: bytes, cuts: list[int], marked: bool, spaced: bool
) -> None:
    data = b"\xef\xbb\xbf" if marked else b""
    for lines in events:
        # Without the optional space, a text that begins with one would lose it: that is the format.
        data += (
            b"".join(b"data:" + b" " * (spaced or line.startswith(" ")) + line.encode() + end for line in lines) + end
        )
    assert read(data, cuts) == ["\n".join(lines) for lines in events]
    assert read(data, list(range(len(data)))) == ["\n".join(lines) for lines in events]


@given(st.lists(noise, max_size=5), texts, st.lists(st.integers(0, 60), max_size=5), ends)
def test_comments_and_other_fields_are_passed_over(
    between: list[bytes], text: str, cuts: list[int], end: bytes
) -> None:
    lines = [line for line in between if line != b"data"]
    data = end.join([*lines, b"data: " + text.encode(), *lines, b"", b""])
    assert read(data, cuts) == [text]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=8))
def test_any_bytes_give_the_same_or_a_typed_error(data: bytes, cuts: list[int]) -> None:
    def outcome(cuts: list[int]) -> list[str] | str:
        try:
            return read(data, cuts)
        except DecodingFailureError as error:
            return error.message

    assert outcome(cuts) == outcome([]) == outcome(list(range(len(data))))


def test_an_event_without_its_empty_line_is_given_at_the_end() -> None:
    reader = EventReader()
    assert reader.push(b"data: [DONE]") == []
    assert reader.finish() == ["[DONE]"] and reader.finish() == []


def test_a_line_feed_after_a_whole_crlf_is_an_empty_line() -> None:
    reader = EventReader()
    assert reader.push(b"data: a\r") == []
    assert reader.push(b"\n") == []
    assert reader.push(b"\n") == ["a"]


def test_long_lines_and_long_events_are_refused() -> None:
    reader = EventReader(most_line=100, most_event=250)
    with pytest.raises(DecodingFailureError, match="a line of more than 100 bytes"):
        for _ in range(200):
            reader.push(b"x")
    reader = EventReader(most_line=100, most_event=250)
    with pytest.raises(DecodingFailureError, match="an event of more than 250 bytes"):
        for _ in range(10):
            reader.push(b"data: " + b"x" * 90 + b"\n")


def test_what_is_not_utf8_is_refused_with_what_came() -> None:
    with pytest.raises(DecodingFailureError, match="not UTF-8") as caught:
        EventReader().push(b"data: caf\xe9\n\n")
    assert caught.value.raw == "caf\ufffd" and caught.value.hint
