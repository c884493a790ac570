"""What judges promise: the same tokens ("same"), the same law ("rejection"), the same law of groups ("coarse")."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.generate.errors import NumericError
from orchard.generate.protocol import Rule, State
from orchard.generate.request import Request, Sampling
from orchard.generate.sampling import Sampler
from orchard.generate.speculative.accept import agreed, chooser_of, judge_of, law
from orchard.generate.speculative.coarse import Groups
from orchard.generate.speculative.drafting import Draft
from orchard.generate.speculative.options import Speculation
from orchard.generate.speculative.speculator import Speculator
from tests.generate.speculative.synthetic import Synthetic, speak

REJECTION = Speculation(kind="draft", length=3, accept="rejection")
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.7]),
    top_k=st.sampled_from([None, 1, 3]),
    top_p=st.sampled_from([None, 0.5, 0.9]),
    min_p=st.sampled_from([None, 0.2]),
    repetition_penalty=st.sampled_from([None, 1.3]),
)


class NoToken:
    """Rules one token out, and another one after it."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        out = scores.copy()
        out[self.token] = -np.inf
        if len(state.output) and state.output[-1] == 0:
            out[1] = -np.inf
        return out


def chi_square(counts: Counter[int] | Counter[tuple[int, ...]], law: dict[object, float]) -> tuple[float, float]:
    """The statistic, and a bound that it passes once in some ten thousand times where the law holds."""
    total = sum(counts.values())
    assert set(counts) <= {event for event, share in law.items() if share > 0}
    rest = [(counts[event], total * share) for event, share in law.items() if share > 0]  # type: ignore[index]
    many = [(seen, expected) for seen, expected in rest if expected >= 5]
    few = [pair for pair in rest if pair[1] < 5]
    if few:
        many.append((sum(seen for seen, _ in few), sum(expected for _, expected in few)))
    freedom = max(len(many) - 1, 1)
    return sum((seen - expected) ** 2 / expected for seen, expected in many), freedom + 4 * np.sqrt(2 * freedom) + 4


