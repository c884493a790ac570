"""Two tasks, two adapters, one compressed base that nobody touches. For the `afm-2024` study.

The tasks are two spellings of the language: in capitals, and with every vowel moved on by one. Each adapter learns its own
beside the frozen base; then the base answers with one, with the other and with none in the same steps of one engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchard.core.batch import Batch
from orchard.core.report import Scalar, Value
from orchard.core.seeds import fold
from orchard.generate import Engine, Request
from orchard.models.language import Decoder
from orchard.objectives.lm import NextToken
from orchard.studies import _afm_ground as ground_
from orchard.studies._afm_engine import runner_of
from orchard.studies._afm_ground import Ground
from orchard.studies._afm_text import ids_of, language, tokenizer
from orchard.transforms.lora import Lora, freeze_base, sides_of, with_sides

TASKS = {"capitals": str.upper, "vowels": lambda text: text.translate(str.maketrans("aeiou", "eioua"))}


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """How long an adapter learns."""

    steps: int = 40
    rank: int = 16
    rate: float = 2e-3
    answers: int = 4
    answer: int = 48


def text_of(task: str, ground: Ground, count: int, seed: int, rows: int | None = None) -> Iterator[Batch]:
    """Batches of the language in a task's spelling."""
    rows = rows or ground.rows
    ids = ids_of(TASKS[task](language().text(fold(seed, "task", task), count * rows * ground.length + 1)))
    for place in range(count):
        start = place * rows * ground.length
        yield ground_.batch_of(ids[start : start + rows * ground.length + 1], rows, ground.length)


def measured(base: Decoder, ground: Ground, tasks: Tasks, seed: int) -> dict[str, Value | Scalar]:
    before, sides = ground_.checksum(base), {}
    values: dict[str, Value | Scalar] = {}
    worst = 0.0
    for task in TASKS:
        model = Lora(r=tasks.rank, alpha=2.0 * tasks.rank).attach(base)
        freeze_base(model)
        read, judged = text_of(task, ground, tasks.steps, fold(seed, "learn")), list(text_of(task, ground, 2, seed))
        was = ground_.loss_on(model, judged)
        ground_.learn(
            model,
            NextToken.Config().build(),
            read,
            tasks.steps,
            tasks.rate,
            seed=seed,
            title=f"adapter, {task}",
            decay=0.0,
        )
        now = ground_.loss_on(model, judged)
        worst = max(worst, now / was)
        values[f"task_loss_{task}"] = Value(now, "nats", note=f"the base alone: {was:.3f}")
        sides[task] = {path: [side] for path, side in sides_of(model).items()}
    numbers = {
        task: sum(a.size + b.size for found in each.values() for a, b, _ in found) for task, each in sides.items()
    }
    other = max(abs(not_shared(with_sides(base, sides[task]), base) - numbers[task]) for task in TASKS)
    different, extra = together(base, sides, tasks, seed)
    one = next(iter(numbers.values()))
    return values | {
        "adapter_bytes": Value(2 * one, "bytes", note=f"rank {tasks.rank} on every linear map, in half precision"),
        "base_bytes": Value(ground_.nbytes(base), "bytes"),
        "adapter_share": Value(2 * one / ground_.nbytes(base), "x", note="of the compressed base"),
        "swap_numbers_beyond_adapter": Value(other, note="that a switch brings besides A and B"),
        "swap_engine_bytes": extra,
        "swap_differences": Value(different, note="of answers with other adapters in the same steps, to answers alone"),
        "base_changed": int(ground_.checksum(base) != before),
        "task_loss_ratio": Value(worst, "x", note="to the base alone, the worse task"),
    }


def not_shared(model: Decoder, base: Decoder) -> int:
    """Numbers of a model that are not the base's own tensors."""

    def tensors(which: Decoder) -> Iterator[Any]:
        yield from which.parameters()
        yield from which.buffers()

    known = {each.data_ptr() for each in tensors(base) if each.numel()}
    return sum(each.numel() for each in tensors(model) if each.numel() and each.data_ptr() not in known)


def together(base: Decoder, sides: dict[str, Any], tasks: Tasks, seed: int) -> tuple[int, Value]:
    """Answers of one engine in which base and adapters take turns, against engines of one each; and the bytes of an adapter
    there."""
    runner = runner_of(base.cpu())
    if type(runner).__name__ != "NativeRunner":
        return 0, Value(None, "bytes", note="no native engine for this base")
    from orchard.generate.native import NativeRunner
    from orchard.ops.plan.adapt import adapted

    plan = runner.program.plan if hasattr(runner.program, "plan") else None
    plan = plan if plan is not None else _plan(base)
    plans = {task: adapted(plan, sides[task], {}, {}) for task in sides}
    for task, each in plans.items():
        runner.add_variant(task, NativeRunner(each))
    prompts = [tuple(ids_of(language().text(fold(seed, "ask", n), 16)).tolist()) for n in range(tasks.answers)]
    names = [None, *sides]
    asked = [(ids, name) for ids in prompts for name in names]
    mixed = Engine(runner, tokenizer(), prefix_bytes=0).answer(
        [Request(ids, max_tokens=tasks.answer, seed=0, adapter=name) for ids, name in asked]
    )
    alone = {name: Engine(NativeRunner(plans[name] if name else plan), tokenizer(), prefix_bytes=0) for name in names}
    single = [alone[name].answer([Request(ids, max_tokens=tasks.answer, seed=0)])[0] for ids, name in asked]
    known = {id(tensor) for tensor in plan.tensors.values()}
    extra = {
        task: sum(tensor.nbytes for tensor in each.tensors.values() if id(tensor) not in known)
        for task, each in plans.items()
    }
    different = sum(not np.array_equal(a.ids, b.ids) for a, b in zip(mixed, single, strict=True))
    return different, Value(
        max(extra.values()), "bytes", note="of new tensors in the engine's plan, the larger adapter"
    )


def _plan(base: Decoder) -> Any:
    from orchard.generate.lowering import lower

    return lower(base)
