"""The predictor of self-consistency: what it learns, what it is worth in tokens, its files, and what it decides in the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import BadFile, UsageError
from orchard.generate.budget import Thinking, hidden_of, thinking_rule
from orchard.generate.budget_predictor import SelfConsistency, choose_tau, fit
from orchard.generate.protocol import State
from orchard.generate.request import Request
from orchard.session.model import load


def examples(count: int = 300, dim: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Shares that no straight line through the vectors gives: high where two numbers have the same sign."""
    x = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32) * 5 + 3
    return x, (1 / (1 + np.exp(-(x[:, 0] - 3) * (x[:, 1] - 3) / 4))).astype(np.float32)


@pytest.fixture(scope="module")
def predictor() -> SelfConsistency:
    return fit(*examples(), signature="model", seed=3)


def test_two_layers_learn_what_one_cannot(predictor: SelfConsistency) -> None:
    x, y = examples(seed=9)
    errors = [float(np.square(one.predict(x) - y).mean()) for one in (predictor, fit(*examples(), seed=3, width=0))]
    assert errors[0] < 0.5 * errors[1] and errors[0] < 0.4 * float(y.var())


def test_fitting_depends_on_its_seed_alone(predictor: SelfConsistency) -> None:
    import torch

    torch.manual_seed(77)
    before = torch.random.get_rng_state()
    with torch.no_grad():
        again = fit(*examples(), signature="model", seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    x = examples(seed=5)[0]
    assert np.array_equal(again.predict(x), predictor.predict(x))
    assert not np.array_equal(fit(*examples(), seed=4).predict(x), predictor.predict(x))


def test_one_vector_and_many(predictor: SelfConsistency) -> None:
    x = examples(seed=5)[0]
    many = predictor.predict(x)
    assert many.shape == (300,) and ((many >= 0) & (many <= 1)).all()
    assert isinstance(predictor.predict(x[7]), float) and predictor.predict(x[7]) == pytest.approx(many[7], abs=1e-6)
    assert predictor.predict(np.full(6, np.nan)) == 0.0 and 0 <= predictor.predict(np.full(6, 1e38)) <= 1


def test_budgets_by_threshold_and_by_degree(predictor: SelfConsistency) -> None:
    gate = predictor.with_policy(tau=0.3)
    assert [gate.budget(share, 100) for share in (0.0, 0.3, 0.31, 1.0)] == [100, 100, 0, 0]
    graded = predictor.with_policy(exponent=2.0)
    assert [graded.budget(share, 100) for share in (0.0, 0.5, 1.0)] == [100, 25, 0]
    assert [gate.with_policy(tau=1.0).budget(1.0, 9), gate.with_policy(tau=0.0).budget(0.01, 9)] == [9, 0]


def test_a_file_holds_all_of_it(predictor: SelfConsistency, tmp_path: Path) -> None:
    path, x = tmp_path / "gate.safetensors", examples(seed=5)[0]
    predictor.with_policy(tau=0.7, exponent=1.5).save(path)
    again = SelfConsistency.load(path)
    assert np.array_equal(again.predict(x), predictor.predict(x))
    assert (again.signature, again.tau, again.exponent, again.dim) == ("model", 0.7, 1.5, 6)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_damaged_files_are_refused(predictor: SelfConsistency, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "gate.safetensors"
    predictor.save(path)
    data = path.read_bytes()
    for wrong in (
        b"",
        data[:-9],
        data[:40],
        b"\xff" * 64,
        data.replace(b'"tau', b'"tab'.ljust(4)),
        data.replace(b'1"', b'2"'),
    ):
        path.write_bytes(wrong)
        with pytest.raises(BadFile) as caught:
            SelfConsistency.load(path)
        assert caught.value.hint
    save_file({"mean": np.zeros(3, np.float32)}, path)
    with pytest.raises(BadFile):
        SelfConsistency.load(path)
    with pytest.raises(BadFile):
        SelfConsistency.load(tmp_path / "nowhere")


def test_the_rule_of_a_request(predictor: SelfConsistency) -> None:
    x, y = examples()
    easy, hard = x[int(y.argmax())], x[int(y.argmin())]
    thinking = Thinking(end=(8,), begin=(7,), most=50, predictor=predictor.with_policy(tau=0.5))
    rules = [thinking_rule(thinking, hidden, signature="model") for hidden in (easy, hard, None)]
    assert [rule.tokens for rule in rules] == [0, 50, 50] and all(rule.opens for rule in rules)
    assert rules[0].forced(State((1,), [7])) == (8,)
    skips = Thinking(end=(8,), begin=(7,), most=50, skip=(7, 5, 8), predictor=thinking.predictor)
    assert thinking_rule(skips, easy).forced(State((1,))) == (7, 5, 8)
    assert thinking_rule(skips, hard).forced(State((1,))) == (7,)
    assert thinking_rule(Thinking(end=(8,), most=0)).forced(State((1,))) == (8,)
    assert hash(skips) != hash(thinking) and skips != thinking
    with pytest.raises(UsageError, match="another model"):
        thinking_rule(thinking, easy, signature="other")
    with pytest.raises(UsageError, match="width 6"):
        thinking_rule(thinking, easy[:5])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, y: fit(x, y[:-1]),
        lambda x, y: fit(x[0], y),
        lambda x, y: fit(x * np.nan, y),
        lambda x, y: fit(x, y + 1),
        lambda x, y: SelfConsistency(x[0], x[0] * 0, [(x[:1], y[:1])]),
        lambda x, y: SelfConsistency(x[0], abs(x[0]) + 1, []),
        lambda x, y: SelfConsistency(x[0], abs(x[0]) + 1, [(x[:2], y[:2])]),
        lambda x, y: SelfConsistency(x[0], abs(x[0]) + 1, [(x[:1], y[:1])], tau=1.1),
        lambda x, y: SelfConsistency(x[0], abs(x[0]) + 1, [(x[:1], y[:1])], exponent=-1),
    ],
)
def test_predictors_that_make_no_sense_are_refused(wrong: Callable[[np.ndarray, np.ndarray], object]) -> None:
    with pytest.raises(UsageError) as caught:
        wrong(*examples(20))
    assert caught.value.hint


