"""Two bits a weight, three ways, and what side paths bring back. For the `afm-2025-device` study.

All models of two bits have the same tree: one scale for each row of each linear map of the layers, in half precision; the
table of embeddings and the norms stay as they are. So they have the same bytes, scales counted.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from orchard.core.report import Scalar, Value
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.nn.formats import Blocks
from orchard.studies import _afm_ground as ground_
from orchard.studies._afm_ground import Ground
from orchard.transforms.gptq import Gptq
from orchard.transforms.qat import Qat
from orchard.transforms.recover import Recover
from orchard.transforms.rtn import Rtn

SEEDS = 3
LEVELS = ("balanced", "unbalanced")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long two bits are trained, and how: the same for both kinds of levels."""

    steps: int = 60
    rate: float = 5e-4
    scales: float = 1.0
    recover: float = 0.05
    """The share of the base's tokens that side paths learn from."""
    recover_rows: int = 4
    recover_rate: float = 5e-4
    rank: int = 16
    texts: int = 4
    """Batches that second-order rounding looks at."""


@dataclass(frozen=True)
class TwoBits:
    """What came of it: values, and the trained model of two bits with its side paths."""

    values: dict[str, Value | Scalar]
    finished: Decoder
    recovered: Decoder


def measured(model: Decoder, ground: Ground, training: Training, seed: int) -> TwoBits:
    """All values; `model` is the unquantised one."""
    whole = ground_.loss(model, ground, seed)
    texts = list(ground_.batches(ground, training.texts, seed, "look"))
    nearest = Rtn(bits=2, group=None).apply(model)
    second = Gptq(bits=2, group=None).apply(model, texts)
    losses: dict[str, list[float]] = {level: [] for level in LEVELS}
    finished: list[Decoder] = []
    changed = 0.0
    for number in range(SEEDS):
        for level in LEVELS:
            qat = Qat(bits=2, group=None, embedding=None, levels=level)
            student = trained(qat, model, ground, training, fold(seed, "qat", number))
            losses[level].append(ground_.loss(student, ground, seed))
            if level == "balanced":
                finished.append(qat.finish(student).eval())
                changed = max(changed, abs(ground_.loss(finished[-1], ground, seed) - losses[level][-1]))
    gap = {
        "ptq": ground_.loss(nearest, ground, seed) - whole,
        "gptq": ground_.loss(second, ground, seed) - whole,
    }
    mean = {level: statistics.fmean(losses[level]) for level in LEVELS}
    left = mean["balanced"] - whole
    differences = [a - b for a, b in zip(*losses.values(), strict=True)]
    values: dict[str, Value | Scalar] = {
        "loss": Value(whole, "nats", note="nats a character on held-out text, before anything is quantised"),
        "loss_ptq2": Value(whole + gap["ptq"], "nats", note="two bits, best scale of each row, rounded to nearest"),
        "loss_gptq2": Value(whole + gap["gptq"], "nats", note="two bits, second-order rounding"),
        "loss_qat2": ground_.mean(losses["balanced"], "nats", f"two bits, {training.steps} steps of training"),
        "loss_qat2_unbalanced": ground_.mean(losses["unbalanced"], "nats", "levels -2, -1, 0, 1"),
        "loss_rtn4": Value(
            ground_.loss(Rtn(bits=4, group=None).apply(model), ground, seed), "nats", note="four bits, one scale a row"
        ),
        "qat_gap_share": Value(left / gap["ptq"], "x", note="of the gap that rounding to nearest leaves"),
        "qat_gap_share_of_gptq": Value(left / gap["gptq"], "x", note="of the gap that second-order rounding leaves"),
        "balanced_over_unbalanced": ground_.mean(differences, "nats", "difference of losses, the same text by pairs"),
        "qat_bits": Value(
            ground_.linear_bits(finished[0]), "bits", note="for each weight of a linear map, scales counted"
        ),
        "qat_bytes_over_ptq": ground_.nbytes(finished[0]) - ground_.nbytes(nearest),
        "qat_packing_change": Value(changed, "nats", note="of the loss, when the trained weights are packed"),
    }
    values_of, recovered = recoveries(model, finished, whole, ground, training, seed)
    return TwoBits(values | values_of, finished[0], recovered)


def trained(qat: Qat, model: Decoder, ground: Ground, training: Training, seed: int) -> Decoder:
    """By distillation from the model itself, without decay of weights: what is learnt is to stand in for it."""
    student = qat.apply(model)
    read = ground_.batches(ground, training.steps, seed, "qat")
    return ground_.learn(
        student,
        ground_.towards(model),
        read,
        training.steps,
        training.rate,
        seed=seed,
        title=f"two bits, {qat.levels}",
        decay=0.0,
        scales=training.scales,
    )


def recoveries(
    model: Decoder, finished: list[Decoder], whole: float, ground: Ground, training: Training, seed: int
) -> tuple[dict[str, Value | Scalar], Decoder]:
    """Side paths beside the trained two bits and beside the block codec; both bases stay what they are."""
    blocks = Rtn(format=Blocks.Config()).apply(model)
    shares: dict[str, list[float]] = {"qat": [], "blocks": []}
    changed, kept = 0, finished[0]
    for number in range(SEEDS):
        for name, base in (("qat", finished[number]), ("blocks", blocks)):
            before, sum_ = ground_.loss(base, ground, seed), ground_.checksum(base)
            made = recovered(model, base, ground, training, fold(seed, "recover", number))
            changed += (ground_.checksum(made) != sum_) + (ground_.checksum(base) != sum_)
            shares[name].append(1 - (ground_.loss(made, ground, seed) - whole) / (before - whole))
            if name == "qat" and number == 0:
                kept = made
    note = f"share of the gap that is closed, rank {training.rank}"
    return {
        "recovered_qat": ground_.mean(shares["qat"], "x", note),
        "recovered_blocks": ground_.mean(shares["blocks"], "x", note),
        "recover_tokens": Value(recover_steps(ground, training)[1], "tokens", note=f"of {ground.tokens:,}"),
        "recover_bases_changed": changed,
        "loss_blocks": Value(ground_.loss(blocks, ground, seed), "nats", note="block codec, nothing trained"),
        "recovered_bits": Value(
            ground_.linear_bits(kept, sides=True), "bits", note="two bits with side paths in half precision"
        ),
    }, kept


def recover_steps(ground: Ground, training: Training) -> tuple[int, int]:
    """Steps, and tokens, within the share."""
    each = training.recover_rows * ground.length
    steps = max(1, int(training.recover * ground.tokens) // each)
    return steps, steps * each


def recovered(teacher: Decoder, base: Decoder, ground: Ground, training: Training, seed: int) -> Decoder:
    """With side paths that were trained with the packed weights in place."""
    recover = Recover(r=training.rank, alpha=float(2 * training.rank), seed=seed % 2**31)
    steps, _ = recover_steps(ground, training)
    read = ground_.batches(ground, steps, seed, "recover", training.recover_rows)
    student = ground_.learn(
        recover.apply(base),
        ground_.towards(teacher),
        read,
        steps,
        training.recover_rate,
        seed=seed,
        title="recovery",
        decay=0.0,
    )
    return recover.finish(student).eval()
