"""Coarse acceptance: groups are what they say, laws add up, groups come out by the target's law, tokens never against a rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.generate.engine import Engine
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.request import Request, Sampling
from orchard.generate.speculative import Speculation, coarse
from orchard.generate.speculative.coarse import CoarseAcceptance, Groups
from orchard.ops.plan.early import early_plan
from orchard.text.tokenizer import Tokenizer
from tests.generate.conftest import make_decoder


def table(count: int, seed: int = 0, clusters: int = 5, dim: int = 6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(clusters, dim))[rng.integers(clusters, size=count)] + 0.4 * rng.normal(size=(count, dim))


def laws(count: int, seed: int, *, zeros: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Two laws that have something in common; `zeros`: the share of tokens that each leaves out."""
    rng = np.random.default_rng(seed)
    p, other = rng.dirichlet(np.full(count, 0.3), size=2)
    q = 0.3 * p + 0.7 * other
    p, q = (x * (rng.random(count) >= zeros) + 1e-12 * (np.arange(count) == 3) for x in (p, q))
    return p / p.sum(), q / q.sum()


def plain_law(groups: Groups, p: np.ndarray) -> np.ndarray:
    """The definition, token by token."""
    found = np.zeros(len(p))
    for token, mass in enumerate(p):
        for owner in groups.group(token):
            found[owner] += mass / groups.sizes[token]
    return found