@given(st.integers(0, 2**31), st.integers(1, 40), st.sampled_from([0.0, 0.01, 0.1]))
def test_the_threshold_is_the_cheapest_that_loses_little(seed: int, count: int, loss: float) -> None:
    chance = np.random.default_rng(seed)
    predicted = chance.integers(0, 6, count) / 5
    direct, thinking = chance.random(count), chance.random(count)
    cheap, dear = chance.integers(1, 9, count), chance.integers(5, 30, count)
    tau = choose_tau(predicted, direct, thinking, cheap, dear, loss=loss)

    def outcome(cut: float) -> tuple[float, int]:
        skip = predicted > cut
        return np.where(skip, direct, thinking).mean(), np.where(skip, cheap, dear).sum()

    def good(cut: float) -> bool:
        return outcome(cut)[0] >= thinking.mean() - loss - 1e-9

    best = min(outcome(cut)[1] for cut in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0) if good(cut))
    assert 0 <= tau <= 1 and good(tau) and outcome(tau)[1] <= best


@pytest.mark.real
def test_a_predictor_decides_by_what_the_engine_shows_it(smollm2: Path) -> None:
    """Fitted to know questions about numbers: those, and no others, are answered without thinking."""
    model = load("smollm2")
    tokenizer, engine = model.tokenizer, model.engine
    sums = [f"What is {a}+{b}?" for a in range(1, 3) for b in range(1, 4)]
    others = [f"Who wrote {name}?" for name in ("Emma", "Hamlet", "Faust", "Ulysses", "Dune", "Kim")]
    hidden = hidden_of(engine.model, [model.prompt_ids(text) for text in (*sums, *others)])
    shares = np.repeat([1.0, 0.0], (len(sums), len(others)))
    predictor = fit(hidden, shares, epochs=60, signature=getattr(engine.model, "signature", "")).with_policy(tau=0.5)
    skip, end = tuple(tokenizer.encode("Short:")), tuple(tokenizer.encode("</think>"))
    thinking = Thinking(end=end, begin=tuple(tokenizer.encode("<think>")), most=3, skip=skip, predictor=predictor)
    texts = ["What is 7+1?", "Who wrote Macbeth?"]
    prompts = [tuple(model.prompt_ids(text)) for text in texts]
    found = engine.answer([Request(ids, max_tokens=9, seed=1, thinking=thinking) for ids in prompts])
    assert [answer.text[:6] for answer in found] == ["Short:", "<think"]
    stranger = SelfConsistency(predictor.mean, predictor.scale, predictor.layers, signature="another")
    wrong = Request(prompts[0], thinking=Thinking(end=end, predictor=stranger))
    answers = engine.answer([wrong, Request(prompts[1], max_tokens=3)])
    assert [answer.finish for answer in answers] == ["error", "length"] and "another model" in (answers[0].error or "")
