"""What a draft model learns from: samples of tokens in one file, most of them written by the model that it will guess for.

A draft is right when it says what the model would have said, so the best text for it is the model's own: answers to the user's
prompts, and answers to prompts that the model itself makes up, which takes nothing but the beginning of its chat template
(Magpie, arXiv 2406.08464). Answers are kept as the ids that were written: a text is not always cut into the same tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import BadFile, UsageError
from orchard.core.progress import progress
from orchard.core.seeds import fold
from orchard.data.order import Permutation
from orchard.data.source import Sample, Stage, State
from orchard.generate.constraint import Constraint
from orchard.generate.request import Request, Sampling
from orchard.text.chat import chat_ids
from orchard.text.tokenizer import Tokenizer
from orchard.weights.safetensors import SafetensorsFile, write_safetensors

if TYPE_CHECKING:
    from orchard.generate.engine import Engine
    from orchard.session.model import Model

TOGETHER = 512
"""Requests that the engine is given at a time."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """A prompt for the model to answer: by its likeliest tokens, or drawn at a temperature; freely, or held to a form."""

    ids: tuple[int, ...]
    temperature: float = 0.0
    constraint: Constraint | None = None
    known: int = 0
    """Tokens at its beginning that are always the same, so that nothing is to be learnt from them."""


class SampleFile(Stage[Sample]):
    """The samples of a file that `write_samples` wrote, in another order in every epoch."""

    @config
    class Config(BaseConfig):
        path: str = REQUIRED
        seed: int = 0

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        self._ids, self._learnt, self._ends = _read(Path(cfg.path))
        super().__init__(seed=cfg.seed, samples=len(self._ends), tokens=len(self._ids))
        self.cfg = cfg
        self._reset(0)

    def __next__(self) -> Sample:
        if self._given >= len(self._ends):
            raise StopIteration
        number = self._order[self._given]
        self._given += 1
        start = int(self._ends[number - 1]) if number else 0
        part = slice(start, int(self._ends[number]))
        return Sample(self._ids[part], self._learnt[part], f"{Path(self.cfg.path).name}:{number + 1}")

    def _own(self) -> State:
        return {"epoch": self._epoch, "given": self._given}

    def _take(self, state: Mapping[str, Any]) -> None:
        self._reset(int(state["epoch"]))
        self._given = int(state["given"])

    def _reset(self, epoch: int) -> None:
        self._epoch, self._given = epoch, 0
        self._order = Permutation(len(self._ends), self.cfg.seed, "samples", epoch)


def write_samples(path: Path, samples: Sequence[Sample], facts: Mapping[str, str] | None = None) -> None:
    """All samples as three arrays: ids, which of them are learnt, and where each sample ends."""
    if not samples:
        raise UsageError("there is no text for a draft to learn from", hint="give rows or prompts")
    ends = np.cumsum([len(sample.ids) for sample in samples])
    tensors = {
        "ids": torch.from_numpy(np.concatenate([sample.ids for sample in samples]).astype(np.int32)),
        "learnt": torch.from_numpy(np.concatenate([sample.learnt for sample in samples]).astype(np.uint8)),
        "ends": torch.from_numpy(ends.astype(np.int64)),
    }
    write_safetensors(path, tensors, facts or {})


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with SafetensorsFile.open(path) as file:
        try:
            ids, learnt, ends = (file.read(name).clone().numpy() for name in ("ids", "learnt", "ends"))
        except (KeyError, UsageError) as error:
            raise BadFile(f"{path} holds no samples", hint="make it again") from error
    sound = ids.ndim == learnt.ndim == ends.ndim == 1 and len(ids) == len(learnt) and len(ends) > 0
    if not sound or int(ends[-1]) != len(ids) or (np.diff(ends, prepend=0) < 1).any():
        raise BadFile(f"the samples of {path} do not add up", hint="make it again")
    return ids, learnt.astype(np.bool_), ends


# What the model writes ----------------------------------------------------------------------------------------------------


def answered(
    model: Model,
    asked: Sequence[Asked],
    *,
    max_tokens: int,
    seed: int = 0,
    prompts: bool = False,
    say: str = "",
    engine: Engine | None = None,
) -> list[Sample]:
    """What the model says to each prompt, as samples; `prompts`: what is asked is learnt too. Answers that broke are left out.
    `engine`: another than the model's own, with more slots, say."""
    engine, samples = engine or model.engine, []
    with progress(say or "writing text for the draft", total=len(asked), unit="answers") as advance:
        for start in range(0, len(asked), TOGETHER):
            part = asked[start : start + TOGETHER]
            requests = [
                Request(
                    one.ids,
                    max_tokens=max_tokens,
                    sampling=Sampling(temperature=one.temperature),
                    constraint=one.constraint,
                    seed=fold(seed, "answer", start + place) % 2**31,
                )
                for place, one in enumerate(part)
            ]
            for one, answer in zip(part, engine.answer(requests), strict=True):
                if answer.finish in ("stop", "length") and answer.ids:
                    # Under a constraint the answer may have ended because nothing else could follow.
                    ended = answer.finish == "stop" and one.constraint is None
                    samples.append(_sample(model.tokenizer, one, answer.ids, ended, prompts))
            advance(len(part))
    return samples


