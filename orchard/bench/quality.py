"""What speed costs in answers: the engine's scores beside those of a float32 reading of the same file, token by token.

Each text is read as it stands (teacher forcing), so one wrong choice does not spoil the rest. The engine has two ways to the same
scores, one token at a time and many at once, and both are compared. Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.errors import UsageError

if TYPE_CHECKING:
    from orchard.models.language.decoder import Decoder
    from orchard.ops.plan.steps import Plan
    from orchard.weights.checkpoint import Checkpoint

Scores = Callable[[Sequence[int]], np.ndarray]
LOSSLESS = ("Q4_1", "Q8_0")
"""Types of a GGUF file that a packed file keeps bit for bit."""


@dataclass(frozen=True)
class Agreement:
    """Over some tokens: how often the best token is the same, and the divergence (sums, so that texts add up)."""

    tokens: int = 0
    same: int = 0
    divergence: float = 0.0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.tokens + other.tokens, self.same + other.same, self.divergence + other.divergence)

    @property
    def share(self) -> float:
        return self.same / self.tokens

    @property
    def nats(self) -> float:
        """Mean Kullback-Leibler divergence per token."""
        return self.divergence / self.tokens


def compare(reference: np.ndarray, ours: np.ndarray) -> Agreement:
    """Two tables of scores [T, V] for the same text."""
    if reference.shape != ours.shape or reference.ndim != 2 or not reference.size:
        raise UsageError(
            f"scores of shapes {reference.shape} and {ours.shape}", hint="compare tables [T, V] of one text"
        )
    same = int((reference.argmax(-1) == ours.argmax(-1)).sum())
    divergence = 0.0
    for one, other in zip(reference, ours, strict=True):  # a row at a time: float64 of a whole text would be large
        true, got = _log_softmax(one), _log_softmax(other)
        divergence += float(np.exp(true) @ (true - got))
    return Agreement(len(reference), same, divergence)


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores.astype(np.float64) - scores.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result


def step_scores(runner: Any, ids: Sequence[int]) -> np.ndarray:
    """Scores after every token, each token being a step of its own."""
    run = runner.begin([list(ids[:1])], length=len(ids))
    run.read(0, 1)
    rows = [np.array(run.first()[0], np.float32)]  # copies: a runner may write the next scores into the same memory
    rows += [np.array(run.step([token])[0], np.float32) for token in ids[1:]]
    return np.stack(rows)


def prefill_scores(runner: Any, ids: Sequence[int]) -> np.ndarray:
    """Scores after every token, all tokens being read at once."""
    scores: np.ndarray = runner.scores(list(ids))
    return scores


def agreement(reference: Scores, ours: Scores, texts: Iterable[Sequence[int]]) -> Agreement:
    return sum((compare(reference(ids), ours(ids)) for ids in texts), Agreement())


def matrices_lost(checkpoint: Checkpoint, tree: Decoder.Config, plan: Plan) -> list[str]:
    """Matrices of the file, of a type that is kept whole, whose values are nowhere in the plan bit for bit."""
    from orchard.nn.tensors import tensor_shapes

    kept = {_digest(values) for values in _plan_matrices(plan)}
    lost = []
    for name in tensor_shapes(tree):
        info = checkpoint.source.tensors.get(checkpoint.name(name, tree))
        if getattr(getattr(info, "type", None), "name", None) not in LOSSLESS:
            continue
        if _digest(checkpoint.read(name, tree).float().numpy()) not in kept:
            lost.append(name)
    return lost


def _digest(values: np.ndarray) -> bytes:
    return sha256(repr(values.shape).encode() + np.ascontiguousarray(values, np.float32).tobytes()).digest()


def _plan_matrices(plan: Plan) -> Iterable[np.ndarray]:
    from dataclasses import fields, is_dataclass

    from orchard.ops.kernels.packing import values
    from orchard.ops.plan.steps import Matrix

    def inside(thing: Any) -> Iterable[Matrix]:
        if isinstance(thing, Matrix):
            yield thing
        elif isinstance(thing, tuple):
            for item in thing:
                yield from inside(item)
        elif is_dataclass(thing):
            for field in fields(thing):
                yield from inside(getattr(thing, field.name))

    for matrix in {matrix.tensor: matrix for step in plan.steps for matrix in inside(step)}.values():
        if matrix.count == 1:
            sizes = (matrix.rows, matrix.cols, matrix.group, matrix.minimum)
            yield values(plan.tensors[matrix.tensor], matrix.kind, *sizes)


def measure(name: str, *, texts: int, threads: int) -> dict[str, Any]:
    """All of it for one model: agreement and divergence of both ways, and what repacking lost."""
    import torch

    from orchard.bench.texts import TEXTS
    from orchard.session.model import load
    from orchard.weights.checkpoint import open_checkpoint
    from orchard.weights.library import Library
    from orchard.weights.load import load_decoder

    torch.set_num_threads(threads)
    model = load(name)
    runner: Any = model.runner
    ids = [model.tokenizer.encode(text) for text in TEXTS[:texts]]
    result: dict[str, Any] = {"tokens": sum(map(len, ids)), "texts": len(ids)}
    with open_checkpoint(Library().resolve(name)) as checkpoint:
        tree = checkpoint.config()
        decoder = load_decoder(checkpoint, tree, dtype=torch.float32, device=torch.device("cpu"))

        @torch.inference_mode()
        def reference(text: Sequence[int]) -> np.ndarray:
            scores: np.ndarray = decoder(torch.tensor([list(text)])).float()[0].numpy()
            return scores

        true = [reference(text) for text in ids]
        ways = {"decode": step_scores} | ({"prefill": prefill_scores} if hasattr(runner, "scores") else {})
        for way, scores in ways.items():
            found = sum((compare(one, scores(runner, text)) for one, text in zip(true, ids, strict=True)), Agreement())
            result[way] = {"agreement": found.share, "nats": found.nats}
        plan = getattr(runner, "plan", None)
        if plan is not None:
            result["lost"] = matrices_lost(checkpoint, tree, plan)
    return result
