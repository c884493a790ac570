"""Learning from a reward that can be checked: digits that add up to the number asked for. For the `afm-2024` study.

A tiny decoder reads a number of two digits and writes four digits; an answer is worth 1 where they add up to the number,
less the further off they are. Every round it writes K answers to each of some prompts, and all ways of learning see as many
answers:

- MDLOO takes several updates from each round (`orchard.objectives.mirror`);
- REINFORCE takes one, with the mean reward of the batch as its baseline, as its derivation asks for;
- "reused" is REINFORCE with as many updates as MDLOO from the same answers, corrected by nothing.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import IGNORED, Batch, GroupBatch
from orchard.core.progress import progress
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.objectives.aggregate import Baseline
from orchard.objectives.mirror import MirrorDescent
from orchard.objectives.policy import PolicyGradient
from orchard.studies._learning import decoder
from orchard.train.clip import Clip
from orchard.train.optim import AdamW
from orchard.train.schedule import Constant
from orchard.train.step import Step

DIGITS, ASK, VOCAB = 4, 10, 16
OFF = 12
"""So far off, an answer is worth nothing."""
RATES = (3e-3, 1e-2)
"""Each way of learning is given all of them and keeps its best."""
LAST = 0.2
"""The share of rounds at the end over which rewards are averaged."""


@dataclass(frozen=True, kw_only=True)
class Game:
    """How long it is played."""

    rounds: int = 60
    prompts: int = 8
    group: int = 8
    minibatches: int = 2
    epochs: int = 2
    gamma: float = 0.3
    beta: float = 0.005
    seeds: int = 3
    dim: int = 32


@dataclass(frozen=True)
class Played:
    """Mean reward of each round's answers, and how far each round moved the policy: KL(πₖ ‖ πₖ₊₁) of a whole answer, in nats."""

    rewards: list[float]
    steps: list[float]

    @property
    def last(self) -> float:
        """The mean reward of the last rounds."""
        return statistics.fmean(self.rewards[-max(1, round(LAST * len(self.rewards))) :])


def reward(answers: Tensor, targets: Tensor) -> Tensor:
    """[N] of answers [N, DIGITS]; one with something else than digits in it is worth nothing."""
    off = (answers.sum(-1) - targets).abs()
    return torch.where((answers < ASK).all(-1), (1 - off / OFF).clamp_min(0), 0.0)