def _sample(tokenizer: Tokenizer, one: Asked, answer: Sequence[int], ended: bool, prompts: bool) -> Sample:
    end = [tokenizer.eos_id] if ended and tokenizer.eos_id is not None else []
    read = [prompts and place >= one.known for place in range(len(one.ids))]
    return Sample.of([*one.ids, *answer, *end], [*read, *([True] * (len(answer) + len(end)))])


def invented(
    model: Model,
    count: int,
    *,
    system: str | None = None,
    max_tokens: int = 160,
    seed: int = 0,
    temperature: float = 1.0,
    engine: Engine | None = None,
) -> list[Asked]:
    """Prompts that the model makes up: it is given the beginning of a user's turn and goes on. Those that it does not end, and
    those that it has said before, are left out, so there may be fewer than `count`."""
    tokenizer = model.tokenizer
    first = [{"role": "system", "content": system}] if system is not None else []
    before = _user_turn(tokenizer, first)
    made = answered(
        model,
        [Asked(tuple(before), temperature)] * count,
        max_tokens=max_tokens,
        seed=fold(seed, "invented"),
        say="making up prompts",
        engine=engine,
    )
    found: dict[tuple[int, ...], Asked] = {}
    for sample in made:
        words = sample.ids[len(before) :].tolist()
        if (
            len(words) < 3
            or words[-1] != tokenizer.eos_id
            or any(i in tokenizer.control_tokens.values() for i in words[:-1])
        ):
            continue
        text = tokenizer.decode(words[:-1]).strip()
        if text:
            ids = tuple(chat_ids(tokenizer, [*first, {"role": "user", "content": text}]))
            found.setdefault(ids, Asked(ids, known=len(before)))
    return list(found.values())


def _user_turn(tokenizer: Tokenizer, first: Sequence[Mapping[str, str]]) -> list[int]:
    """The ids of a conversation up to where the user's words begin."""
    one, other = (chat_ids(tokenizer, [*first, {"role": "user", "content": text}]) for text in ("0 words", "? others"))
    same = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    if not same or tokenizer.chat_template is None:
        raise UsageError(
            "this model has no chat template, so it makes up no prompts", hint="give rows or prompts of your own"
        )
    return one[:same]


def prompts_of(samples: Sequence[Sample]) -> list[Asked]:
    """The prompt of each sample's last answer: what stood before the tokens that are learnt last."""
    found: dict[tuple[int, ...], Asked] = {}
    for sample in samples:
        learnt = np.flatnonzero(sample.learnt)
        if not len(learnt):
            continue
        breaks = np.flatnonzero(np.diff(learnt) > 1)
        start = int(learnt[breaks[-1] + 1] if len(breaks) else learnt[0])
        if start > 1:  # a text that is learnt from its second token on has no prompt
            ids = tuple(sample.ids[:start].tolist())
            found.setdefault(ids, Asked(ids))
    return list(found.values())


def at(asked: Sequence[Asked], temperature: float) -> list[Asked]:
    """The same prompts, answered at another temperature."""
    return [replace(one, temperature=temperature) for one in asked]
