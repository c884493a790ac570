"""Each rule against a plain twin, and the draw against exact probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.generate.protocol import Rule, State
from orchard.generate.request import Request, Sampling
from orchard.generate.rules import MinP, RepetitionPenalty, Temperature, TopK, TopP, rules_of
from orchard.generate.sampling import Sampler, Uniforms, logprob_of
from orchard.ops.kernels.sampling import pick

EMPTY = State((0,))
OUT = -math.inf
FIRST_OF_SEED_5 = 0.829018862140071
number = st.integers(-40, 40).map(lambda n: n / 4)  # quarters: equal scores happen, and float32 holds them exactly
rows = st.lists(number, min_size=1, max_size=40)
some_out = st.lists(st.one_of(number, number, number, st.just(OUT)), min_size=1, max_size=40).filter(
    lambda row: max(row) > OUT
)


def array(row: list[float]) -> np.ndarray:
    return np.asarray(row, dtype=np.float32)


def probabilities(row: list[float]) -> np.ndarray:
    mass = np.exp(np.asarray(row, dtype=np.float64) - max(row))
    return mass / mass.sum()


def by_likelihood(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def kept(scores: np.ndarray) -> set[int]:
    return set(np.flatnonzero(scores > OUT).tolist())


def applied(rule: Rule, row: list[float], state: State = EMPTY) -> np.ndarray:
    """The rule's answer; what it was given must not change, and what it keeps must keep its value."""
    before = array(row)
    after = rule(before, state)
    assert np.array_equal(before, array(row)) and after.dtype == np.float32
    return after


@given(rows, st.floats(0.01, 50), st.data())
def test_repetition_penalty(row: list[float], penalty: float, data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, len(row) - 1), max_size=12)
    prompt, output = tuple(data.draw(ids)) or (0,), tuple(data.draw(ids))
    twin = np.asarray(row, dtype=np.float64)
    for i in {*prompt, *output}:
        twin[i] = twin[i] / penalty if twin[i] > 0 else twin[i] * penalty
    rule = RepetitionPenalty(penalty)
    growing = State(prompt)
    for token in output:  # one token at a time: what was seen is remembered
        applied(rule, row, growing)
        growing = growing.plus(token)
    for state in (growing, growing, State(prompt, output)):
        np.testing.assert_allclose(applied(rule, row, state), twin, rtol=1e-5)
    other = applied(rule, row, State((len(row) - 1,), ()))
    np.testing.assert_array_equal(other[:-1], array(row[:-1]))


@given(some_out, st.floats(1e-3, 100))
def test_temperature(row: list[float], temperature: float) -> None:
    mass = probabilities(applied(Temperature(temperature), row).tolist())
    scaled = [value / temperature for value in row]
    np.testing.assert_allclose(mass, probabilities(scaled), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-20, 1e38, 1e308])
def test_extreme_temperatures_stay_numbers(temperature: float) -> None:
    mass = probabilities(applied(Temperature(temperature), [3.0, 1e4, -1e10, OUT, 1e4]).tolist())
    assert mass.sum() == pytest.approx(1)
    assert mass.tolist() == pytest.approx([0, 0.5, 0, 0, 0.5] if temperature < 1 else [0.25, 0.25, 0.25, 0, 0.25])


@given(some_out, st.integers(1, 50))
def test_top_k(row: list[float], k: int) -> None:
    after = applied(TopK(k), row)
    assert kept(after) == {i for i in by_likelihood(row)[:k] if row[i] > OUT}
    assert all(after[i] == row[i] for i in kept(after))


@given(some_out, st.floats(0.001, 1, exclude_max=True))
def test_top_p(row: list[float], p: float) -> None:
    mass, stays, total = probabilities(row), [], 0.0
    sums = []
    for i in by_likelihood(row):
        stays.append(i)
        total += mass[i]
        sums.append(total)
        if total >= p:
            break
    after = applied(TopP(p), row)
    assert all(after[i] == row[i] for i in kept(after))
    if min(abs(each - p) for each in sums) > 1e-9:  # on the edge itself, rounding may decide
        assert kept(after) == set(stays)


@pytest.mark.parametrize(
    ("row", "p", "stays"),
    [
        ([0.0, 0.0, 0.0, 0.0], 0.5, {0, 1}),  # exactly reached: no more is needed; lower ids first
        ([0.0, 0.0, 0.0, 0.0], 0.51, {0, 1, 2}),
        ([0.0, 9.0, 0.0], 1e-9, {1}),  # at least one
        ([0.0, 9.0, OUT], 1 - 1e-16, {0, 1}),
        ([5.0], 0.1, {0}),
        ([0.0, -50.0, -80.0], 1 - 1e-12, {0}),
    ],
)
def test_top_p_edges(row: list[float], p: float, stays: set[int]) -> None:
    assert kept(applied(TopP(p), row)) == stays


def test_top_p_on_a_real_sized_vocabulary_equals_sorting_everything() -> None:
    for scale, p in [(0.01, 0.9), (1.0, 0.5), (3.0, 0.99), (10.0, 0.999)]:
        scores = (np.random.default_rng(1).standard_normal(50_000) * scale).astype(np.float32)
        mass = probabilities(scores.tolist())
        order = np.argsort(-mass, kind="stable")
        count = int((mass[order].cumsum() < p).sum()) + 1
        assert kept(TopP(p)(scores, EMPTY)) == set(order[:count].tolist())


