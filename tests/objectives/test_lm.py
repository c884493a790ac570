"""The next-token objective against the plain formula, documents alone, finite differences and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from orchard.core.batch import IGNORED, Batch, Loss
from orchard.core.errors import ConfigError
from orchard.objectives import NextToken
from tests.generate.conftest import make_decoder
from tests.objectives.toys import Toy, assert_adds_up, assert_same, assert_slope, gradients, packed, part, plain_scores

ROWS = st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=3)
HOW = {
    "plain": {"chunk": None},
    "recompute": {"chunk": 3, "recompute": True},
    "at once": {"chunk": 3, "recompute": False},
}


def reference(model: Toy, batch: Batch, *, smoothing: float, z: float) -> tuple[torch.Tensor, float]:
    """Token by token, as the formulas say it."""
    scores, total, weight = plain_scores(model, batch), torch.zeros((), dtype=torch.float64), 0.0
    for b, t in (batch.targets != IGNORED).nonzero().tolist():
        row = scores[b, t]
        chances = row.exp() / row.exp().sum()
        spread = (1 - smoothing) * -chances[batch.targets[b, t]].log() - smoothing * chances.log().mean()
        share = 1.0 if batch.weights is None else float(batch.weights[b, t])
        total = total + share * (spread + z * row.exp().sum().log() ** 2)
        weight += share
    return total, weight


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("tied", [True, False])
@settings(max_examples=12)
@given(ROWS, st.booleans(), st.booleans(), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 1e-2]))
def test_value_and_gradient_are_the_formulas(
    how: str, tied: bool, rows: list[list[int]], weighted: bool, skip: bool, smoothing: float, z: float
) -> None:
    model, batch = Toy(tied=tied), packed(rows, masked=0.3, weighted=weighted)
    fields: dict[str, Any] = {"smoothing": smoothing, "z": z, "skip": skip, **HOW[how]}
    loss = NextToken.Config(**fields).build()(model, batch)
    want, weight = reference(model, batch, smoothing=smoothing, z=z)
    if weight:
        assert_same(model, loss.value, want)
    assert float(loss.weight) == pytest.approx(weight, rel=1e-6)
    assert int(loss.parts["tokens"]) == batch.tokens


@settings(max_examples=20)
@given(ROWS)
def test_packed_rows_are_the_sum_of_their_documents(rows: list[list[int]]) -> None:
    model, batch, objective = Toy(), packed(rows), NextToken.Config(chunk=4, z=0.01).build()
    alone = []
    for r, row in enumerate(rows):
        start = 0
        for length in row:
            alone.append(objective(model, part(batch, [r], slice(start, start + length))))
            start += length
    if alone:
        assert_adds_up(model, objective(model, batch), alone)


def test_a_real_decoder_keeps_documents_apart_too() -> None:
    model, batch, objective = make_decoder(60), packed([[7, 5, 4], [16]]), NextToken.Config(chunk=5).build()
    whole = objective(model, batch)
    cuts = [([0], slice(0, 7)), ([0], slice(7, 12)), ([0], slice(12, 16)), ([1], slice(0, 16))]
    alone = [objective(model, part(batch, rows, columns)) for rows, columns in cuts]
    assert_adds_up(model, whole, alone, tolerance=3e-4)


def test_two_micro_batches_are_one_batch() -> None:
    model, batch = Toy(), packed([[4, 2], [6], [1, 1]], weighted=True, masked=0.2)
    objective = NextToken.Config(chunk=2, smoothing=0.1).build()
    assert_adds_up(model, objective(model, batch), [objective(model, part(batch, r)) for r in ([0, 1], [2])])


@pytest.mark.parametrize("how", HOW)
def test_nothing_to_learn_is_nothing(how: str) -> None:
    model, batch = Toy(), packed([[3], [4]], masked=1.0)
    loss = NextToken.Config(**HOW[how]).build()(model, batch)
    loss.value.backward()
    assert loss.value.item() == 0 and float(loss.weight) == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("how", HOW)
def test_finite_differences(how: str) -> None:
    model, batch = Toy(), packed([[5, 3], [8]])
    objective = NextToken.Config(z=0.01, smoothing=0.05, **HOW[how]).build()
    assert_slope(model, lambda: objective(model, batch).value)


def test_the_gradient_follows_a_factor_and_a_further_loss() -> None:
    """A loop divides the value, and may add to it: gradients taken early have to be multiplied."""
    model, batch = Toy(), packed([[9]])
    values = [NextToken.Config(**HOW[how]).build()(model, batch).value for how in ("plain", "at once")]
    assert_same(model, *(value / 7 + value.square() for value in values))


def test_frozen_parameters_get_nothing_and_do_not_stand_in_the_way() -> None:
    model, batch = Toy(), packed([[9]])
    model.inner.requires_grad_(False)
    model.table.requires_grad_(False)
    NextToken.Config(chunk=2, recompute=False).build()(model, batch).value.backward()
    assert model.head is not None and model.head.grad is not None and model.head.grad.any()
    assert model.table.grad is None and model.inner.grad is None


def test_scores_are_made_by_chunks_and_once_unless_asked() -> None:
    for recompute, passes in ((False, 1), (True, 2)):
        model, batch = Toy(), packed([[10], [7]])
        NextToken.Config(chunk=4, recompute=recompute).build()(model, batch).value.backward()
        assert sum(model.scored) == 17 * passes and max(model.scored) == 4


def test_parameters_that_share_a_gradient_each_get_it_once() -> None:
    """A weight that is a sum (an adapter beside its base) hands one and the same gradient to both."""

    class Sum(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.beside = torch.nn.Parameter(torch.ones_like(self.table))

        def scores(self, hidden: torch.Tensor) -> torch.Tensor:
            assert self.head is not None
            return hidden @ (self.head + self.beside).T

    model, batch = Sum(), packed([[10], [7]])
    assert_same(model, *(NextToken.Config(**HOW[how]).build()(model, batch).value for how in ("plain", "at once")))


def test_what_is_skipped_changes_nothing_that_is_told() -> None:
    model, batch = Toy(), packed([[10], [7]])
    often = int(plain_scores(model, batch).argmax(-1).flatten().bincount().argmax())
    assert model.head is not None
    with torch.no_grad():
        model.head[[0, often]] = model.head[[often, 0]]  # now token 0, which stands in for no target, is often the best
    best = plain_scores(model, batch).argmax(-1)
    hidden = (batch.documents < 0) | (best == 0)
    batch = Batch(batch.ids, best.masked_fill(hidden, IGNORED), batch.positions, batch.documents)
    one, two = (NextToken.Config(skip=skip).build()(model, batch).parts for skip in (True, False))
    assert one.keys() == two.keys() and int(one["correct"]) == batch.tokens < 17
    for name in one:
        torch.testing.assert_close(one[name], two[name])


def test_parts_and_curves() -> None:
    model, batch = Toy(), packed([[6]])
    objective = NextToken.Config().build()
    loss: Loss = objective(model, batch)
    best = plain_scores(model, batch).argmax(-1)
    right = int((best == batch.targets).sum())
    curves = objective.curves(float(loss.weight), {name: float(value) for name, value in loss.parts.items()})
    assert curves["correct"] == pytest.approx(right / 6) and curves["tokens"] == 6
    assert curves["loss"] == pytest.approx(loss.value.item() / 6)


VOCABULARY = 40


def test_transformers_finds_the_same_loss() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval()

    class Peer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scores = theirs.model, theirs.lm_head

        def hidden(self, ids: torch.Tensor, context: Any) -> torch.Tensor:
            return self.body(ids).last_hidden_state

    ids = torch.randint(0, VOCABULARY, (3, 9))
    labels = ids.clone()
    labels[0, :4] = IGNORED
    want = theirs(input_ids=ids, labels=labels).loss
    positions = torch.arange(8).expand(3, 8)
    batch = Batch(ids[:, :-1], labels[:, 1:], positions, torch.zeros_like(positions))
    loss = NextToken.Config(chunk=5).build()(Peer(), batch)
    torch.testing.assert_close(loss.value / loss.weight, want, atol=1e-6, rtol=1e-6)


class Largest(TorchDispatchMode):
    """The most numbers that any one tensor held while this was on, forwards and backwards."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.numbers = max(self.numbers, value.numel())
        return out


