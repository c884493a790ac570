"""Decoding on one GPU beside transformers: one sequence and 256 of them, weights in bfloat16 and in 4 bits.

Two shapes with random weights, the same in both programs: SmolLM2's (135M) and one of a billion. transformers runs `generate`
in bfloat16 with a static cache, which compiles its forward pass into CUDA graphs by itself; ours runs `CudaSlots.greedy_many`,
eight steps at a time, as the engine does for greedy requests. Both choose greedily, in one process, by turns. The time counted
is that from the first new token to the last, so that reading the prompt and compiling are left out. The share of bandwidth is
the bytes of weights and of keys and values that a step must read, over its time, beside what a large copy and a large sum
reach on this device.

Before anything is timed, scores of both are compared on the same tokens.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llama_peer import random_llama

from orchard.bench.gpu import BATCHES, KINDS, PROMPT, SHAPES, bandwidth, our_seconds, plan_of, share
from orchard.bench.shapes import Shape
from orchard.core.report import Bound, Claim, Report, Value
from orchard.generate.cuda.runner import CudaRunner
from orchard.generate.protocol import Work
from orchard.ops.kernels.triton.weights import Weight, dense, rounded

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "results" / "bench" / "gpu.json"
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def claims() -> list[Claim]:
    found = []
    for shape in SHAPES:
        for kind in KINDS:
            for batch, least in ((1, 3.0), (256, 2.0)):
                name = f"{shape} {kind} batch {batch}"
                words = f"{name}: at least {least:g} × the tokens per second of transformers"
                found.append(Claim(name, words, f"{name} ratio", Bound(">=", least)))
    words = "1B bf16 batch 1: at least half of the measured bandwidth"
    return [*found, Claim("bandwidth", words, "1B bf16 batch 1 share", Bound(">=", 0.5))]


# The two programs -------------------------------------------------------------------------------------------------------


def peer(shape: Shape) -> Any:
    """A Llama of transformers with random weights, in bfloat16 on the device."""
    with torch.device("cuda"):
        model: Any = random_llama(shape, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return model.to(dtype=torch.bfloat16).eval()


def ours(shape: Shape, kind: str, model: Any) -> CudaRunner:
    """The same weights behind a plan of that kind."""
    plan = plan_of(shape, kind)
    named = {"table": model.model.embed_tokens.weight}
    for layer, block in enumerate(model.model.layers):
        for name, path in PARTS.items():
            named[f"{layer}.{name}"] = block.get_submodule(path).weight
    made: dict[str, Weight] = {}
    for name, tensor in named.items():
        values = tensor.detach()
        made[name] = dense(values, "bf16") if kind == "bf16" else rounded(values, kind, 64)
    return CudaRunner(plan, weights=made)


# Times ------------------------------------------------------------------------------------------------------------------


class Ticks:
    """A stopping criterion that stops nothing and notes when it was asked: once for every new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


def peer_seconds(model: Any, prompts: torch.Tensor, tokens: int, **options: Any) -> float:
    """Seconds of a step of `generate`."""
    ticks = Ticks()
    with torch.inference_mode():
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=[ticks],
            **options,
        )
    torch.cuda.synchronize()
    end = time.perf_counter()
    assert len(ticks.times) == tokens, f"{len(ticks.times)} tokens instead of {tokens}"
    return (end - ticks.times[0]) / (tokens - 1)


