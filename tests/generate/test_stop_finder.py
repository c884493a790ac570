"""Stop strings: the same text whatever the pieces, and no more held back than needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchard.generate.stops import StopFinder

letters = st.text("ab", max_size=25)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first stop string to be complete, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        met = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(met)], True
    return text, False


@given(st.lists(letters, max_size=8), stop_lists)
def test_the_text_is_cut_at_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    shown = "".join(map(finder.push, pieces))
    assert (shown + finder.finish(), finder.found) == cut("".join(pieces), stops)
    assert finder.finish() == "" and (not finder.found or finder.push("ab") == "")


@given(letters, stop_lists)
def test_only_a_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    shown = finder.push(text)
    if not finder.found:
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stop_strings_nothing_is_held_back() -> None:
    finder = StopFinder(())
    assert finder.push("anything") == "anything" and finder.finish() == "" and not finder.found
