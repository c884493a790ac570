"""The parts of the afm-2024 study, and a tiny run of all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from orchard.core.batch import IGNORED
from orchard.studies import _afm_ground as ground_
from orchard.studies import _afm_mdloo as mdloo
from orchard.studies import _afm_palettes as palettes
from orchard.studies import _afm_prune as prune
from orchard.studies import _afm_swap as swap
from orchard.studies import afm_2024
from orchard.studies._afm_ground import Ground
from orchard.studies._afm_two_bits import Training, recover_steps
from orchard.studies.harness import study
from orchard.transforms.palettize import Palettize

TINY = Ground(dim=64, layers=2, rows=2, length=32, steps=4, held_out=4)


def test_rewards_of_digits() -> None:
    answers = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [9, 9, 9, 9], [1, 2, 3, 12]])
    found = mdloo.reward(answers, torch.tensor([10, 13, 10, 18]))
    assert found.tolist() == [1.0, 0.75, 0.0, 0.0]
    assert mdloo.prompts_of(torch.tensor([7, 32])).tolist() == [[0, 7, mdloo.ASK], [3, 2, mdloo.ASK]]


def test_what_was_written_is_what_is_learnt_from() -> None:
    game = mdloo.Game(prompts=4, group=2)
    model = mdloo.decoder(32, 1, mdloo.VOCAB, 16).complete().build().eval()
    dice = torch.Generator().manual_seed(1)
    prompts = mdloo.prompts_of(torch.arange(4).repeat_interleave(2) + 9)
    answers, said = mdloo.write(model, prompts, dice)
    batch = mdloo.laid_out(prompts, answers, said, torch.arange(8.0), torch.arange(4).repeat_interleave(2))
    assert (batch.batch.targets != IGNORED).sum() == said.numel()
    from orchard.objectives.logprobs import frozen_log_probs

    torch.testing.assert_close(frozen_log_probs(model, batch.batch), batch.behaviour, atol=1e-4, rtol=1e-4)
    assert mdloo.divergence(model, model, batch) == pytest.approx(0, abs=1e-6)
    cut = mdloo.parts(batch, game, "mdloo", dice)
    assert len(cut) == 4 and sorted(torch.cat([each.rewards for each in cut[:2]]).tolist()) == list(range(8))
    assert all(each.groups.unique(return_counts=True)[1].tolist() == [2, 2] for each in cut)
    assert len(mdloo.parts(batch, game, "reinforce", dice)) == 1


def test_playing_repeats() -> None:
    game = mdloo.Game(rounds=2, prompts=2, group=2, dim=32)
    assert mdloo.play(game, "mdloo", 1e-3, 3) == mdloo.play(game, "mdloo", 1e-3, 3)


def test_a_teacher_that_names_one_token() -> None:
    model, other = (ground_.built(ground_.tree(TINY), 1, name).eval() for name in ("a", "b"))
    batch = next(ground_.batches(TINY, 1, 1, "x"))
    found = prune.top_one(other, 0.9)(model, batch)
    scores = model(batch.ids).flatten(0, 1)
    best = other(batch.ids).argmax(-1).flatten()
    entropy = torch.nn.functional.cross_entropy
    wanted = 0.9 * entropy(scores, best, reduction="sum") + 0.1 * entropy(
        scores, batch.targets.flatten(), reduction="sum"
    )
    torch.testing.assert_close(found.value, wanted)


def test_ways_differ_in_what_they_learn_from_alone() -> None:
    teacher = ground_.base(TINY, 1)
    made = prune.ways(teacher, TINY, prune.Healing(steps=2, masks=1), 1)
    sizes = {name: sum(value.numel() for value in model.parameters()) for name, model in made.items()}
    assert set(made) == {"distilled", "top1", "labels", "scratch"} and len(set(sizes.values())) == 1
    assert all(layer.mlp.hidden_dim == 96 for model in made.values() for layer in model.config.stack.layers)
    assert teacher.config.stack.layers[0].mlp.hidden_dim == 192


def test_maps_at_two_bits_bring_palettes_within_the_budget() -> None:
    model = ground_.base(replace(TINY, dim=128), 1)
    two = palettes.chosen(model, TINY, 1)
    assert Palettize(two=two).bits_per_weight(model.config) <= palettes.BITS
    assert Palettize(two=two[:-1]).bits_per_weight(model.config) > palettes.BITS


def test_a_model_does_not_stray_from_itself() -> None:
    model, other = (ground_.built(ground_.tree(TINY), 1, name).eval() for name in ("a", "b"))
    read = list(ground_.batches(TINY, 2, 1, "x"))
    same = ground_.towards(model)
    assert abs(ground_.strays(model, same, read)) < 1e-6 < 1e-3 < ground_.strays(other, same, read)


def test_ratios_are_of_means_and_show_those_of_pairs() -> None:
    found = ground_.ratio([1.0, 6.0], [2.0, 4.0], "")
    assert (found.value, found.low, found.high) == (pytest.approx(7 / 6), 0.5, 1.5)


def test_what_errors_are_weighed_by_is_not_chosen_on_held_out_text(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = [palettes.Trained(ground_.built(ground_.tree(replace(TINY, dim=128)), 1, "a").eval(), 1)]
    training = Training(recover=0.5, recover_rows=1, texts=1)
    made = palettes.compressed(trained[0], TINY, training)
    for better, worse in (("inputs", "gradients"), ("gradients", "inputs")):
        gaps = {**made.gaps, better: 0.3, worse: 0.2}  # the worse one there is the better one on held-out text
        told = replace(made, gaps=gaps, tried={better: 0.1, worse: 0.2})
        monkeypatch.setattr(palettes, "compressed", lambda *_, told=told: told)
        found = palettes.measured(trained, TINY, training)
        assert found.values["gap_weighted"].value == 0.3 and found.model is made.ways[better]  # type: ignore[union-attr]


def test_a_switch_counts_what_is_not_the_bases() -> None:
    base = ground_.base(TINY, 1)
    adapted = swap.Lora(r=2, alpha=4.0).attach(base)
    sides = {path: [side] for path, side in swap.sides_of(adapted).items()}
    numbers = sum(a.size + b.size for found in sides.values() for a, b, _ in found)
    assert swap.not_shared(swap.with_sides(base, sides), base) == numbers
    assert swap.not_shared(base, base) == 0 < swap.not_shared(ground_.copied(base), base)


@pytest.mark.long
def test_the_study_runs_and_every_claim_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = afm_2024.Scale(
        ground=replace(TINY, steps=100),
        training=Training(recover=0.02, recover_rows=1, texts=1),
        healing=prune.Healing(steps=2, masks=1),
        game=mdloo.Game(rounds=2, prompts=2, group=2, seeds=1),
        tasks=swap.Tasks(steps=3, rank=2, answers=1, answer=4),
    )
    monkeypatch.setitem(afm_2024.SCALES, "small", tiny)
    monkeypatch.setattr(prune, "SEEDS", 1)
    monkeypatch.setattr(palettes, "MODELS", 2)
    report = study("afm-2024", seed=1)
    assert all(claim.value is not None for claim in report.claims)
    for name in ("recover_bases_changed", "swap_numbers_beyond_adapter", "base_changed", "swap_differences"):
        assert report[name] == 0, name
    assert report["palette_bits"] <= palettes.BITS and report["rtn_bits_over"] >= 0
    assert report["recover_tokens"] == recover_steps(tiny.ground, tiny.training)[1] <= 0.02 * report["tokens"]
    assert len(report.series["round, reward: mdloo"]) == 2
