"""Decoding on a GPU: one sequence and 256 of them, weights in bfloat16 and in 4 bits, beside the memory's own speed.

Weights are random: speed does not depend on them. A step is timed from the first new token to the last, and its share of
bandwidth is the bytes of weights and of keys and values that it must read, over its time, beside what a large copy and a large
sum reach on this device. The same beside transformers is `bench/gpu.py`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from orchard.bench.shapes import Shape, random_plan
from orchard.core.report import Value
from orchard.generate.protocol import Work
from orchard.generate.steps import BURST
from orchard.ops.plan import steps

if TYPE_CHECKING:
    from torch import Tensor

    from orchard.generate.cuda.runner import CudaRunner

SHAPES = {
    "135M": Shape(layers=30, width=576, hidden=1536, heads=9, kv_heads=3, head=64, context=2048),
    "1B": Shape(context=2048),
}
KINDS = ("bf16", "q4")
BATCHES = {1: 192, 256: 96}
"""Sequences, and the tokens of each."""
PROMPT = 64


def measure(rounds: int) -> dict[str, Any] | None:
    """Tokens per second of every case, and what the memory gives; None without a GPU that can be used."""
    import torch

    if not torch.cuda.is_available():
        return None
    speeds = bandwidth()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "bandwidth": speeds, "cases": {}}
    for name, shape in SHAPES.items():
        for kind in KINDS:
            runner = random_runner(shape, kind)
            for batch, count in BATCHES.items():
                slots = runner.slots(batch, kv_bytes=batch * (PROMPT + count + 64) * shape.kv_bytes)
                prompts = torch.randint(0, shape.vocab, (batch, PROMPT), device="cuda")
                seconds = [our_seconds(slots, prompts, count) for _ in range(rounds + 1)][1:]
                case: dict[str, Any] = {"rates": [batch / taken for taken in seconds]}
                case["share"] = share(shape, runner, batch, count, statistics.median(seconds), max(speeds.values()))
                found["cases"][f"gpu {name} {kind} batch {batch}"] = case
                del slots
            del runner
            torch.cuda.empty_cache()
    return found


def values(found: dict[str, Any]) -> dict[str, Value]:
    made = {
        f"gpu bandwidth, {way}": Value(rate, "B/s", note=found["device"]) for way, rate in found["bandwidth"].items()
    }
    for name, case in found["cases"].items():
        rates = case["rates"]
        made[name] = Value(statistics.median(rates), "tokens/s", low=min(rates), high=max(rates))
        made[f"{name} share"] = Value(case["share"], note="of the measured bandwidth")
    return made


def share(shape: Shape, runner: CudaRunner, batch: int, count: int, seconds: float, best: float) -> float:
    """The part of the memory's speed that a step of so many seconds uses."""
    kept = batch * (PROMPT + count / 2) * shape.kv_bytes
    return (runner.program(None).weight_bytes + kept) / seconds / best


# Models -----------------------------------------------------------------------------------------------------------------


def random_runner(shape: Shape, kind: str) -> CudaRunner:
    import torch

    from orchard.generate.cuda.runner import CudaRunner
    from orchard.ops.kernels.triton.weights import dense, rounded

    plan = plan_of(shape, kind)
    names = [(f"{layer}.{name}", rows, cols) for layer in range(shape.layers) for name, rows, cols in shape.matrices()]
    made = {}
    torch.manual_seed(0)
    for name, rows, cols in [("table", shape.vocab, shape.width), *names]:
        values = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) / math.sqrt(cols)
        made[name] = dense(values, "bf16") if kind == "bf16" else rounded(values, kind, 64)
    return CudaRunner(plan, weights=made)


def plan_of(shape: Shape, kind: str) -> steps.Plan:
    """The plan of a shape whose matrices are of that kind; its own tensors are not to be used."""
    plan = random_plan(shape, "q4")
    return replace(plan, steps=[with_kind(step, kind) for step in plan.steps])


def with_kind(step: steps.Step, kind: str) -> steps.Step:
    """A step whose matrices are of that kind."""

    def of(matrix: steps.Matrix) -> steps.Matrix:
        return replace(matrix, kind=kind, group=1 if kind == "bf16" else 64)

    if isinstance(step, steps.Linear):
        return replace(step, outputs=tuple(replace(output, matrix=of(output.matrix)) for output in step.outputs))
    if isinstance(step, steps.Gated):
        return replace(step, gate=of(step.gate), up=of(step.up))
    if isinstance(step, steps.Embed | steps.Head):
        return replace(step, matrix=of(step.matrix))
    return step


# Times ------------------------------------------------------------------------------------------------------------------


def our_seconds(slots: Any, prompts: Tensor, tokens: int, *, scores: bool = False, burst: int = BURST) -> float:
    """Seconds of a step: tokens chosen on the device, `burst` of each sequence in one go, or (`scores`) one by one by numpy from
    scores on the CPU."""
    import torch

    batch = prompts.tolist()
    for slot, prompt in enumerate(batch):
        slots.open(slot, len(prompt) + tokens)
    works = [Work(slot, prompt, 1, True) for slot, prompt in enumerate(batch)]
    best = [token for at in range(0, len(works), 8) for token in slots.greedy(works[at : at + 8])]
    torch.cuda.synchronize()
    begun = time.perf_counter()
    steps_done = 0
    while steps_done + burst < tokens:
        works = [Work(slot, [token], 1) for slot, token in enumerate(best)]
        if burst > 1:
            best = [chosen[-1] for chosen in slots.greedy_many(works, burst)]
        else:
            best = [int(rows[-1].argmax()) for rows in slots.run(works)] if scores else slots.greedy(works)
        steps_done += burst
    torch.cuda.synchronize()
    taken = time.perf_counter() - begun
    for slot in range(len(batch)):
        slots.close(slot)
    return taken / steps_done


def bandwidth() -> dict[str, float]:
    """Bytes per second of a large copy (read and written) and of a large sum (read)."""
    import torch

    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    return {
        "copy": 2 * source.nbytes / device_seconds(lambda: target.copy_(source)),
        "sum": source.nbytes / device_seconds(lambda: source.sum()),
    }


def device_seconds(run: Callable[[], Any], times: int = 10) -> float:
    import torch

    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3
