"""The index of earlier places against a plain search through the text."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from orchard.generate.protocol import State
from orchard.generate.speculative.drafting import Ask, Choose
from orchard.generate.speculative.lookup import LEAST, PAST, PLACES, Index, LookupDrafter

texts = st.lists(st.integers(0, 3), max_size=60)


def searched(tokens: list[int]) -> tuple[int, int] | None:
    """Among the last places where the last two tokens stood, the one with the longest common past, the latest of equals."""
    pair, end = tokens[-LEAST:], len(tokens)
    places = [place for place in range(LEAST, end) if tokens[place - LEAST : place] == pair][::-1][:PLACES]
    best: tuple[int, int] | None = None
    for place in places if end > LEAST else []:
        past = LEAST
        while past < min(PAST, place) and tokens[place - past - 1] == tokens[end - past - 1]:
            past += 1
        if best is None or past > best[1]:
            best = (place, past)
    return best


def never() -> Choose:
    def choose(scores: object, state: State) -> tuple[int, None]:
        raise AssertionError("lookup asks for no scores")

    return choose


@given(texts, st.integers(1, 12))
def test_the_index_finds_what_a_search_finds(tokens: list[int], most: int) -> None:
    index = Index(tokens)
    found = searched(tokens)
    assert index.find() == found
    draft = index.guess(most)
    if found is None:
        assert not draft.ids
        return
    text = list(tokens)
    for place in range(found[0], found[0] + most):  # the copy goes on with what it has copied
        text.append(text[place])
    assert draft.ids == tuple(text[len(tokens) :])
    assert draft.sort == {2: 2, 3: 3, 4: 3}.get(found[1], 5)


@given(texts, st.lists(st.integers(0, 60), max_size=4))
def test_tokens_may_come_in_any_pieces(tokens: list[int], cuts: list[int]) -> None:
    index = Index()
    places = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    for start, stop in pairwise(places):
        index.extend(tokens[start:stop])
    assert len(index) == len(tokens)
    assert index.find() == Index(tokens).find()


@given(texts.filter(bool), texts, st.booleans())
def test_a_drafter_follows_an_answer_and_forgets(prompt: list[int], answer: list[int], forgets: bool) -> None:
    drafter, state = LookupDrafter(), State(tuple(prompt))
    for token in answer:
        state = state.plus(token)
        if forgets and token == 3:
            drafter.forget(7)
        draft = drafter.propose([Ask(7, state, 5, never())])[0]
        assert draft.ids == Index([*prompt, *state.output]).guess(5).ids


def test_another_answer_under_the_same_key_is_begun_anew() -> None:
    drafter = LookupDrafter()
    drafter.propose([Ask(1, State((1, 2, 3, 1, 2), (3, 1, 2)), 2, never())])
    assert drafter.propose([Ask(1, State((5, 6, 7, 5, 6)), 1, never())])[0].ids == (7,)


def test_a_guess_costs_the_same_in_a_long_text() -> None:
    """A pair that stands everywhere, with pasts that never agree: the worst there is."""

    def spent(count: int) -> float:
        index = Index([token for number in range(count) for token in (number % 7 + number * 11 % 97 + 10, 1, 2)])
        times = []
        for _ in range(20):
            begun = time.perf_counter()
            for _ in range(20):
                index.guess(8)
            times.append(time.perf_counter() - begun)
        return min(times)

    assert spent(20_000) < 5 * spent(200)


def test_only_the_last_places_are_looked_at() -> None:
    """The long common past is so many places back; nearer ones have a past of two."""
    for back, sort in ((PLACES, 3), (PLACES + 1, 2)):
        nearer = [token for number in range(back - 1) for token in (100 + number, 1, 2)]
        tokens = [7, 8, 1, 2, 50, *nearer, 8, 1, 2]
        assert Index(tokens).find() == searched(tokens)
        assert Index(tokens).guess(1).sort == sort
