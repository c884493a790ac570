"""Sub-networks by prompt: masked and gathered forms agree, budgets nest, choices change only for good reasons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.context import Context
from orchard.core.errors import BadFile, ConfigError, UnsupportedPair, UsageError
from orchard.nn.mlp import GatedMLP
from orchard.transforms.ifprune import IFPrune
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.ifprune_gather import active, choosing, gathered, picked, plain
from orchard.transforms.ifprune_masks import load_choices, save_choices
from tests.transforms.ifprune_models import DIM, HIDDEN, VOCAB, decoder, instructed, tree

IDS = torch.arange(12)[None] % VOCAB


def masked(model: object, choice: Choice) -> torch.Tensor:
    places = torch.arange(IDS.shape[1])[None]
    out: torch.Tensor = model.decoder(IDS, Context(positions=places, causal=True, units=choice.units()))  # type: ignore[attr-defined]
    return out


@pytest.mark.parametrize("predictor", ["reader", "first-layers", "fixed"])
@pytest.mark.parametrize("groups", [None, 6])
def test_gathered_is_masked(predictor: str, groups: int | None) -> None:
    model = instructed(predictor=predictor, groups=groups)
    choice = model.choose(IDS[0, :7])
    small = gathered(model.decoder, choice)
    with torch.no_grad():
        assert torch.allclose(small(IDS), masked(model, choice), atol=1e-5)
        assert not torch.allclose(small(IDS), model.decoder(IDS), atol=1e-3)
    used, total = active(model.decoder, choice.budget)
    mlps = [part for part in small.modules() if isinstance(part, GatedMLP)]
    assert sum(p.numel() for part in mlps[1:] for p in part.parameters()) == used
    assert total == 2 * 3 * DIM * HIDDEN  # the first of three layers chooses nothing


def test_all_groups_at_full_weight_are_the_model() -> None:
    model = instructed()
    choice = Choice(torch.randn(2, 6), 6)
    with torch.no_grad():
        assert torch.allclose(masked(model, choice), decoder()(IDS), atol=1e-5)
        assert torch.equal(plain(model.decoder)(IDS), decoder()(IDS))


def test_rows_of_a_batch_use_their_own_units() -> None:
    model = instructed()
    ids = torch.stack([IDS[0], (IDS[0] * 5 + 3) % VOCAB])
    units = model.units(ids, torch.tensor([[6], [9]]))
    context = Context(positions=torch.arange(12).expand(2, -1), causal=True, units=units)
    with torch.no_grad():
        both = model.decoder(ids, context)
        for row, last in enumerate((6, 9)):
            choice = model.choose(ids[row, : last + 1])
            assert torch.allclose(both[row : row + 1], gathered(model.decoder, choice)(ids[row : row + 1]), atol=1e-5)


def test_a_choice_sees_nothing_after_its_place() -> None:
    for predictor in ("reader", "first-layers"):
        model = instructed(predictor=predictor)
        other = IDS.clone()
        other[0, 7:] = 1
        at = torch.tensor([[6]])
        assert torch.allclose(
            model.predictor(IDS, at, model.decoder), model.predictor(other, at, model.decoder), atol=1e-6
        )


def test_spans_use_the_choice_before_them() -> None:
    model = instructed()
    at, spans = torch.tensor([[3, 7]]), torch.tensor([[0] * 8 + [1] * 4])
    units = model.units(IDS, at, spans)
    one, two = (model.units(IDS, torch.tensor([[place]])) for place in (3, 7))
    for layer in (0, 1):
        assert torch.allclose(units[layer][:, :8], one[layer].expand(-1, 8, -1), atol=1e-6)
        assert torch.allclose(units[layer][:, 8:], two[layer].expand(-1, 4, -1), atol=1e-6)


@given(seed=st.integers(0, 1000), groups=st.integers(2, 12), ties=st.booleans())
@settings(max_examples=40, deadline=None)
def test_budgets_nest(seed: int, groups: int, ties: bool) -> None:
    scores = torch.randn(3, groups, generator=torch.Generator().manual_seed(seed))
    choice = Choice(scores.round() if ties else scores, groups)
    for budget in range(1, groups):
        small, large = choice.within(budget), choice.within(budget + 1)
        assert all(set(a) < set(b) for a, b in zip(small.groups(), large.groups(), strict=True))
        assert [len(row) for row in large.added(small)] == [1, 1, 1]
        assert [len(row) for row in large.added(None)] == [budget + 1] * 3


@given(seed=st.integers(0, 1000), margin=st.sampled_from([0.0, 0.3, 1.0, 100.0]))
@settings(max_examples=40, deadline=None)
def test_hysteresis_changes_only_what_is_clearly_better(seed: int, margin: float) -> None:
    made = torch.Generator().manual_seed(seed)
    before, after = (Choice(torch.randn(2, 10, generator=made), 4) for _ in range(2))
    kept = after.after(before, margin)
    for layer, (old, new, free) in enumerate(zip(before.groups(), kept.groups(), after.groups(), strict=True)):
        assert len(new) == 4
        coming, going = set(new) - set(old), set(old) - set(new)
        assert coming <= set(free)
        row = after.scores[layer]
        for one, other in zip(
            sorted(coming, key=lambda g: -float(row[g])), sorted(going, key=lambda g: float(row[g])), strict=True
        ):
            assert float(row[one]) - float(row[other]) > margin
    if margin == 0:
        assert kept.groups() == after.groups()
    if margin == 100:
        assert kept.groups() == before.groups()


def test_overlap_and_tasks() -> None:
    one = Choice(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), 2)
    other = Choice(torch.tensor([[3.0, 0.0, 1.0, 2.0]]), 2)
    assert one.overlap(one) == 1
    assert one.overlap(other) == pytest.approx(1 / 3)
    assert Choice.of_task([one, other, one]).groups() == one.groups()
    with pytest.raises(UsageError):
        Choice.of_task([])
    with pytest.raises(UsageError, match="other models"):
        one.overlap(Choice(torch.zeros(2, 4), 2))


def test_choices_come_back_from_their_file(tmp_path: Path) -> None:
    model = instructed()
    given_ = {"sql": model.choose([1, 2, 3]), "chess": Choice(torch.randn(2, 6), 3)}
    path = tmp_path / "masks.safetensors"
    save_choices(path, given_, "a model")
    found = load_choices(path, "a model")
    assert found.keys() == given_.keys()
    for name, choice in given_.items():
        assert torch.equal(found[name].scores, choice.scores)
        assert torch.equal(found[name].weights, choice.weights)
    with pytest.raises(UsageError, match="not of 'another'"):
        load_choices(path, "another")
    raw = path.read_bytes()
    for broken in (raw[:40], raw[:-8], b"", raw.replace(b'\\"budget\\": 3', b'\\"budget\\": 9')):
        path.write_bytes(broken)
        with pytest.raises(BadFile):
            load_choices(path)
    with pytest.raises(BadFile):
        load_choices(tmp_path / "none")
    with pytest.raises(UsageError):
        save_choices(path, {"": given_["sql"]})
    with pytest.raises(UsageError):
        save_choices(path, {})


@pytest.mark.parametrize("fused", [False, True])
def test_training_cools_and_reaches_the_predictor(fused: bool) -> None:
    """Fused optimisers change parameters without raising their version."""
    model = instructed(keep=(0.5, 0.25), steps=3, temperature=1.0, cold=0.25).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=fused)
    warm = []
    for _ in range(5):
        warm.append(model.warmth)
        units = model.units(IDS, torch.tensor([[5]]))
        context = Context(positions=torch.arange(12)[None], causal=True, units=units)
        model.decoder(IDS, context).square().mean().backward()
        assert model.predictor.head.out.weight.grad.abs().max() > 0  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert warm[0] == 1.0 and warm[1] == 1.0
    assert warm[2] == pytest.approx(0.25 ** (1 / 3))
    assert model.warmth == pytest.approx(0.25)


def test_several_budgets_are_drawn_in_training_and_the_first_is_usual() -> None:
    model = instructed().train()
    kept = {int((model.units(IDS, torch.tensor([[5]]))[0] > 0).sum()) for _ in range(20)}
    assert kept == {3, 2}
    assert model.eval().choose([1]).budget == 3


def test_picked_is_gathered_for_ordinary_models() -> None:
    base, choice = decoder(), Choice(torch.randn(3, 8), 3)
    small = picked(base, choice)
    model = IFPrune(keep=3 / 8, groups=8, predictor="fixed").apply(base)
    with torch.no_grad():
        assert torch.allclose(small(IDS), gathered(model.decoder, choice)(IDS), atol=1e-6)
    with pytest.raises(UsageError):
        picked(base, Choice(torch.randn(2, 8), 3))
    with pytest.raises(UsageError):
        picked(base, Choice(torch.randn(3, 7), 3))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="predictor"):
        IFPrune(predictor="oracle")
    with pytest.raises(ConfigError, match="keep"):
        IFPrune(keep=0.0)
    with pytest.raises(ConfigError, match="first"):
        IFPrune(predictor="first-layers")
    with pytest.raises(ConfigError, match="groups"):
        IFPrune(groups=1000)(tree())
    with pytest.raises(UnsupportedPair):
        IFPrune(first=3)(tree())
    with pytest.raises(UsageError, match="not for this model"):
        gathered(instructed().decoder, Choice(torch.zeros(2, 5), 2))
    with pytest.raises(UsageError):
        instructed().choose([])
    with pytest.raises(UsageError):
        Choice(torch.zeros(2, 5), 6)
    with pytest.raises(ConfigError):
        Choice(torch.full((2, 5), torch.nan), 2)
    assert len(choosing(instructed().decoder)) == 2