@given(
    sampling=samplings,
    kind=st.sampled_from(["lookup", "draft"]),
    length=st.integers(0, 6),
    noise=st.sampled_from([0.0, 0.3, 2.0]),
    seed=st.integers(0, 99),
    ruled=st.booleans(),
)
@settings(max_examples=60)
def test_same_gives_the_tokens_of_no_speculation(
    sampling: Sampling, kind: str, length: int, noise: float, seed: int, ruled: bool
) -> None:
    model = Synthetic(12, seed=seed, past=2)
    rules: tuple[Rule, ...] = (NoToken(seed % 12),) if ruled else ()
    plain = [
        Request((1, 2, 3, place), max_tokens=30, sampling=sampling, seed=seed + place, rules=rules)
        for place in range(3)
    ]
    speculation = Speculation(kind=kind, length=length)  # type: ignore[arg-type]
    guessed = [
        Request(one.ids, 30, sampling, seed=one.seed, rules=rules, speculation=speculation) for one in plain[:2]
    ] + plain[2:]  # one row without speculation among them
    draft = Synthetic(12, seed=seed, noise=noise, past=2)
    expected = [talker.output for talker in speak(model, plain, ends=[11])]
    got = speak(model, guessed, Speculator(model, draft=draft, ends=[11]), ends=[11])
    assert [talker.output for talker in got] == expected
    if kind == "draft" and noise == 0.0 and length:
        # The draft is the model itself: every guess comes true, so only room and ends cut calls short.
        assert got[0].calls <= 1 + -(-(len(got[0].output) - 1) // (length + 1))


LAWS: dict[str, tuple[Sampling, tuple[Rule, ...], float]] = {
    "plain": (Sampling(temperature=1.0), (), 1.0),
    "hot": (Sampling(temperature=2.5), (), 1.0),
    "draft alike": (Sampling(temperature=0.8), (), 0.1),
    "draft far off": (Sampling(temperature=0.7), (), 5.0),
    "top-k": (Sampling(temperature=1.2, top_k=3), (), 1.0),
    "nucleus": (Sampling(temperature=1.0, top_p=0.7), (), 1.0),
    "penalty": (Sampling(temperature=1.0, repetition_penalty=1.5), (), 1.0),
    "rules": (Sampling(temperature=1.0), (NoToken(2),), 1.0),
}


@pytest.mark.parametrize("name", LAWS)
def test_rejection_keeps_the_law_of_one_token(name: str) -> None:
    sampling, rules, noise = LAWS[name]
    model, draft = Synthetic(6, seed=3, spread=1.0), Synthetic(6, seed=3, spread=1.0, noise=noise)
    counts: Counter[int] = Counter()
    kept, runs, state = 0, 4000, State((1, 2, 3), (1,))
    request = Request(state.prompt, sampling=sampling, seed=11, rules=rules, speculation=REJECTION)
    sampler = Sampler(request)
    choose, judge = chooser_of(request, sampler), judge_of(request, sampler)
    for _ in range(runs):  # the numbers of one place after another, and the same scores at all of them
        guess, q = choose(draft.scores((1, 2, 3)), state)
        assert q is not None
        chosen = judge.step(state, model.scores((1, 2, 3)), Draft((guess,), [q]), 0).output[-1]
        counts[chosen] += 1
        kept += chosen == guess
        state = state.plus(1)
    p, q = (law(sampler, one.scores((1, 2, 3)), state) for one in (model, draft))
    seen, bound = chi_square(counts, dict(enumerate(p)))
    assert seen < bound, (counts, p)
    overlap = np.minimum(p, q).sum()  # the best that any judge can do
    assert abs(kept / runs - overlap) < 4 * np.sqrt(overlap * (1 - overlap) / runs) + 1e-9
    assert sum(abs(counts[token] / runs - p[token]) for token in range(6)) / 2 < 0.03


@pytest.mark.parametrize(
    ("length", "sampling"),
    [(1, Sampling(temperature=1.0)), (2, Sampling(temperature=1.5, top_k=3)), (5, Sampling(temperature=1.0))],
)
def test_rejection_keeps_the_law_of_whole_answers(length: int, sampling: Sampling) -> None:
    """Three tokens after the first, through the drafter, its slots and the loop."""
    model = Synthetic(4, seed=1, spread=1.0, past=2)
    draft = Synthetic(4, seed=1, spread=1.0, past=2, noise=0.8)
    speculator = Speculator(model, draft=draft)
    speculation = Speculation(kind="draft", length=length, accept="rejection")
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(1200):
        request = Request((1, 2), max_tokens=4, sampling=sampling, seed=seed, speculation=speculation)
        counts[speak(model, [request], speculator)[0].output] += 1
    sampler, exact = Sampler(Request((1, 2), sampling=sampling, seed=0)), {}
    for answer in product(range(4), repeat=4):
        share = 1.0
        for place, token in enumerate(answer):
            share *= law(sampler, model.scores((1, 2, *answer[:place])), State((1, 2), answer[:place]))[token]
        exact[answer] = share
    seen, bound = chi_square(counts, exact)  # type: ignore[arg-type]
    assert seen < bound


def test_rejection_keeps_more_guesses_than_same_where_the_temperature_is_high() -> None:
    model = Synthetic(64, seed=5, spread=0.7, past=2)
    rates = {}
    for accept in ("same", "rejection"):
        speculator = Speculator(model, draft=Synthetic(64, seed=5, spread=0.7, past=2, noise=0.4))
        speculation = Speculation(kind="draft", length=4, accept=accept)
        requests = [
            Request((1, 2, seed), 80, Sampling(temperature=1.0), seed=seed, speculation=speculation)
            for seed in range(8)
        ]
        speak(model, requests, speculator)
        facts = speculator.facts()["draft"]
        rates[accept] = facts["kept"] / facts["guessed"]
    assert rates["rejection"] > 1.2 * rates["same"]


@given(st.integers(0, 200), st.sampled_from(["same", "rejection"]))
@settings(max_examples=20)
def test_greedy_answers_are_the_same_under_every_exact_judge(seed: int, accept: str) -> None:
    model, draft = Synthetic(10, seed=seed, past=2), Synthetic(10, seed=seed, past=2, noise=0.5)
    speculation = Speculation(kind="draft", length=3, accept=accept)  # type: ignore[arg-type]
    plain = speak(model, [Request((1, 2), 25, seed=seed)])[0]
    guessed = speak(model, [Request((1, 2), 25, seed=seed, speculation=speculation)], Speculator(model, draft=draft))[0]
    assert guessed.output == plain.output


def test_coarse_keeps_more_and_its_groups_keep_their_law() -> None:
    """Two groups of tokens that only the target tells apart."""
    table = np.array([[1.0, 0], [1, 0.01], [1, -0.01], [0, 1.0], [0.01, 1], [-0.01, 1]])
    groups = Groups.from_embeddings(table, 0.9)
    model, draft = Synthetic(6, seed=8, spread=1.0), Synthetic(6, seed=8, spread=1.0, noise=1.5)
    counts: Counter[int] = Counter()
    for seed in range(1500):
        request = Request(
            (1, 2, 3),
            2,
            Sampling(temperature=1.0),
            seed=seed,
            speculation=Speculation(kind="draft", length=1, accept="coarse", groups=groups),
        )
        talker = speak(model, [request], Speculator(model, draft=draft))[0]
        if talker.output[0] == 4:
            counts[int(talker.output[1] >= 3)] += 1
    p = law(Sampler(request), model.scores((2, 3, 4)), State((1, 2, 3), (4,)))
    seen, bound = chi_square(counts, {0: p[:3].sum(), 1: p[3:].sum()})
    assert sum(counts.values()) > 100 and seen < bound


def test_the_law_is_that_of_the_sampler() -> None:
    scores = Synthetic(9).scores((1, 2))
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=0.5, top_p=0.8), Sampling()):
        counts = np.zeros(9)
        for seed in range(600):
            sampler = Sampler(Request((1,), sampling=sampling, seed=seed))
            counts[sampler.step(State((1,)), scores).output[0]] += 1
        probabilities = law(sampler, scores, State((1,)))
        assert probabilities.sum() == pytest.approx(1, abs=1e-12)
        assert np.abs(counts / 600 - probabilities).max() < 0.09
        assert not counts[probabilities == 0].any()


