"""AFM 2024: palettes with recovery, pruning with distillation, mirror descent from rewards, adapters that come and go.

Apple Intelligence Foundation Language Models (arXiv 2407.21075) describes the first model of about three billion weights
for phones and how it was made. Every 16 rows of a weight share a table of 16 values found by k-means, some layers a table
of 4, for at most 3.7 bits a weight; side paths of rank 16 trained on the frozen result win back what was lost. The model
came from a larger one: learned masks chose the hidden units of feed-forward layers that stay, and the larger model's
likeliest token was nine tenths of what it learnt from. Preferences were learnt by mirror descent with leave-one-out
advantages (MDLOO), and tasks are adapters over one frozen base.

Here each of these happens to a small model of characters of a made-up language (`_afm_text.py`), by Orchard's own parts:
`Palettize`, `Recover`, `Prune`, `Distill`, `MirrorDescent`, `Lora` and the engine's variants.

What differs from the paper: models of less than a million weights that learnt from half a million characters; which maps
go to two bits is measured one by one; what errors are weighed by, and the learning rate of recovery, are chosen on a text
of their own; the table of embeddings stays as it is; masks learn for tens of steps, by distillation. "Pruned and
distilled" learns from the teacher's whole distribution; the paper's nine parts of the likeliest token are measured beside
it, by loss and by accuracy: who learns to name one token spreads less over the others, and pays for that in loss by
construction. Rewards are for digits that add up to a number, and the ways to learn from them are each given their best
learning rate of two. Reward models and the committee of teachers are not repeated.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.studies import _afm_ground as ground_
from orchard.studies import _afm_mdloo as mdloo
from orchard.studies import _afm_palettes as palettes
from orchard.studies import _afm_prune as prune
from orchard.studies import _afm_swap as swap
from orchard.studies._afm_ground import Ground
from orchard.studies._afm_two_bits import Training
from orchard.studies.harness import Outcome


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is."""

    ground: Ground
    training: Training
    """Of recovery."""
    healing: prune.Healing = field(default_factory=prune.Healing)
    game: mdloo.Game = field(default_factory=mdloo.Game)
    tasks: swap.Tasks = field(default_factory=swap.Tasks)


RECOVER = 0.02
"""The share of the base's text that recovery may read."""
SCALES = {
    "small": Scale(
        ground=Ground(layers=4, rows=8, steps=500, rate=3e-3, held_out=512),
        training=Training(recover=RECOVER, recover_rows=2, texts=16),
    ),
    "full": Scale(
        ground=Ground(dim=256, layers=8, rows=64, length=256, steps=1500, rate=3e-3, held_out=1024),
        training=Training(recover=RECOVER, recover_rows=16, texts=16),
        healing=prune.Healing(steps=500, masks=150),
        game=mdloo.Game(rounds=200, seeds=5),
        tasks=swap.Tasks(steps=100),
    ),
}
CLAIMS = [
    Claim("palette-bits", "Mixed palettes take at most 3.7 bits a weight", "palette_bits", Bound("<=", palettes.BITS)),
    Claim("equal-bits", "Uniform rounding is given at least as many bits", "rtn_bits_over", Bound(">=", 0)),
    Claim("rtn", "… and loses more than either palette", "rtn_gap_ratio", Bound(">", 1.0)),
    Claim(
        "weighted",
        "Weighing errors by what they cost cuts a tenth of the gap",
        "weighted_gap_ratio",
        Bound("<=", 0.9),
        "gap_unweighted",
    ),
    Claim("recover", "Recovery halves the gap", "recovered_gap_ratio", Bound("<=", 0.5), "gap_weighted"),
    Claim("recover-tokens", "… within a fiftieth of the text", "recover_share", Bound("<=", RECOVER)),
    Claim("recover-base", "… beside weights that stay bit for bit", "recover_bases_changed", Bound("==", 0)),
    Claim(
        "prune",
        "Pruned and distilled beats the same small model from nothing, at the same steps",
        "prune_over_scratch",
        Bound("<", 1.0),
        "prune_loss_scratch",
    ),
    Claim(
        "top1-loss",
        "Nine parts of the teacher's likeliest token beat true labels alone, by loss",
        "top1_loss_over_labels",
        Bound("<", 0),
        "prune_loss_labels",
    ),
    Claim("top1-accuracy", "… and by accuracy", "top1_accuracy_over_labels", Bound(">", 0), "prune_accuracy_labels"),
    Claim(
        "mdloo",
        "MDLOO's last reward is no less than REINFORCE's, from as many answers",
        "mdloo_over_reinforce",
        Bound(">=", 0),
        "reward_reinforce",
    ),
    Claim(
        "mdloo-steps",
        "Holding on to the last policy makes steps more even: variance of their divergence, with gamma over without",
        "step_kl_variance_ratio",
        Bound("<", 1.0),
    ),
    Claim("swap-bytes", "A switch brings nothing but the adapter", "swap_numbers_beyond_adapter", Bound("==", 0)),
    Claim("swap-base", "… and leaves the base as it was", "base_changed", Bound("==", 0)),
    Claim("swap-tasks", "Each adapter learns its task", "task_loss_ratio", Bound("<", 1.0)),
    Claim("swap-same", "Answers do not depend on the adapters of others", "swap_differences", Bound("==", 0)),
]
NOTES = [
    "Losses are nats a character on held-out text; gaps are to the uncompressed model. Palettes, rounding and recovery are "
    "measured on three models, each trained from nothing and with held-out text of its own.",
    "Bits are those of the linear maps of the layers, with tables or scales.",
    "What is pruned and what adapters stand beside is the first of the three; three seeds of pruning are three orders of text "
    "(and of masks and fresh weights).",
    "Rewards are means of the last fifth of the rounds; each way of learning has its best of the same learning rates.",
]


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    trained = palettes.models(size.ground, seed)
    model = trained[0].model
    found = palettes.measured(trained, size.ground, size.training)
    rewards, curves = rewarded(size.game, seed)
    values = {
        **found.values,
        **prune.measured(model, size.ground, size.healing, seed),
        **rewards,
        **swap.measured(found.model, size.ground, size.tasks, seed),
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": size.ground.tokens,
    }
    return Outcome(
        values=values,
        series=curves,
        notes=NOTES,
        reasons=reasons(values),
        config={**asdict(size), "device": ground_.device().type},
    )