def prompts_of(targets: Tensor) -> Tensor:
    """[N, 3]: two digits and the mark that asks."""
    return torch.stack([targets // 10, targets % 10, torch.full_like(targets, ASK)], -1)


@torch.no_grad()
def write(model: Decoder, prompts: Tensor, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Answers [N, DIGITS] drawn at temperature 1, and the log-probability of each token."""
    ids, said = prompts, []
    for _ in range(DIGITS):
        scores = model(ids)[:, -1].float().log_softmax(-1)
        token = torch.multinomial(scores.exp(), 1, generator=dice)
        said.append(scores.gather(-1, token)[:, 0])
        ids = torch.cat([ids, token], -1)
    return ids[:, prompts.shape[1] :], torch.stack(said, -1)


def laid_out(prompts: Tensor, answers: Tensor, said: Tensor, rewards: Tensor, groups: Tensor) -> GroupBatch:
    """One row an answer; nothing is learnt from prompts."""
    whole = torch.cat([prompts, answers], -1)
    ids, targets = whole[:, :-1].contiguous(), whole[:, 1:].clone()
    targets[:, : prompts.shape[1] - 1] = IGNORED
    behaviour = torch.zeros(targets.shape)
    behaviour[:, prompts.shape[1] - 1 :] = said
    places = torch.arange(ids.shape[1]).expand_as(ids)
    return GroupBatch(Batch(ids, targets, places, torch.zeros_like(ids), plain=True), behaviour, rewards, groups)


@torch.no_grad()
def divergence(one: Decoder, other: Decoder, batch: GroupBatch) -> float:
    """KL(one ‖ other) of an answer: exact over the next token, at the places of answers that `one` wrote."""
    p, q = (model(batch.batch.ids).float().log_softmax(-1) for model in (one, other))
    counted = batch.batch.targets != IGNORED
    return float(((p.exp() * (p - q)).sum(-1) * counted).sum(-1).mean())


def play(game: Game, way: str, rate: float, seed: int) -> Played:
    """`way`: mdloo, free (mdloo with gamma = 0), reinforce or reused."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "policy"))
        model: Decoder = decoder(game.dim, 2, VOCAB, 16).complete().build()
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    mirror = way in ("mdloo", "free")
    objective: Any = PolicyGradient.Config(aggregate=Baseline.Config(), clip_low=None, clip_high=None).build()
    if mirror:
        gamma = game.gamma if way == "mdloo" else 0.0
        objective = MirrorDescent.Config(gamma=gamma, beta=game.beta).build(reference=reference)
    optimizer = AdamW.Config(lr=rate, decay=0.0, betas=(0.9, 0.99)).build(named_parameters=model.named_parameters())
    step = Step(
        model,
        objective,
        optimizer,
        Constant.Config().build(),
        Clip.Config().build(),
        micro=None,
        dtype="float32",
        seed=seed,
    )
    dice = torch.Generator().manual_seed(fold(seed, "answers"))
    rewards: list[float] = []
    moves: list[float] = []
    taken = 0
    for _ in range(game.rounds):
        targets = torch.randint(4, 33, (game.prompts,), generator=dice).repeat_interleave(game.group)
        model.eval()
        prompts = prompts_of(targets)
        answers, said = write(model, prompts, dice)
        worth = reward(answers, targets)
        rewards.append(float(worth.mean()))
        groups = torch.arange(game.prompts).repeat_interleave(game.group)
        # The batch's mean is taken off before anything is cut into minibatches, so that it is the batch's.
        batch = laid_out(prompts, answers, said, worth if mirror else worth - worth.mean(), groups)
        before = copy.deepcopy(model)
        for part in parts(batch, game, way, dice):
            step(part, taken, tokens=part.tokens)
            taken += 1
        moves.append(divergence(before, model.eval(), batch))
    return Played(rewards, moves)


def parts(batch: GroupBatch, game: Game, way: str, dice: torch.Generator) -> list[GroupBatch]:
    """What a round is learnt from, update by update: whole groups in another order each time, or everything once."""
    if way == "reinforce":
        return [batch]
    found = []
    size = game.prompts // game.minibatches * game.group
    for _ in range(game.epochs):
        order = torch.randperm(game.prompts, generator=dice)
        rows = (order[:, None] * game.group + torch.arange(game.group)).flatten()
        for start in range(0, len(rows), size):
            found.append(_rows(batch, rows[start : start + size]))
    return found


def _rows(batch: GroupBatch, rows: Tensor) -> GroupBatch:
    inner = batch.batch
    ids, targets, places, documents = (x[rows] for x in (inner.ids, inner.targets, inner.positions, inner.documents))
    return GroupBatch(
        Batch(ids, targets, places, documents, plain=True),
        batch.behaviour[rows],
        batch.rewards[rows],
        batch.groups[rows],
    )


def best(game: Game, way: str, seed: int, rates: tuple[float, ...] = RATES) -> tuple[float, list[Played]]:
    """The rate with the highest last reward over all seeds, and how it went with it."""
    found: dict[float, list[Played]] = {}
    with progress(f"learning from rewards, {way}", total=len(rates) * game.seeds) as advance:
        for rate in rates:
            found[rate] = []
            for number in range(game.seeds):
                found[rate].append(play(game, way, rate, fold(seed, "play", number)))
                advance()
    chosen = max(found, key=lambda rate: statistics.fmean(each.last for each in found[rate]))
    return chosen, found[chosen]
