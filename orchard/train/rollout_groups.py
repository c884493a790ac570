"""What goes to a writer and what comes back: questions, and groups of answers to one question with all that learning needs.

Plain values: they cross the borders of threads, processes and machines as they are or as JSON, and a checkpoint can hold those
that have not been learnt from yet.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchard.core.batch import GroupBatch
from orchard.data.batches import laid_out
from orchard.data.source import Row, Sample


@dataclass(frozen=True)
class Question:
    """A prompt, and the seed of each of the answers that are wanted."""

    number: int
    """Its place among the questions of its round."""
    ids: tuple[int, ...]
    row: Row
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """One answer. `ids` are all tokens that were sampled, with the end token where there is one; `log_probs` what the law that
    they were sampled from gave them, one each."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finish: str
    rewards: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """The answers to one question, and how many updates the weights had seen that wrote them."""

    number: int
    prompt: tuple[int, ...]
    answers: tuple[Written, ...]
    version: int
    place: str = field(default="", compare=False)

    @property
    def longest(self) -> int:
        """Tokens that a model reads for its longest answer: the last one is only a target."""
        return len(self.prompt) + max(len(answer.ids) for answer in self.answers) - 1

    @property
    def even(self) -> bool:
        """Whether all answers were worth the same, so that there is nothing to learn from comparing them."""
        return len({answer.rewards for answer in self.answers}) == 1


def laid_in_rows(groups: Sequence[Group], *, width: int, version: int) -> GroupBatch:
    """One row for each answer; `version`: how many updates the weights have seen that will learn from them."""
    rows = [(group, answer) for group in groups for answer in group.answers]
    batch = laid_out([(_sample(group, answer),) for group, answer in rows], len(rows), width)
    behaviour = np.zeros((len(rows), width), np.float32)
    for number, (group, answer) in enumerate(rows):
        begin = len(group.prompt) - 1  # the last token of the prompt is where the first of the answer is a target
        behaviour[number, begin : begin + len(answer.ids)] = answer.log_probs
    rewards = np.array([answer.rewards for _, answer in rows], np.float32)
    versions = np.array([group.version for group, _ in rows], np.int64)
    return GroupBatch(
        batch,
        behaviour,
        rewards[:, 0] if rewards.shape[1] == 1 else rewards,
        np.array([group.number for group, _ in rows], np.int64),
        versions=versions,
        ages=version - versions,
    )


def _sample(group: Group, answer: Written) -> Sample:
    ids = (*group.prompt, *answer.ids)
    return Sample.of(ids, [False] * len(group.prompt) + [True] * len(answer.ids), group.place)


# As JSON ------------------------------------------------------------------------------------------------------------------


def group_to_json(group: Group) -> dict[str, Any]:
    answers = [
        {
            "ids": _packed(answer.ids, "<i4"),
            "log_probs": _packed(answer.log_probs, "<f4"),
            "text": answer.text,
            "finish": answer.finish,
            "rewards": list(answer.rewards),
        }
        for answer in group.answers
    ]
    prompt = _packed(group.prompt, "<i4")
    return {
        "number": group.number,
        "prompt": prompt,
        "version": group.version,
        "place": group.place,
        "answers": answers,
    }


def group_from_json(data: Mapping[str, Any]) -> Group:
    answers = tuple(
        Written(
            ids=tuple(_unpacked(one["ids"], "<i4")),
            log_probs=tuple(_unpacked(one["log_probs"], "<f4")),
            text=str(one["text"]),
            finish=str(one["finish"]),
            rewards=tuple(float(reward) for reward in one["rewards"]),
        )
        for one in data["answers"]
    )
    prompt = tuple(_unpacked(data["prompt"], "<i4"))
    return Group(int(data["number"]), prompt, answers, int(data["version"]), str(data["place"]))


def _packed(values: Sequence[float], kind: str) -> str:
    return base64.b64encode(np.array(values, kind).tobytes()).decode()


def _unpacked(text: str, kind: str) -> list[Any]:
    return np.frombuffer(base64.b64decode(text), kind).tolist()
