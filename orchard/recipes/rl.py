"""Reinforcement learning: a model writes answers, a judge says what they are worth, better ones become likelier."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchard.core.config import BaseConfig
from orchard.core.errors import UsageError
from orchard.data.jsonl import Jsonl
from orchard.data.order import Repeat
from orchard.objectives.aggregate import GroupNormal, LeaveOneOut
from orchard.objectives.policy import PolicyGradient
from orchard.recipes.adapter import Adapter
from orchard.recipes.base import nearest, recipe
from orchard.recipes.files import rows_of
from orchard.recipes.run import Run
from orchard.train.optim import AdamW
from orchard.train.rollout import Rollouts
from orchard.train.rollout_rewards import ExactMatch, Length, Matches, ValidJson
from orchard.train.rollout_writer import EngineWriter
from orchard.train.trainer import Trainer

ADVANTAGES: dict[str, Any] = {
    "grpo": lambda: GroupNormal.Config(),
    "dr-grpo": lambda: GroupNormal.Config(std=False),
    "rloo": lambda: LeaveOneOut.Config(),
}
REWARDS = ("exact", "regex", "json", "length")


@recipe
def grpo(
    data: str | Sequence[str],
    base: str = "smollm2",
    reward: str = "exact",
    field: str | None = None,
    pattern: str | None = None,
    schema: str | None = None,
    least: int = 0,
    most: int | None = None,
    advantage: str = "grpo",
    kl: float = 0.04,
    clip: float = 0.2,
    prompts: int = 8,
    group: int = 8,
    max_tokens: int = 128,
    temperature: float = 1.0,
    epochs: int = 1,
    minibatches: int = 1,
    lag: int = 0,
    chat: bool = True,
    runner: str = "auto",
    r: int | None = 32,
    alpha: float = 64.0,
    unpack: bool = False,
    steps: int = 200,
    lr: float = 5e-5,
    dtype: str = "float32",
    micro: int | None = None,
    seed: int = 0,
) -> Run.Config:
    """Learn from rewards: GRPO, or RLOO, with answers that the model writes itself.

    A round writes `group` answers to each of `prompts` prompts and judges them; those that were better than others of their group
    become likelier. Curves to look at: reward, kl, entropy, clipped, staleness.

    data: files or folders of .jsonl with prompt or messages, and whatever the judge compares with
    base: the model to begin from: a name of the library, a GGUF file or a Hugging Face folder
    reward: exact (the text in a field of the row), regex, json (valid, by a schema) or length (in tokens)
    field: the field of a row that answers are compared with; none: completion for exact, nothing for regex
    pattern: of regex; with a field, what its first group finds has to be what the field says
    schema: of json: a file with a JSON Schema; none: any JSON
    least: of length: fewer tokens are worth less
    most: of length: more tokens are worth less; none: half of max_tokens
    advantage: grpo (over the group's deviation), dr-grpo (not over it) or rloo (against the mean of the others)
    kl: how closely the model stays to what it was; 0: not at all, which saves a pass
    clip: how far the probability of a token may move from what it was when it was written, as a share
    prompts: prompts of a round, of all processes together
    group: answers to each
    max_tokens: tokens of an answer
    temperature: answers are sampled at
    epochs: how often a round is learnt from
    minibatches: into how many updates a round is cut, by prompts
    lag: rounds that are written ahead of the one that is learnt from
    chat: prompts that are texts are put as a user's message; false: as texts that go on
    runner: what writes: auto, plan (the native engine), together or alone (torch); see docs/rollouts.md
    r: the rank of the side paths; none: all weights are trained (use a tenth of the learning rate, or less)
    alpha: the scale of the side paths, times r
    unpack: make a packed base dense, for speed
    steps: updates of the weights
    lr: the highest learning rate
    dtype: what learning is computed in: float32 or bfloat16
    micro: prompts at a time, where memory is short; their groups stay whole
    seed: of the side paths, of the order of the prompts and of the answers
    """
    if advantage not in ADVANTAGES:
        raise UsageError(f"no advantage is called {advantage!r}", hint=nearest(advantage, ADVANTAGES))
    source = Rollouts.Config(
        source=Repeat.Config(source=_asked(data, seed)),
        reward=_judge(reward, field=field, pattern=pattern, schema=schema, least=least, most=most or max_tokens // 2),
        prompts=prompts,
        group=group,
        max_tokens=max_tokens,
        temperature=temperature,
        epochs=epochs,
        minibatches=minibatches,
        lag=lag,
        chat=chat,
        seed=seed,
        writer=EngineWriter.Config(runner=runner),
    )
    objective = PolicyGradient.Config(
        aggregate=ADVANTAGES[advantage](),
        clip_low=clip,
        clip_high=clip,
        normalize="sequence",
        kl=kl,
        temperature=temperature,
    )
    return Run.Config(
        train=Trainer.Config(
            objective=objective,
            source=source,
            steps=steps,
            micro=None if micro is None else micro * group,
            optim=AdamW.Config(lr=lr, decay=0.0),
            dtype=dtype,
            seed=seed,
        ),
        base=base,
        adapter=None if r is None else Adapter.Config(r=r, alpha=alpha, unpack=unpack),
        reference=kl > 0,
    )


def _asked(data: str | Sequence[str], seed: int) -> BaseConfig:
    """Rows to be answered."""
    rows = rows_of(data, seed=seed)
    readers = [node for _, node in rows.find(Jsonl)]
    if not readers:
        raise UsageError("prompts are read from .jsonl files", hint='one {"prompt": …} a line')
    for reader in readers:
        reader.form = "prompts"
    return rows


def _judge(
    name: str, *, field: str | None, pattern: str | None, schema: str | None, least: int, most: int
) -> BaseConfig:
    if name not in REWARDS:
        raise UsageError(f"no reward is called {name!r}", hint=nearest(name, REWARDS))
    for given, value, where in (("pattern", pattern, "regex"), ("schema", schema, "json")):
        if value is not None and name != where:
            raise UsageError(f"the reward {name} has no {given}", hint=f"use reward={where}, or leave {given} out")
    if name == "regex":
        if pattern is None:
            raise UsageError("the reward regex needs a pattern", hint=r"pattern='#### (-?\d+)', say")
        return Matches.Config(pattern=pattern, field=field)
    if name == "json":
        return ValidJson.Config(schema={} if schema is None else _schema(schema))
    if name == "length":
        return Length.Config(least=least, most=most, soft=max(most // 4, 1))
    return ExactMatch.Config(field=field or "completion")


def _schema(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).expanduser().read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no JSON Schema: {error}", hint="name a file that holds one") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no JSON Schema: it holds no object", hint="name a file that holds one")
    return found
