"""A mixture of 64 experts, all of them multiplied at once against a loop over experts.

The whole layer is timed: routing, sorting, the experts, adding up. The two forms take turns on the same tokens, so that whatever
else the machine does hits them alike, and time is processor time of one thread: what other programs take does not count. Shapes
are SmolLM2's width with its MLP cut into eighths, and half of OLMoE's (arXiv 2409.02060); every token meets 8 experts of 64. Each
figure is the median over rounds with its quartiles. What both compute is compared first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from orchard.core.context import Context
from orchard.core.report import Bound, Claim, Report, Value
from orchard.nn.moe import MoE, Own, TopK
from orchard.ops.kernels import native

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "results" / "bench" / "moe-dispatch.json"
EXPERTS, CHOSEN = 64, 8
SHAPES = {"576 × 192": (576, 192), "1024 × 512": (1024, 512)}
TOKENS = (1, 16, 64, 256)
TRAINED = 64
"""Tokens of a step of training."""
CLAIMS = [
    Claim(
        f"{shape}, {tokens} tokens",
        f"64 experts of {shape} on {tokens} tokens: all at once at least twice as fast as a loop over experts",
        f"{shape}, {tokens} tokens: speed",
        Bound(">=", 2.0),
        baseline=f"{shape}, {tokens} tokens: loop",
    )
    for shape in SHAPES
    for tokens in (16, 64)
]
CLAIMS.append(Claim("same", "Both compute the same, to rounding", "largest difference", Bound("<=", 1e-4)))


class Looped(Own):
    """Experts one after another."""

    def run(self, tokens: Tensor, counts: Tensor, context: Context) -> Tensor:
        return self.loop(tokens, counts)


def mixture(dim: int, hidden: int, dtype: torch.dtype) -> MoE:
    torch.manual_seed(0)
    made: MoE = MoE.Config(dim=dim, hidden_dim=hidden, experts=EXPERTS, router=TopK.Config(k=CHOSEN)).build()
    made.router.gate.assign(torch.randn(EXPERTS, dim) * dim**-0.5)
    return made.to(dtype)


def forms(layer: MoE, x: Tensor, *, learn: bool) -> dict[str, Callable[[], Tensor]]:
    def call(experts: Any) -> Tensor:
        layer.experts = experts
        out: Tensor = layer(x, Context.whole(x[..., 0]))
        if learn:
            out.float().square().sum().backward()
            layer.zero_grad(set_to_none=True)
        return out.detach()

    loop = Looped(layer.gate, layer.up, layer.down, layer.act)
    return {"at once": lambda: call(None), "loop": lambda: call(loop)}


def measure(calls: dict[str, Callable[[], Tensor]], rounds: int, least: float) -> dict[str, list[float]]:
    """Milliseconds of each form in every round, after one that is not counted; short calls are repeated up to `least` seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            started, many = time.thread_time(), 0
            while not many or time.thread_time() - started < least:
                call()
                many += 1
            if number:
                times[name].append(1000 * (time.thread_time() - started) / many)
    return times


def summary(times: list[float], unit: str) -> Value:
    low, middle, high = statistics.quantiles(times, n=4)
    return Value(round(middle, 3), unit=unit, low=round(low, 3), high=round(high, 3), note="median, quartiles")


def case(name: str, calls: dict[str, Callable[[], Tensor]], rounds: int, least: float) -> dict[str, Value]:
    times = measure(calls, rounds, least)
    ratios = [slow / fast for slow, fast in zip(times["loop"], times["at once"], strict=True)]
    found = {f"{name}: {form}": summary(values, "ms") for form, values in times.items()}
    return {**found, f"{name}: speed": summary(ratios, "x")}


def run(rounds: int, least: float) -> dict[str, Value]:
    values: dict[str, Value] = {}
    away = 0.0
    for shape, (dim, hidden) in SHAPES.items():
        layer = mixture(dim, hidden, torch.float32)
        for tokens in TOKENS:
            x = torch.randn(1, tokens, dim)
            with torch.no_grad():
                calls = forms(layer, x, learn=False)
                both = [call() for call in calls.values()]
                away = max(away, float((both[0] - both[1]).abs().max()))
                values |= case(f"{shape}, {tokens} tokens", calls, rounds, least)
    dim, hidden = SHAPES["576 × 192"]
    layer, x = mixture(dim, hidden, torch.float32), torch.randn(1, TRAINED, dim)
    values |= case(f"576 × 192, {TRAINED} tokens, forward and back", forms(layer, x, learn=True), rounds, least)
    values["largest difference"] = Value(away, note="of results, float32, over all shapes")
    return values


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="how often each form runs (default: 11)")
    parser.add_argument("--least", type=float, default=0.05, help="seconds that a form runs in a round (default: 0.05)")
    parser.add_argument("--out", type=Path, default=TARGET, help="where the Report goes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started = time.perf_counter()
    values = run(max(options.rounds, 2), options.least)
    kernel = "the native kernel" if native.library() is not None else f"torch alone: {native.why_not()}"
    report = Report.record(
        "bench",
        "moe-dispatch",
        values=values,
        claims=CLAIMS,
        notes=[
            f"Processor time of one thread. All at once: {kernel}. The loop: one product a map and expert, by torch.",
            "No claim is made for 1 token, where both wait for the memory that weights come from, and for 256 tokens, where each "
            "expert has enough rows for torch's own product to be good.",
        ],
        wall_time=round(time.perf_counter() - started, 3),
    )
    report.save(options.out)
    Console().print(report.table())
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