def test_broken_scores_say_what_is_broken() -> None:
    request = Request((1,), sampling=Sampling(temperature=1.0), seed=1, speculation=REJECTION)
    sampler = Sampler(request)
    draft = Draft((0,), [np.full(4, 0.25)])
    judge = judge_of(request, sampler)
    with pytest.raises(NumericError, match="NaN"):
        judge.step(State((1,)), np.array([0, np.nan, 0, 0], np.float32), draft, 0)
    everything = Request(
        (1,), sampling=Sampling(temperature=1.0), seed=1, rules=(lambda s, _: s - np.inf,), speculation=REJECTION
    )
    with pytest.raises(NumericError, match="no token"):
        judge_of(everything, Sampler(everything)).step(State((1,)), np.zeros(4, np.float32), draft, 0)


def test_agreed_counts_from_the_first_on() -> None:
    assert agreed([1, 2, 3], [1, 2, 4]) == 2
    assert agreed([1, 2, 3, 4], [1, 2, 3]) == 3
    assert agreed([5], [1, 5]) == 0
    assert agreed([], []) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "guess"},
        {"accept": "often"},
        {"length": -1},
        {"length": 65},
        {"length": True},
        {"length": 2.0},
        {"layers": 3},
        {"kind": "early", "layers": -1},
        {"accept": "coarse"},
        {"groups": Groups.from_embeddings(np.eye(3), 2.0)},
    ],
)
def test_options_are_checked_when_they_are_made(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        Speculation(**wrong)  # type: ignore[arg-type]
    assert caught.value.hint