def rewarded(game: mdloo.Game, seed: int) -> tuple[dict[str, Value | Scalar], dict[str, list[Any]]]:
    """All ways to learn from rewards; MDLOO without gamma has the rate of MDLOO with it."""
    found = {way: mdloo.best(game, way, seed) for way in ("mdloo", "reinforce", "reused")}
    rate = found["mdloo"][0]
    found["free"] = mdloo.best(game, "free", seed, (rate,))
    last = {way: [each.last for each in played] for way, (_, played) in found.items()}
    spread = {way: [statistics.pvariance(each.steps) for each in played] for way, (_, played) in found.items()}
    values: dict[str, Value | Scalar] = {
        f"reward_{way}": ground_.mean(last[way], "", f"learning rate {found[way][0]:g}") for way in found
    }
    differences = [a - b for a, b in zip(last["mdloo"], last["reinforce"], strict=True)]
    ratios = [a / b for a, b in zip(spread["mdloo"], spread["free"], strict=True)]
    values |= {
        "mdloo_over_reinforce": ground_.mean(differences),
        "step_kl_variance": ground_.mean(spread["mdloo"], "", f"gamma {game.gamma:g}"),
        "step_kl_variance_free": ground_.mean(spread["free"], "", "gamma 0"),
        "step_kl_variance_ratio": ground_.mean(ratios, "x"),
    }
    curves = {f"round, reward: {way}": _curve(played) for way, (_, played) in found.items()}
    return values, curves


def _curve(played: list[mdloo.Played]) -> list[list[float]]:
    rounds = zip(*(each.rewards for each in played), strict=True)
    return [[number + 1, round(statistics.fmean(told), 4)] for number, told in enumerate(rounds)]


def reasons(values: dict[str, Any]) -> dict[str, str]:
    """What is known about claims that may fail at this size."""

    def number(name: str) -> float:
        return float(Value.of(values[name]).value or 0)

    found = {}
    if number("rtn_gap_ratio") <= 1:
        spread = Value.of(values["rtn_gap_ratio"])
        found["rtn"] = (
            f"Over single models the ratio goes from {spread.low:.2f} to {spread.high:.2f}; to weighted palettes alone it is "
            f"{number('rtn_gap_ratio_weighted'):.2f}. At this width a table for 16 rows and a scale for each {palettes.GROUP} "
            f"weights come about as near to the weights: relative errors are {number('error_palette4'):.4f} and "
            f"{number('error_rtn4'):.4f} at four bits, {number('error_palette2'):.4f} and {number('error_rtn2'):.4f} at two."
        )
    if number("top1_loss_over_labels") >= 0:
        found["top1-loss"] = (
            "The loss is a proper score of the whole distribution: nine parts of one token ask for a distribution that is too "
            "sharp, whatever the teacher knows. The paper judges by answers to questions, which is nearer to accuracy."
        )
    if number("top1_accuracy_over_labels") <= 0:
        found["top1-accuracy"] = (
            f"The teacher is the model that was pruned, and text never repeats: its likeliest token is right "
            f"{number('prune_accuracy_teacher'):.1f} times in a hundred, with true labels the student's is already "
            f"{number('prune_accuracy_labels'):.1f} times. It has little to tell that the true token does not tell better."
        )
    if number("recovered_gap_ratio") > 0.5:
        found["recover"] = (
            f"A fiftieth of so little text is {number('recover_tokens'):,.0f} characters: few for side paths to find a gap of "
            f"{number('gap_weighted'):.4f} nats."
        )
    return found