def played(
    acceptance: CoarseAcceptance, p: np.ndarray, q: np.ndarray | None, samples: int, token: int | None = None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Counts of groups and of tokens, and the share that was kept, over many drafts from q (or of one named token)."""
    rng = np.random.default_rng(7)
    numbers = iter(rng.random, None)
    drafted = rng.choice(len(p), samples, p=q) if q is not None else np.full(samples, token)
    judged = [acceptance.decide(p, q, int(one), numbers) for one in drafted]
    groups, tokens = ([getattr(one, name) for one in judged] for name in ("group", "token"))
    return (
        np.bincount(groups, minlength=len(p)),
        np.bincount(tokens, minlength=len(p)),
        float(np.mean([one.accepted for one in judged])),
    )


def surprising(counts: np.ndarray, law: np.ndarray) -> bool:
    """Whether counts are further from a law than samples of it are, by chi-square and six standard deviations."""
    samples = counts.sum()
    common = law * samples > 5
    wanted, got = law[common] * samples, counts[common]
    rest = (law[~common].sum() * samples, counts[~common].sum())
    wanted, got = np.append(wanted, rest[0]), np.append(got, rest[1])
    if rest[0] < 5:
        wanted, got = wanted[:-1], got[:-1]
    freedom = len(wanted) - 1
    return float(((got - wanted) ** 2 / wanted).sum()) > freedom + 6 * np.sqrt(2 * freedom)


# Groups -------------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 60), st.floats(-1, 1.2), st.integers(0, 5), st.integers(1, 400))
def test_groups_are_all_pairs_above_theta_whatever_the_chunks(count: int, theta: float, seed: int, chunk: int) -> None:
    rows = table(count, seed).astype(np.float32)
    groups = Groups.from_embeddings(rows, theta, at_a_time=chunk)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit @ unit.T
    for token in range(count):
        found = set(groups.group(token).tolist())
        clear = {int(k) for k in np.flatnonzero(cosines[token] > theta + 1e-5)}
        maybe = {int(k) for k in np.flatnonzero(cosines[token] > theta - 1e-5)}
        assert (clear if theta < 1 else set()) - {token} <= found - {token} <= maybe and token in found
        assert all(token in groups.group(other) for other in found)


def test_those_that_must_stay_alone_do() -> None:
    rows = table(50)
    rows[7] = 0
    groups = Groups.from_embeddings(rows, -0.99, alone=[3, 4])
    assert [groups.group(token).tolist() for token in (3, 4, 7)] == [[3], [4], [7]]
    assert groups.sizes.max() > 20 and not {3, 4, 7} & set(groups.group(0).tolist())
    assert (Groups.from_embeddings(rows, 1.5).sizes == 1).all()


@pytest.mark.parametrize("mean", [1, 3, 9.5, 40])
def test_a_mean_size_is_met_from_below(mean: float) -> None:
    groups = Groups.of_size(table(300, clusters=30), mean, alone=range(4))
    assert mean * 0.85 - 0.2 <= groups.mean_size <= mean
    assert groups.nbytes == 4 * len(groups.members) + 8 * 301 + 8 * 300 and "300 tokens" in repr(groups)


def test_groups_survive_being_stored_as_arrays() -> None:
    groups = Groups.from_embeddings(table(40), 0.5)
    again = Groups(groups.offsets.tolist(), groups.members.tolist())
    assert np.array_equal(again.members, groups.members) and again.mean_size == groups.mean_size


@pytest.mark.parametrize(
    ("offsets", "members"),
    [
        ([0, 1, 2], [0, 0]),  # token 1 is not in its own group
        ([0, 2, 3], [0, 1, 1]),  # 1 is like 0, 0 not like 1
        ([0, 2, 4], [1, 0, 0, 1]),  # not in the order of ids
        ([0, 1, 2], [0, 5]),
        ([0, 1, 2], [0, -1]),
        ([0, 1, 3], [0, 1]),
        ([0, 0, 1], [1]),
        ([0], []),
    ],
)
def test_arrays_that_are_no_groups_are_refused(offsets: list[int], members: list[int]) -> None:
    with pytest.raises(UsageError, match="no groups"):
        Groups(offsets, members)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Groups.from_embeddings(table(9), float("nan")), "theta"),
        (lambda: Groups.from_embeddings(table(9), True), "theta"),
        (lambda: Groups.from_embeddings(np.zeros(4), 0.5), "shape"),
        (lambda: Groups.from_embeddings(np.full((2, 2), np.inf), 0.5), "infinite"),
        (lambda: Groups.from_embeddings(table(9), 0.5, alone=[9]), "token 9"),
        (lambda: Groups.of_size(table(9), 0.5), "mean group size"),
    ],
)
def test_bad_tables_are_refused_by_name(make, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        make()
    assert caught.value.hint


def test_groups_that_would_fill_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarse, "MOST_MEMBERS", 500)
    with pytest.raises(UsageError, match="members on average"):
        Groups.from_embeddings(table(60), -1.0)


# Laws ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(4, 50), st.floats(0, 1.1), st.integers(0, 9), st.sampled_from([0.0, 0.5, 0.95]))
def test_every_tokens_mass_is_split_and_none_is_lost(count: int, theta: float, seed: int, zeros: float) -> None:
    groups = Groups.from_embeddings(table(count, seed), theta)
    p, q = laws(count, seed, zeros=zeros)
    law = groups.law(p)
    np.testing.assert_allclose(law, plain_law(groups, p), atol=1e-12)
    assert law.sum() == pytest.approx(1)
    assert [groups.mass(k, p) for k in range(count)] == pytest.approx(law.tolist(), abs=1e-12)
    assert CoarseAcceptance(groups, strict=False).acceptance(p, q) >= np.minimum(p, q).sum() - 1e-12


@pytest.mark.parametrize("tries", [0, 64])  # the law of what is left in full, and by thinning
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_groups_come_out_by_the_targets_law(tries: int, strict: bool, zeros: float) -> None:
    groups = Groups.from_embeddings(table(40, clusters=8), 0.7)
    acceptance = CoarseAcceptance(groups, strict, tries)
    p, q = laws(40, 2, zeros=zeros)
    by_group, by_token, kept = played(acceptance, p, q, 12_000)
    assert not surprising(by_group, groups.law(p))
    assert kept == pytest.approx(acceptance.acceptance(p, q), abs=0.025)
    assert groups.mean_size > 2 and surprising(by_token, p)  # the law of tokens is not the target's: that is the price
    if strict:
        assert not by_token[p == 0].any()


def test_accepting_by_a_law_that_is_not_split_would_be_noticed() -> None:
    """The counting can fail: a draft that is always kept does not have the target's law."""
    groups = Groups.from_embeddings(table(40, clusters=8), 0.7)
    p, q = laws(40, 2)
    by_group, _, _ = played(CoarseAcceptance(groups), q, q, 12_000)
    assert not surprising(by_group, groups.law(q)) and surprising(by_group, groups.law(p))


@pytest.mark.parametrize("tries", [0, 64])
def test_groups_of_one_are_ordinary_speculative_sampling(tries: int) -> None:
    groups = Groups.from_embeddings(table(30), 2.0)
    acceptance = CoarseAcceptance(groups, tries=tries)
    p, q = laws(30, 4, zeros=0.3)
    assert acceptance.acceptance(p, q) == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)
    _, by_token, _ = played(acceptance, p, q, 12_000)
    assert not surprising(by_token, p)