@given(some_out, st.floats(0.001, 1))
def test_min_p(row: list[float], share: float) -> None:
    mass = probabilities(row)
    after = applied(MinP(share), row)
    assert all(after[i] == row[i] for i in kept(after))
    if min(abs(mass / mass.max() - share)) > 1e-6:
        assert kept(after) == {i for i in range(len(row)) if mass[i] >= share * mass.max()}


def test_min_p_edges() -> None:
    assert kept(applied(MinP(1.0), [1.0, 2.0, 2.0, OUT])) == {1, 2}
    assert kept(applied(MinP(math.exp(-1) - 1e-6), [1.0, 2.0, 0.0])) == {0, 1}


def test_rules_come_in_order_and_only_where_they_do_something() -> None:
    def names(**fields: float) -> list[str]:
        return [type(rule).__name__ for rule in rules_of(Sampling(**fields))]  # type: ignore[arg-type]

    every = {"repetition_penalty": 1.1, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    assert names(temperature=0.7, **every) == ["RepetitionPenalty", "Temperature", "TopK", "TopP", "MinP"]
    assert names(**every) == ["RepetitionPenalty"]
    assert names(temperature=1.0, repetition_penalty=1.0, top_p=1.0, min_p=0.0) == []


def test_the_draw_follows_the_probabilities_exactly() -> None:
    scores = array([OUT, *np.log([1.0, 2.0, 4.0, 1.0]), OUT])
    steps = [(i + 0.5) / 800 for i in range(800)]
    counts = np.bincount([pick(scores, step) for step in steps], minlength=6)
    assert counts.tolist() == [0, 100, 200, 400, 100, 0]
    assert pick(scores, 0.0) == 1 and pick(scores, 1 - 2**-53) == 4
    assert [pick(np.zeros(4, np.float32), step) for step in (0.0, 0.25, 0.5, 0.75)] == [
        0,
        1,
        2,
        3,
    ]  # a border opens a share


@given(some_out, st.floats(0, 1, exclude_max=True))
def test_the_draw_never_takes_what_is_ruled_out(row: list[float], uniform: float) -> None:
    chosen = pick(array(row), uniform)
    assert row[chosen] > OUT
    below = probabilities(row)[:chosen].sum()
    assert below <= uniform + 1e-9 and uniform <= below + probabilities(row)[chosen] + 1e-9


def test_numbers_can_be_read_in_any_order() -> None:
    forwards, backwards = Uniforms(5), Uniforms(5)
    assert [forwards[i] for i in range(20)] == [backwards[i] for i in reversed(range(20))][::-1]
    assert Uniforms(6)[0] != forwards[0] and all(0 <= forwards[i] < 1 for i in range(100))
    assert Uniforms(5)[0] == FIRST_OF_SEED_5, "answers of old seeds would change"
    assert np.mean([forwards[i] for i in range(4000)]) == pytest.approx(0.5, abs=0.03)


def test_a_step_back_gives_the_same_choice() -> None:
    sampler = Sampler(Request(ids=(1,), sampling=Sampling(temperature=1.0), seed=4))
    scores = np.zeros(1000, np.float32)
    first = sampler.step(State((1,)), scores)
    second = sampler.step(first, scores)
    assert sampler.step(first, scores) == second and sampler.step(State((1,)), scores) == first
    assert first.output[0] != second.output[1]


@given(rows)
def test_greedy_takes_the_lowest_id_among_equals(row: list[float]) -> None:
    sampler = Sampler(Request(ids=(0,), sampling=Sampling(top_k=1, top_p=0.1, min_p=1.0), seed=0))
    assert sampler.step(EMPTY, array(row)).output == (int(np.argmax(row)),)
    narrow = Sampler(Request(ids=(0,), sampling=Sampling(temperature=1.0, top_k=1), seed=0))
    assert narrow.step(EMPTY, array(row)).output == (int(np.argmax(row)),)


@given(rows, st.integers(0, 10**6), st.data())
def test_the_sampling_head_and_the_rules_choose_alike(row: list[float], seed: int, data: st.DataObject) -> None:
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([1e-40, 0.1, 0.7, 1.0, 3.0, 1e40])),
        top_k=data.draw(st.none() | st.integers(1, 50)),
        top_p=data.draw(st.none() | st.sampled_from([0.13, 0.77, 0.999, 1.0])),
        min_p=data.draw(st.none() | st.sampled_from([0.0, 0.011, 0.3, 1.0])),
    )
    head = Sampler(Request(ids=(0,), sampling=sampling, seed=seed))
    by_rules = Sampler(Request(ids=(0,), sampling=sampling, seed=seed, rules=(lambda scores, state: scores,)))
    assert head.choice is not None and by_rules.choice is None
    one = other = EMPTY
    for _ in range(4):
        one, other = head.step(one, array(row)), by_rules.step(other, array(row))
    assert one == other


@given(rows)
def test_logprobs(row: list[float]) -> None:
    entry = logprob_of(array(row), len(row) - 1, min(3, len(row)))
    logs = np.log(probabilities(row))
    assert entry.logprob == pytest.approx(logs[-1], abs=1e-4)
    assert [value for _, value in entry.top] == pytest.approx(sorted(logs)[::-1][:3], abs=1e-4)
    assert list(entry.top) == sorted(entry.top, key=lambda pair: (-pair[1], pair[0]))
