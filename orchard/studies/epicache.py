"""EpiCache: a long conversation in fixed memory, one small cache for each topic.

Published 2025 (arXiv 2509.17396). A history is cut into segments of four utterances, these are clustered into episodes, and the
whole history is read once for each, block by block under a hard budget. After each block the words of the episode look at what
is cached and the tokens they look at least go. A question is answered from the episode that is nearest to it. Layers whose keys
change more when old tokens are gone get more of the budget. Published: up to 30 points above other ways to forget, near the
full cache at 4 to 6 times less memory; on RealTalk with Qwen3-4B 49.8 against 36.0 of KVzip and 56.9 of the full cache.

Here a transformer of four layers learns to look facts up in chats about eight topics (`value topic key .`), and then keeps an
eighth of a chat it has not seen: the newest tokens (StreamingLLM), those that the last queries look at (SnapKV), unlike keys
(KeyDiff), what the block needs to be repeated (KVzip), and EpiCache. Every fact of a chat is asked for. Parts:
`orchard.cache.policies`, `orchard.generate.memory`.

What differs from the paper: the model is trained here and small; chats are made up; the embedder knows topics and which of them
belong together, and nothing else; positions are packed after forgetting, where the paper keeps the old ones. KVzip repeats the
last block, or all that was read so far: the better of the two is what is compared with. Budgets by layer use the power that
leaves the least divergence on a chat of its own, out of several; the 2 to 4 of the paper are among them, but in a model of few
layers they starve the one that looks facts up.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import numpy as np

from orchard.core.progress import progress
from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.studies._epicache_chats import FACT, Chat, chat
from orchard.studies._epicache_model import Size, trained
from orchard.studies._epicache_ways import Reader, by_drift, divergence
from orchard.studies.harness import Outcome

SCALES = {"small": Size(), "full": Size(dim=128, heads=4, steps=4000, chats=32, oracle=32, rate=2e-3)}
OTHERS = ("streaming", "snap", "keydiff")
CLAIMS = [
    Claim("learnt", "The full cache answers", "accuracy_full", Bound(">=", 0.95)),
    Claim("others", "EpiCache: 1.5 x the best of StreamingLLM, SnapKV and KeyDiff", "over_others", Bound(">=", 1.5)),
    Claim("kvzip", "… and 1.1 x KVzip", "over_kvzip", Bound(">=", 1.1), "accuracy_kvzip"),
    Claim("full", "… and 0.8 x the full cache", "over_full", Bound(">=", 0.8), "accuracy_full"),
    Claim("peak", "Never more than budget + block tokens per head", "peak_excess", Bound("<=", 0), "tokens"),
    Claim("oracle", "The question itself is no worse a prompt", "oracle_gain", Bound(">=", 0), "accuracy_epicache"),
    Claim("random", "… and any segments are no better", "random_loss", Bound(">=", 0), "accuracy_random"),
    Claim("episodes", "Four episodes beat one by 5 points", "episodes_gain", Bound(">=", 0.05), "accuracy_one"),
    Claim("layers", "Budgets by layer lose at most a point", "layers_loss", Bound("<=", 0.01), "accuracy_epicache"),
    Claim("divergence", "… and bring answers nearer to the full cache's", "layers_divergence", Bound("<", 1.0)),
]
NOTES = [
    "Accuracy is the share of all facts of all chats whose value is the likeliest token after the question.",
    "The budget is an eighth of the history, the block as long, and every way ends at the budget.",
    "The oracle has a cache for each of some questions of every chat; EpiCache is compared with it on those questions.",
    "`layers_divergence` is the divergence from the full cache's answers with budgets by layer, over that with equal ones.",
]


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    return measured(trained(size, seed), size, seed)


def measured(model: Decoder, size: Size, seed: int) -> Outcome:
    shares = {alpha: by_drift(model, size, made(size, seed, "drift"), alpha) for alpha in size.alphas}
    alpha = best_alpha(model, size, seed, shares)
    with progress("chats", total=size.chats, unit="chats") as advance:
        found = []
        for number in range(size.chats):
            found.append(one_chat(model, size, made(size, seed, f"chat {number}"), shares[alpha], seed + number))
            advance()
    mean = {name: statistics.fmean(one[name] for one in found) for name in found[0]}
    accuracy = {name.removeprefix("accuracy_"): value for name, value in mean.items() if name.startswith("accuracy_")}
    epi = accuracy["epicache"]
    zipped = max(accuracy["kvzip_block"], accuracy["kvzip_whole"])
    budget = FACT * size.facts // size.compression
    values: dict[str, Value | Scalar] = {
        **{f"accuracy_{name}": Value(value, "of questions") for name, value in accuracy.items()},
        "accuracy_kvzip": Value(zipped, "of questions"),
        "over_others": Value(_over(epi, max(accuracy[name] for name in OTHERS)), "x"),
        "over_kvzip": Value(_over(epi, zipped), "x"),
        "over_full": Value(_over(epi, accuracy["full"]), "x"),
        "peak_excess": Value(max(one["peak"] for one in found) - 2 * budget, "tokens"),
        "peak": Value(max(one["peak"] for one in found), "tokens"),
        "tokens": Value(1 + FACT * size.facts, "tokens", note="the full cache holds them all"),
        "oracle_gain": Value(accuracy["oracle"] - mean["same_questions"], "of questions"),
        "random_loss": Value(epi - accuracy["random"], "of questions"),
        "episodes_gain": Value(epi - accuracy["one"], "of questions"),
        "layers_loss": Value(epi - accuracy["layers"], "of questions"),
        "layers_divergence": Value(_over(mean["divergence_layers"], mean["divergence_epicache"]), "x"),
        "divergence_layers": Value(mean["divergence_layers"], "nats"),
        "divergence_epicache": Value(mean["divergence_epicache"], "nats"),
        "cost": Value(mean["cost"], "x", note="tokens run to build four episodes, over those of the history"),
    }
    return Outcome(
        values=values,
        notes=[*NOTES, f"Budgets by layer: {shares[alpha]} of {budget} on average (power {alpha:g})."],
        config={**asdict(size), "budget": budget, "block": budget},
    )


def made(size: Size, seed: int, name: str) -> Chat:
    return chat(size.facts, np.random.default_rng(fold(seed, "asked", name)))


def best_alpha(model: Decoder, size: Size, seed: int, shares: dict[float, list[int]]) -> float:
    """On a chat of its own."""
    reader = Reader(model, size, made(size, seed, "alpha"))
    full = reader.full()
    return min(shares, key=lambda alpha: divergence(full, reader.allocated(shares[alpha])))


def one_chat(model: Decoder, size: Size, talk: Chat, budgets: list[int], seed: int) -> dict[str, float]:
    reader, answers = Reader(model, size, talk), talk.answers()
    dice = np.random.default_rng(fold(seed, "drawn"))
    told: dict[str, Any] = {
        "full": reader.full(),
        "streaming": reader.alone("recent"),
        "snap": reader.alone("snap"),
        "keydiff": reader.alone("keydiff"),
        "kvzip_block": reader.zipped(whole=False),
        "kvzip_whole": reader.zipped(whole=True),
        "one": reader.episodic(1),
        "random": reader.random(dice),
        "layers": reader.allocated(budgets),
        "epicache": reader.episodic(),
    }
    right = {name: one.argmax(-1) == answers for name, one in told.items()}
    places = dice.choice(len(answers), min(size.oracle, len(answers)), replace=False)
    cost = (reader.read + reader.looked) / len(talk.tokens())
    return {
        **{f"accuracy_{name}": float(one.mean()) for name, one in right.items()},
        "accuracy_oracle": float((reader.oracle(places.tolist()).argmax(-1) == answers[places]).mean()),
        "same_questions": float(right["epicache"][places].mean()),
        "divergence_epicache": divergence(told["full"], told["epicache"]),
        "divergence_layers": divergence(told["full"], told["layers"]),
        "peak": reader.peak,
        "cost": cost,
    }


def _over(value: float, base: float) -> float:
    return value / base if base else float("nan")