def test_a_named_guess_counts_as_a_law_with_one_token() -> None:
    groups = Groups.from_embeddings(table(40, clusters=8), 0.7)
    p, _ = laws(40, 5)
    token = int(groups.sizes.argmax())
    sure = np.zeros(40)
    sure[token] = 1
    for tries in (0, 64):
        acceptance = CoarseAcceptance(groups, tries=tries)
        by_group, _, kept = played(acceptance, p, None, 5_000, token)
        assert not surprising(by_group, groups.law(p))
        assert kept == pytest.approx(acceptance.acceptance(p, sure), abs=0.025)
        numbers = np.random.default_rng(1).random((50, 300))
        for row in numbers:
            assert acceptance.judge(p, None, token, row) == acceptance.judge(p, sure, token, row)


def test_one_token_left_is_the_token_written() -> None:
    """A greedy target, or a grammar that leaves no choice: coarse acceptance changes nothing."""
    groups = Groups.from_embeddings(table(40, clusters=4), 0.3)
    _, q = laws(40, 6)
    only = int(groups.sizes.argmax())
    p = np.zeros(40, np.float32)
    p[only] = 1
    rng = np.random.default_rng(0)
    for token in range(40):
        accepted, written = CoarseAcceptance(groups).judge(p, q.astype(np.float32), token, iter(rng.random, None))
        assert written == only and (token == only or not accepted)


@settings(max_examples=40)
@given(st.integers(0, 50), st.integers(0, 39), st.sampled_from([0.0, 0.8]), st.booleans())
def test_the_same_numbers_give_the_same_token(seed: int, token: int, zeros: float, sure: bool) -> None:
    groups = Groups.from_embeddings(table(40, seed), 0.6)
    p, q = laws(40, seed, zeros=zeros)
    acceptance = CoarseAcceptance(groups)
    numbers = np.random.default_rng(seed).random(3 * acceptance.tries + 4)  # never more than it says
    first, again = (acceptance.judge(p, None if sure else q, token, numbers) for _ in range(2))
    assert first == again and p[first[1]] > 0 and (not first[0] or first[1] == token)


def test_numbers_at_the_ends_are_no_trouble() -> None:
    groups = Groups.from_embeddings(table(20), 0.5)
    p, q = laws(20, 1, zeros=0.6)
    last = 1 - 2.0**-53
    for number in (0.0, last):
        for tries in (0, 3):
            for token in range(20):
                _, written = CoarseAcceptance(groups, tries=tries).judge(p, q, token, [number] * 20)
                assert p[written] > 0
    assert CoarseAcceptance(groups).judge(p, p, 3, [0.0, last])[0]


def test_other_vocabularies_and_ids_are_refused() -> None:
    acceptance = CoarseAcceptance(Groups.from_embeddings(table(20), 0.5))
    p, q = laws(20, 1)
    for bad in ((p[:-1], q, 0), (p, q[:-1], 0)):
        with pytest.raises(UsageError, match="groups are of 20 tokens"):
            acceptance.judge(*bad, [0.5] * 4)
    with pytest.raises(UsageError, match="no token 20"):
        acceptance.judge(p, q, 20, [0.5] * 4)


# In the engine ------------------------------------------------------------------------------------------------------------


def test_a_request_can_ask_for_it_and_a_greedy_answer_stays_the_same(tokenizer: Tokenizer) -> None:
    model = NativeRunner(lower(make_decoder(tokenizer.vocab_size, context=128)))
    engine = Engine(model, tokenizer, draft=NativeRunner(early_plan(model.plan, 1)))
    groups = Groups.of_size(table(tokenizer.vocab_size, clusters=20), 12, alone=range(4))
    wanted = Speculation(kind="draft", length=4, accept="coarse", groups=groups)
    ids, hot = tuple(b"the and the and"), Sampling(temperature=0.9)
    greedy, plain = (engine.answer([Request(ids, 24, speculation=way, seed=0)])[0] for way in (wanted, None))
    assert greedy.ids == plain.ids
    first, again, single = (
        engine.answer([Request(ids, 40, hot, speculation=way, seed=1)])[0]
        for way in (wanted, wanted, Speculation(kind="draft", length=4, accept="rejection"))
    )
    assert first.ids == again.ids and len(first.ids) == 40
    assert first.usage.calls < 40 and single.usage.calls <= 40
