"""Answers of the `sonata` study's model through the product's engine, in either mode, and how right and how long they are.

Shapes: N prompts, S answers to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchard.core.progress import progress
from orchard.core.seeds import fold
from orchard.generate import Engine, Request, Sampling
from orchard.generate.budget import Thinking, hidden_of
from orchard.generate.budget_predictor import SelfConsistency
from orchard.generate.request import Answer
from orchard.models.language import Decoder
from orchard.studies import _sonata_tasks as tasks
from orchard.text.loaded import Loaded
from orchard.text.tokenizer import Tokenizer

SAMPLING = Sampling(temperature=0.6, top_p=0.95)
MOST = 96
"""Thoughts that an answer may have: more than the longest right ones."""
TOGETHER = 512
"""Requests of one call."""
MARKS: dict[str, Any] = {"end": (tasks.CLOSE,), "begin": (tasks.THINK,), "skip": (tasks.DIRECT,)}
DIRECT = Thinking(**MARKS, most=0)
THINK = Thinking(**MARKS, most=MOST)


@dataclass(frozen=True)
class Outcome:
    """`right` and `tokens` (all that were written, the end too) and `skipped` (no thoughts), [N, S] each."""

    right: np.ndarray
    tokens: np.ndarray
    skipped: np.ndarray


def gated(predictor: SelfConsistency) -> Thinking:
    """Each prompt as its predictor says."""
    return Thinking(**MARKS, most=MOST, predictor=predictor)


def hidden(engine: Engine, problems: Sequence[tasks.Problems]) -> np.ndarray:
    """What the engine shows a predictor: [N, dim]."""
    return hidden_of(engine.model, [ids for each in problems for ids in each.prompt.tolist()])


def engine_of(model: Decoder) -> Engine:
    """On the native engine where there is one, otherwise in torch."""
    from orchard.ops.kernels.native import library

    if library() is None:
        return Engine(model, tokenizer(), prefix_bytes=0)
    from orchard.generate.lowering import lower
    from orchard.generate.native import NativeRunner

    return Engine(NativeRunner(lower(model.cpu())), tokenizer(), prefix_bytes=0)


def tokenizer() -> Tokenizer:
    """One token for each of `tasks.WORDS`."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    plain = [word for word in tasks.WORDS if len(word) == 1]
    backend = Backend(models.BPE(vocab={word: place for place, word in enumerate(plain)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True) for word in tasks.WORDS[len(plain) :]])
    return Tokenizer(
        Loaded(
            backend=backend,
            vocab_size=len(tasks.WORDS),
            control_ids=frozenset(range(len(plain), len(tasks.WORDS))),
            bos_id=None,
            eos_id=tasks.END,
            eos_ids=frozenset({tasks.END}),
            add_bos=False,
            chat_template=None,
        )
    )


def outcomes(
    engine: Engine, problems: Sequence[tasks.Problems], thinking: Thinking, samples: int, seed: int, title: str
) -> Outcome:
    """Answer every prompt `samples` times; the same seed gives the same answers, whatever else is asked."""
    prompts = [tuple(ids) for each in problems for ids in each.prompt.tolist()]
    wanted = [tuple(ids) for each in problems for ids in each.answer.tolist()]
    asked = [(place, sample) for place in range(len(prompts)) for sample in range(samples)]
    found: list[Answer] = []
    with progress(title, total=len(asked)) as advance:
        for start in range(0, len(asked), TOGETHER):
            part = asked[start : start + TOGETHER]
            found += engine.answer(
                [
                    Request(
                        prompts[place],
                        max_tokens=MOST + 32,
                        sampling=SAMPLING,
                        seed=fold(seed, place, sample),
                        thinking=thinking,
                    )
                    for place, sample in part
                ]
            )
            advance(len(part))
    right = [_right(answer, wanted[place]) for (place, _), answer in zip(asked, found, strict=True)]
    shape = (len(prompts), samples)
    return Outcome(
        np.array(right, bool).reshape(shape),
        np.array([len(answer.ids) + 1 for answer in found], np.int64).reshape(shape),
        np.array([answer.ids[:1] == (tasks.DIRECT,) for answer in found], bool).reshape(shape),
    )


def _right(answer: Answer, wanted: tuple[int, ...]) -> bool:
    """Whether what stands after the thoughts, or after the mark that skips them, is the answer and nothing else."""
    marks = [place for place, token in enumerate(answer.ids) if token in (tasks.CLOSE, tasks.DIRECT)]
    return answer.finish == "stop" and bool(marks) and answer.ids[marks[0] + 1 :] == wanted