def compare(runner: CudaRunner, model: Any) -> dict[str, float]:
    """How far scores are from those in float32, of tokens that are read as a prompt, one by one, and eight at once; and how
    far those of transformers are."""
    ids = torch.randint(0, runner.plan.vocab, (2, 150), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    exact = copy.deepcopy(model).float()
    with torch.inference_mode():
        wanted, theirs = (one(ids).logits[:, -8:].float().cpu().numpy() for one in (exact, model))
    del exact
    slots = runner.slots(4, kv_bytes=1 << 28)
    for slot in range(3):
        slots.open(slot, 160)
    rows = ids.tolist()
    read = slots.run([Work(slot, row, 8, True) for slot, row in enumerate(rows)])
    errors = {"prompt": distance(np.stack(read), wanted)}
    slots.run([Work(2, rows[0][:142], 0, True)])
    steps_of = [slots.run([Work(2, [token], 1)])[0][0].copy() for token in rows[0][142:]]
    errors["one by one"] = distance(np.stack(steps_of), wanted[0])
    slots.back(0, 142)
    slots.back(1, 142)
    together = slots.run([Work(slot, row[142:], 8) for slot, row in enumerate(rows)])
    errors["eight at once"] = distance(np.stack(together), wanted)
    errors["transformers"] = distance(theirs, wanted)
    return errors


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# The whole --------------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Seconds of a step, by round, of each program in one case."""

    rounds: dict[str, list[float]]

    def rate(self, name: str, batch: int) -> list[float]:
        return [batch / seconds for seconds in self.rounds[name]]


def measure(
    shape_name: str,
    batches: Sequence[int],
    rounds: int,
    tokens: dict[int, int],
    values: dict[str, Any],
    peers: bool,
    save: Callable[[], Any],
) -> None:
    """All cases of a shape; `save` is called after each, because compiling a peer takes long enough to be interrupted."""
    shape = SHAPES[shape_name]
    model = peer(shape)
    runners = {kind: ours(shape, kind, model) for kind in KINDS}
    for kind, runner in runners.items():
        if kind == "bf16":
            for name, error in compare(runner, model).items():
                say(f"{shape_name} {kind} {name}: scores are {error:.2e} from those in float32")
                values[f"{shape_name} {kind} difference, {name}"] = Value(
                    error, note="relative, to transformers in float32"
                )
                assert error < 0.05, "this is not the same computation"
    for batch in batches:
        prompts = torch.randint(0, shape.vocab, (batch, PROMPT), device="cuda")
        count = tokens[batch]
        found = Measured({name: [] for name in (*KINDS, "transformers")})
        slots = {
            kind: runner.slots(batch, kv_bytes=batch * (PROMPT + count + 64) * shape.kv_bytes)
            for kind, runner in runners.items()
        }
        for kind in runners:
            our_seconds(slots[kind], prompts, count)
        options = {"cache_implementation": "static"}
        if peers:
            begun = time.perf_counter()
            for _ in range(2):  # the first compiles, the second records
                peer_seconds(model, prompts, count, **options)
            say(f"{shape_name} batch {batch}: transformers was ready after {time.perf_counter() - begun:.0f} s")
        for _ in range(rounds):
            for kind in runners:
                found.rounds[kind].append(our_seconds(slots[kind], prompts, count))
            if peers:
                found.rounds["transformers"].append(peer_seconds(model, prompts, count, **options))
        record(shape_name, shape, batch, count, runners, found, values)
        for kind in runners:
            ways: tuple[tuple[str, dict[str, Any]], ...] = (
                ("one at a time", {"burst": 1}),
                ("scores on the CPU", {"burst": 1, "scores": True}),
            )
            for words, how in ways:
                rates = [batch / our_seconds(slots[kind], prompts, count, **how) for _ in range(rounds + 1)][1:]
                rate = Value(statistics.median(rates), unit="tokens/s", low=min(rates), high=max(rates))
                values[f"{shape_name} {kind} batch {batch}, {words}"] = rate
                say(f"{shape_name} {kind} batch {batch}, {words}: {rate.value:,.0f} tokens/s")
        save()
    del model, runners
    torch.cuda.empty_cache()


def record(
    shape_name: str,
    shape: Shape,
    batch: int,
    count: int,
    runners: dict[str, CudaRunner],
    found: Measured,
    values: dict[str, Any],
) -> None:
    best = 1e12 * max(float(values[f"bandwidth, {way}"].value) for way in ("copy", "sum"))
    for name in found.rounds:
        if not found.rounds[name]:
            continue
        rates = found.rate(name, batch)
        rate = statistics.median(rates)
        values[f"{shape_name} {name} batch {batch}"] = Value(rate, unit="tokens/s", low=min(rates), high=max(rates))
        line = f"{shape_name} {name} batch {batch}: {rate:,.0f} tokens/s ({1e3 * batch / rate:.3f} ms a step)"
        if name in runners:
            used = share(shape, runners[name], batch, count, batch / rate, best)
            values[f"{shape_name} {name} batch {batch} share"] = Value(used, note="of the measured bandwidth")
            line += f", {used:.0%} of bandwidth"
            if found.rounds["transformers"]:
                pairs = [b / a for a, b in zip(found.rounds[name], found.rounds["transformers"], strict=True)]
                ratio = Value(statistics.median(pairs), low=min(pairs), high=max(pairs))
                values[f"{shape_name} {name} batch {batch} ratio"] = ratio
                line += f", {ratio.value:.2f} × transformers"
        say(line)


def say(text: str) -> None:
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stderr.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="without transformers' times")
    parser.add_argument("--add", action="store_true", help="keep what an earlier run measured of other cases")
    parser.add_argument("--out", type=Path, default=TARGET, help="where the Report goes")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    begun = time.perf_counter()
    values: dict[str, Any] = dict(Report.load(options.out).values) if options.add and options.out.exists() else {}
    values |= {f"bandwidth, {way}": Value(rate / 1e12, "TB/s") for way, rate in bandwidth().items()}
    say(", ".join(f"{name}: {value.value:.2f} TB/s" for name, value in values.items() if name.startswith("bandwidth")))
    tokens = {batch: BATCHES.get(batch, 96) for batch in options.batches}

    def save() -> Report:
        report = Report.record(
            "bench",
            "gpu",
            values=values,
            claims=claims(),
            seed=0,
            series={"device": [torch.cuda.get_device_name()], "versions": versions()},
            wall_time=round(time.perf_counter() - begun, 3),
        )
        report.save(options.out)
        return report

    for shape in options.shapes:
        measure(shape, options.batches, options.rounds, tokens, values, not options.alone, save)
    report = save()
    for verdict in report.claims:
        say(f"{'passed' if verdict.passed else 'FAILED'}: {verdict.statement} ({verdict.value})")
    return int(not report.passed)


def versions() -> list[str]:
    import transformers
    import triton

    return [f"torch {torch.__version__}", f"triton {triton.__version__}", f"transformers {transformers.__version__}"]


if __name__ == "__main__":
    sys.exit(main())
