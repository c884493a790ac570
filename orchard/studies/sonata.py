"""Sonata: thinking budgets from predicted self-consistency.

Adaptive Thinking, or Sonata (ICLR 2026, OpenReview 2i6Rp0gCq6): a small network reads the last hidden vector of a
prompt, when the prompt has been read and nothing is written yet, and predicts how often the model would be right
without thinking. Where that is often enough, thinking is skipped. It is fitted on the model's own record: some
hundred prompts, each answered many times without thinking. Published for Qwen3 and GPT-OSS models of 8 to 235 billion
weights: about the accuracy of always thinking with 10 to 20 % fewer tokens on average, half of them on easy sets.

Here a small decoder learns arithmetic in two ways, the answer alone or every step of it first, on problems of many
sizes. Direct and thought answers come from Orchard's engine, at the paper's temperature of 0.6 and nucleus of 0.95,
held to their mode by the rule that users have (`orchard.generate.budget`). The predictor is the product's, fitted on
prompts with 16 direct answers each; its threshold is chosen on other prompts, and everything is measured on a third
set. One family of problems, differences, is left out of fitting and choosing, for transfer.

What differs from the paper: a model of at most a few million weights that was trained here on nothing but these
problems, half of them in each mode, with a mark for the mode after the prompt; answers are known, so self-consistency
is accuracy. The entropy that the predictor is compared with is of the first token of the direct answer, which knows
more than the token before it does (that one predicts the mark, a coin toss). Policies are compared by the mean of
several answers to each prompt. The paper's self-judged and fixed budgets are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.core.seeds import fold, generator
from orchard.generate.budget_predictor import SelfConsistency, choose_tau, fit
from orchard.studies import _sonata_answers as answers
from orchard.studies import _sonata_model as models
from orchard.studies import _sonata_policy as policy
from orchard.studies import _sonata_tasks as tasks
from orchard.studies.harness import Outcome

LEFT_OUT = "difference"
"""The family that the predictor never sees before the end."""
LOSS = 0.005
"""How much accuracy the threshold may cost on the prompts it is chosen on: half of what is allowed in the end."""
FITS = 5
"""Predictors that are fitted to compare layers."""
SCALES = {
    "small": models.Scale(
        dim=96,
        layers=3,
        steps=3600,
        batch=36,
        rate=2e-3,
        sizes={"places": 4, "sum": 4, "product": 3, "chain": 4, "difference": 3},
        test=500,
        thoughts=2,
    ),
    "full": models.Scale(
        dim=192,
        layers=6,
        steps=3500,
        batch=1024,
        rate=1e-3,
        sizes={"places": 8, "sum": 10, "product": 8, "chain": 8, "difference": 8},
        test=800,
        thoughts=3,
    ),
}
CLAIMS = [
    Claim(
        "think", "Thinking, the model is right on most problems", "think_accuracy", Bound(">=", 90), "direct_accuracy"
    ),
    Claim("easy", "Some kinds of problems are answered at a glance", "easiest_direct", Bound(">=", 90)),
    Claim("hard", "Others are not", "hardest_direct", Bound("<=", 10)),
    Claim("rank", "The prediction ranks new prompts by self-consistency", "spearman", Bound(">=", 0.7)),
    Claim("auc", "It tells right direct answers from wrong ones", "auc", Bound(">=", 0.85)),
    Claim("accuracy", "Gated thinking loses at most a point", "accuracy_change", Bound(">=", -1.0)),
    Claim("tokens", "Gated thinking writes fewer tokens", "tokens_ratio", Bound("<=", 0.8)),
    Claim("random", "It beats skipping as many prompts at random", "over_random", Bound(">=", 5.0)),
    Claim("entropy", "It beats a gate by next-token entropy at the same cost", "over_entropy", Bound(">=", 1.0)),
    Claim("linear", "Two layers are no worse than one", "over_linear", Bound(">=", -0.5)),
    Claim("layer", "The last layer knows more than the first", "spearman_over_first_layer", Bound(">", 0)),
    Claim("pareto", "A higher threshold never writes fewer tokens", "pareto_steps_down", Bound("==", 0)),
    Claim("flops", "The predictor costs next to nothing beside the prompt", "predictor_flops_share", Bound("<", 0.01)),
    Claim("engine", "The engine gates every prompt as the threshold says", "gate_mismatches", Bound("==", 0)),
]
NOTES = [
    "Accuracies are in percent, each the mean over the direct (16) or thought answers to a prompt; tokens are all tokens "
    "written, marks and the end too, as a share of always thinking.",
    "Prompts of the smallest sizes are few, and the model has seen most of them in training. No prompt is in more than one "
    "of the sets that the predictor is fitted, chosen and tested on.",
    "Intervals are of a bootstrap over prompts, with the model, the predictor and the threshold as they are.",
]


@dataclass(frozen=True)
class Measured:
    """One set of prompts: what the model's layers hold, and how its answers came out."""

    problems: list[tasks.Problems]
    last: np.ndarray
    first: np.ndarray
    entropy: np.ndarray
    direct: answers.Outcome
    think: answers.Outcome

    @property
    def record(self) -> policy.Record:
        return policy.Record.of(self.direct, self.think)


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, curve = models.train(size, seed, device)
    sets = measured(model, size, seed)
    fitted, validated, tested = sets["calibration"], sets["validation"], sets["test"]
    consistency = fitted.direct.right.mean(1)
    predictor = tuned(fit(fitted.last, consistency, seed=seed), validated)
    linear = fit(fitted.last, consistency, seed=seed, width=0)
    first = fit(fitted.first, consistency, seed=seed)
    values: dict[str, Value | Scalar] = {
        **abilities(tested),
        **ranking(predictor, linear, first, sets),
        **gating(predictor, linear, first, validated, tested, seed),
        **by_layer(fitted, tested, seed),
        **by_engine(predictor, answers.engine_of(model), tested, seed),
        "predictor_flops_share": predictor.flops / prefill_flops(model, tested),
        "weights": sum(parameter.numel() for parameter in model.parameters()),
    }
    curve_of_tau = policy.pareto(predictor.predict(tested.last), tested.record, np.linspace(0, 1, 101).tolist())
    tokens = [row[2] for row in curve_of_tau]
    values["pareto_steps_down"] = int(sum(after < before - 1e-12 for before, after in pairwise(tokens)))
    return Outcome(
        values=values,
        series={
            "loss by step: direct, think": curve,
            "tau, skipped, tokens, accuracy": curve_of_tau,
            "family, size, direct, think, predicted": by_kind(predictor, [tested, sets["transfer"]]),
        },
        notes=NOTES,
        config={**asdict(size), "left_out": LEFT_OUT, "loss": LOSS, "device": device.type},
    )