@pytest.mark.parametrize("recompute", [True, False])
def test_chunks_never_hold_all_scores(recompute: bool) -> None:
    batch = packed([[90], [60, 30]])
    for chunk, most in ((None, 180 * 2000), (16, 16 * 2000)):
        with Largest() as largest:
            NextToken.Config(chunk=chunk, recompute=recompute).build()(Toy(vocab=2000), batch).value.backward()
        assert largest.numbers == most


@pytest.mark.parametrize("recompute", [True, False])
def test_a_bfloat16_model_is_measured_in_float32(recompute: bool) -> None:
    model, batch = make_decoder(60).bfloat16(), packed([[40], [25, 15]])
    whole = NextToken.Config(chunk=None).build()(model, batch)
    loss = NextToken.Config(chunk=16, recompute=recompute).build()(model, batch)
    assert loss.value.dtype == torch.float32
    torch.testing.assert_close(loss.value, whole.value, atol=1e-3, rtol=1e-5)
    for a, b in zip(gradients(model, loss.value), gradients(model, whole.value)):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()


def test_without_gradients_there_are_none() -> None:
    model, batch = Toy(), packed([[10], [7]])
    with torch.no_grad():
        loss = NextToken.Config(chunk=4).build()(model, batch)
    assert not loss.value.requires_grad and max(model.scored) == 4
    torch.testing.assert_close(loss.value, NextToken.Config(chunk=None).build()(model, batch).value.detach())


def test_impossible_settings_are_refused() -> None:
    for fields in ({"smoothing": 1.5}, {"chunk": 0}):
        with pytest.raises(ConfigError) as caught:
            NextToken.Config(**fields).build()
        assert caught.value.hint