def measured(model: Any, size: models.Scale, seed: int) -> dict[str, Measured]:
    """All sets of prompts. The engine comes last: it moves the model to the CPU."""
    every = [kind for kind in tasks.kinds(size.sizes) if kind.family != LEFT_OUT]
    others = [kind for kind in tasks.kinds(size.sizes) if kind.family == LEFT_OUT]
    seen: set[tuple[int, ...]] = set()
    counts = {"calibration": size.calibration, "validation": size.validation, "test": size.test}
    problems = {name: draw(every, count, fold(seed, name), seen) for name, count in counts.items()}
    problems["transfer"] = draw(others, size.test // 3, fold(seed, "transfer"), seen)
    known = {name: [part.numpy() for part in models.features(model, made)] for name, made in problems.items()}
    engine = answers.engine_of(model)
    found = {}
    for name, made in problems.items():
        thoughts = size.thoughts if name != "calibration" else 0  # a record of thinking is not needed for fitting
        direct = answers.outcomes(
            engine, made, answers.DIRECT, size.samples, fold(seed, name, "direct"), f"{name}, direct"
        )
        think = answers.outcomes(engine, made, answers.THINK, thoughts, fold(seed, name, "think"), f"{name}, thinking")
        first, entropy = known[name]
        found[name] = Measured(made, answers.hidden(engine, made), first, entropy, direct, think)
    return found


def draw(every: Sequence[tasks.Kind], count: int, seed: int, seen: set[tuple[int, ...]]) -> list[tasks.Problems]:
    """About `count` problems, as many of each kind, none of them seen before; fewer of a kind that has no more."""
    chance, each, found = generator(seed), -(-count // len(every)), []
    for kind in every:
        made = tasks.make(kind, 20 * each, chance)
        rows: list[int] = []
        for row, prompt in enumerate(map(tuple, made.prompt.tolist())):
            if prompt not in seen and len(rows) < each:
                seen.add(prompt)
                rows.append(row)
        found.append(tasks.Problems(kind, made.prompt[rows], made.steps[rows], made.answer[rows]))
    return found


def tuned(predictor: SelfConsistency, validated: Measured) -> SelfConsistency:
    """With the threshold that costs least among those that lose little."""
    record = validated.record
    tau = choose_tau(
        predictor.predict(validated.last),
        record.direct,
        record.think,
        record.direct_tokens,
        record.think_tokens,
        loss=LOSS,
    )
    return predictor.with_policy(tau=tau)


def abilities(tested: Measured) -> dict[str, Value | Scalar]:
    kinds = [row[2] for row in by_kind(None, [tested])]
    return {
        "direct_accuracy": Value(100 * tested.direct.right.mean(), "%"),
        "think_accuracy": Value(100 * tested.think.right.mean(), "%"),
        "easiest_direct": Value(max(kinds), "%", note="the kind that is answered best"),
        "hardest_direct": Value(min(kinds), "%", note="the kind that is answered worst"),
        "direct_tokens": Value(tested.direct.tokens.mean(), "tokens"),
        "think_tokens": Value(tested.think.tokens.mean(), "tokens"),
        "prompts": Value(len(tested.last), note="tested"),
    }


def by_kind(predictor: SelfConsistency | None, sets: Sequence[Measured]) -> list[list[Any]]:
    """Family, size, accuracy without and with thinking, and what is predicted, in percent."""
    rows: list[list[Any]] = []
    for part in sets:
        ends = np.cumsum([len(each.prompt) for each in part.problems])
        for each, end in zip(part.problems, ends, strict=True):
            here = slice(end - len(each.prompt), end)
            if not len(each.prompt):
                continue
            shares = [part.direct.right[here].mean(), part.think.right[here].mean()]
            shares += [predictor.predict(part.last[here]).mean()] if predictor is not None else []
            rows.append([each.kind.family, each.kind.size, *(round(100 * float(share), 1) for share in shares)])
    return rows


def ranking(
    predictor: SelfConsistency, linear: SelfConsistency, first: SelfConsistency, sets: Mapping[str, Measured]
) -> dict[str, Value | Scalar]:
    """How well predictions rank prompts that were not fitted on."""
    tested, transfer = sets["test"], sets["transfer"]
    values: dict[str, Value | Scalar] = {}
    scores = {
        "": predictor.predict(tested.last),
        "_linear": linear.predict(tested.last),
        "_first_layer": first.predict(tested.first),
        "_entropy": -tested.entropy,
    }
    for name, score in scores.items():
        values[f"spearman{name}"] = policy.spearman(score, tested.direct.right.mean(1))
        values[f"auc{name}"] = policy.auc(score, tested.direct.right)
    moved = predictor.predict(transfer.last)
    record = transfer.record
    values |= {
        "spearman_transfer": Value(
            policy.spearman(moved, transfer.direct.right.mean(1)), note=f"{LEFT_OUT}: not fitted on"
        ),
        "auc_transfer": Value(policy.auc(moved, transfer.direct.right), note=f"{LEFT_OUT}: not fitted on"),
        "accuracy_change_transfer": Value(
            record.accuracy(moved > predictor.tau) - record.accuracy(np.zeros(len(moved), bool)), "points"
        ),
        "tokens_ratio_transfer": record.tokens(moved > predictor.tau),
    }
    return values


def by_layer(fitted: Measured, tested: Measured, seed: int) -> dict[str, Value | Scalar]:
    """How much better the last layer ranks prompts than the first, over several fits: one fit is a matter of luck."""
    gaps = []
    for turn in range(FITS):
        ranked = [
            policy.spearman(
                fit(vectors, fitted.direct.right.mean(1), seed=fold(seed, "fit", turn) % 2**32).predict(new),
                tested.direct.right.mean(1),
            )
            for vectors, new in ((fitted.last, tested.last), (fitted.first, tested.first))
        ]
        gaps.append(ranked[0] - ranked[1])
    note = f"mean of {FITS} fits; the interval is the least and the most of them"
    return {"spearman_over_first_layer": Value(float(np.mean(gaps)), "", min(gaps), max(gaps), note)}


def gating(
    predictor: SelfConsistency,
    linear: SelfConsistency,
    first: SelfConsistency,
    validated: Measured,
    tested: Measured,
    seed: int,
) -> dict[str, Value | Scalar]:
    """Policies on the test set. Others are given the same cost in tokens on the prompts that the threshold was chosen on."""
    record, chosen = tested.record, validated.record
    skip = predictor.predict(tested.last) > predictor.tau
    cost = chosen.tokens(predictor.predict(validated.last) > predictor.tau)
    others = {
        "entropy": (-validated.entropy, -tested.entropy),
        "linear": (linear.predict(validated.last), linear.predict(tested.last)),
        "first_layer": (first.predict(validated.first), first.predict(tested.first)),
    }
    values: dict[str, Value | Scalar] = {
        "tau": predictor.tau,
        "skipped": Value(float(skip.mean()), note="share of prompts without thinking"),
        "gated_accuracy": Value(record.accuracy(skip), "%"),
    }
    drawn = policy.resamples(len(skip), fold(seed, "bootstrap") % 2**32)
    nobody = np.zeros(len(skip), bool)
    changes = [record[rows].accuracy(skip[rows]) - record[rows].accuracy(nobody) for rows in drawn]
    ratios = [record[rows].tokens(skip[rows]) for rows in drawn]
    luck = [record[rows].accuracy(skip[rows]) - record[rows].random(float(skip[rows].mean())) for rows in drawn]
    values |= {
        "accuracy_change": Value(
            record.accuracy(skip) - record.accuracy(nobody), "points", *policy.interval(changes), "over always thinking"
        ),
        "tokens_ratio": Value(record.tokens(skip), "x", *policy.interval(ratios), "of always thinking"),
        "over_random": Value(
            record.accuracy(skip) - record.random(float(skip.mean())), "points", *policy.interval(luck)
        ),
    }
    for name, (before, now) in others.items():
        theirs = now > policy.cut_at_cost(before, chosen, cost)
        gains = [record[rows].accuracy(skip[rows]) - record[rows].accuracy(theirs[rows]) for rows in drawn]
        values |= {
            f"{name}_accuracy": Value(record.accuracy(theirs), "%"),
            f"{name}_tokens_ratio": Value(record.tokens(theirs), "x"),
            f"over_{name}": Value(record.accuracy(skip) - record.accuracy(theirs), "points", *policy.interval(gains)),
        }
    return values


def by_engine(predictor: SelfConsistency, engine: Any, tested: Measured, seed: int) -> dict[str, Value | Scalar]:
    """The gate at work: each prompt answered once, by a request that names the predictor."""
    found = answers.outcomes(engine, tested.problems, answers.gated(predictor), 1, fold(seed, "gated"), "gated")
    wanted = predictor.predict(tested.last) > predictor.tau
    return {
        "gate_mismatches": int((found.skipped[:, 0] != wanted).sum()),
        "engine_accuracy": Value(100 * found.right.mean(), "%", note="gated, one answer to each prompt"),
        "engine_tokens_ratio": Value(float(found.tokens.sum() / tested.think.tokens.mean(1).sum()), "x"),
    }


def prefill_flops(model: Any, tested: Measured) -> float:
    """Of the mean prompt, by two for each weight of a matrix and token; attention's own products are left out."""
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and not name.startswith("embedding"))
    tokens = sum(each.prompt.numel() for each in tested.problems) / len(tested.last)
    return 2.0 * weights * tokens
