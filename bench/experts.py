"""A mixture of experts with a quarter of its experts in memory: how fast, how large, and are the answers the same?

Each way runs in a process of its own, and this one looks at its memory from outside (the peak that the system counted for it):

- whole: everything in memory;
- budget: a quarter of the experts' bytes, and everything as `experts_budget` has it: popular experts stay, the next layer's gates
  are read ahead, reads go out together;
- naive: load on demand: an expert is read when a token chose it, one after another, and nothing stays;
- layers: load on demand as offloading by modules does it: all experts of a layer are read when the layer runs, and nothing stays.

Reads go past the system's page cache (direct), so that a disk is a disk. The mixture, unless `--model` names one, is SmolLM2 with
every MLP copied 16 times, of which a token meets 2; the copies' scales are shaken a little, so that a wrong expert is seen in the
answer. Its routers are random (nobody trained them), which makes some experts popular: how popular is in the Report (`reuse` is
the share of a token's experts that the token before had chosen too).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from orchard.core.machine import hardware
from orchard.core.report import Bound, Claim, Report, Value
from orchard.weights.library import home

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "results" / "bench" / "experts.json"
WAYS = ("whole", "budget", "naive", "layers")
SHARE = 4
PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "List three uses of a paper clip and explain each.",
)
CLAIMS = [
    Claim(
        "speed",
        "A quarter of the experts in memory: 3 × the tokens per second of load on demand",
        "speed",
        Bound(">=", 3.0),
    ),
    Claim("layers", "And 3 × those of loading whole layers on demand", "speed over layers", Bound(">=", 3.0)),
    Claim("same", "Token for token, and score for score, what everything in memory gives", "same", Bound("==", 1)),
    Claim("memory", "Peak memory beyond the rest stays within 5 % of the budget", "memory", Bound("<=", 1.05)),
]


# The model ------------------------------------------------------------------------------------------------------------


def make_model(path: Path, base: str, experts: int, k: int) -> None:
    """Copies of each MLP, in the formats that the base's file has, with shaken scales and random routers."""
    import torch

    from orchard.core.seeds import generator
    from orchard.nn.linear import GroupedLinear
    from orchard.nn.moe import MoE, TopK
    from orchard.session.build import Built, build_stored
    from orchard.session.save import save_built
    from orchard.weights.library import Library

    source = Library().resolve(base)
    tokenizer, built = build_stored(source)
    dense, tree = built.decoder, built.decoder.config.clone()
    blocks: Any = tree.stack.layers
    for block in blocks:
        mlp = block.mlp
        parts: dict[str, Any] = {
            name: GroupedLinear.Config(format=getattr(mlp, name).format.clone()) for name in ("gate", "up", "down")
        }
        router = TopK.Config(k=k)
        block.mlp = MoE.Config(
            hidden_dim=mlp.hidden_dim, experts=experts, activation=mlp.activation, router=router, **parts
        )
    with torch.device("meta"):
        made = tree.build()
    names = dict(dense.named_parameters()) | dict(dense.named_buffers())
    for module_name, module in made.named_modules():
        for name in [*module._parameters, *module._buffers]:
            where = f"{module_name}.{name}".lstrip(".")
            old = names.get(where)
            if ".router." in where:
                value = torch.randn(experts, tree.dim, generator=generator(0, where)) * 0.02
            elif isinstance(module, GroupedLinear) and old is not None:
                value = old.detach()[None].repeat(experts, *[1] * old.ndim)
                if value.is_floating_point():
                    value = value * (1 + 0.02 * torch.randn(value.shape, generator=generator(0, where))).to(value.dtype)
            elif old is not None:
                value = old.detach()
            else:
                continue
            if name in module._parameters:
                module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
            else:
                module._buffers[name] = value
    save_built(Built(made.eval(), built.family, built.hf_config), tokenizer, source, path, None)


# A process for each way -----------------------------------------------------------------------------------------------


def worker(options: dict[str, Any]) -> None:
    """Answers prompts; says how long that took; waits to be looked at."""
    from orchard.generate.experts_open import ExpertsOptions
    from orchard.session.model import load

    given = options["experts"]
    model = load(options["model"], experts_budget=None if given is None else ExpertsOptions(**given), draft=False)
    if options["layers"] and model.experts is not None:
        _whole_layers(model.experts)
    model.generate(PROMPTS[0], max_tokens=2)  # what is taken at the first call only
    if model.experts is not None:
        model.experts.resident.counters.reset()
    ids, seconds = [], 0.0
    for prompt in PROMPTS:
        answer, times = [], []
        for piece in model.generate(prompt, max_tokens=options["tokens"], stream=True):
            times.append(time.perf_counter())
            answer += list(getattr(piece, "ids", ()))
        seconds += times[-1] - times[0]
        ids.append(answer)
    text = model.prompt_ids(PROMPTS[1])[:16]
    scores = model.runner.scores(text)  # type: ignore[attr-defined]
    counters = {} if model.experts is None else model.experts.resident.counters.to_dict()
    nbytes = 0 if model.experts is None else model.experts.resident.nbytes
    facts = {
        "ids": ids,
        "seconds": seconds,
        "sum": scores.tobytes().hex()[:4096],
        "counters": counters,
        "slots": nbytes,
    }
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()


def _whole_layers(program: Any) -> None:
    """Every expert of a layer is read when the layer runs."""
    chosen_only = program._layer

    def layer(number: int, place: int) -> None:
        program.resident.ensure(number, range(program.layers[number].gate.count))
        chosen_only(number, place)

    program._layer = layer


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """One process: what it says of itself, and its peak memory as the system says."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker died: {options}")
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = next(int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("VmHWM:"))
        process.stdin.write("\n")
        process.stdin.close()
        process.wait()
    return {**json.loads(line), "peak": peak}


# All of it ------------------------------------------------------------------------------------------------------------


def bench(model: str, rounds: int, tokens: int) -> Report:
    started = time.perf_counter()
    facts = _facts(model)
    record, total = facts["record"], facts["bytes"]
    budget = total // SHARE
    direct = {"direct": facts["direct"]}
    ways: dict[str, Any] = {
        "whole": None,
        "budget": {"budget": budget, **direct},
        "naive": {"budget": facts["k"] * record, "prefetch": "none", "readers": 0, **direct},
        "layers": {"budget": facts["experts"] * record, "policy": "fifo", "prefetch": "none", "readers": 0, **direct},
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name in WAYS:
            asked = {"model": model, "tokens": tokens, "experts": ways[name], "layers": name == "layers"}
            found[name].append(measure(asked))
    decoded = len(PROMPTS) * (tokens - 1)
    speeds = {name: [decoded / one["seconds"] for one in runs] for name, runs in found.items()}
    same = all(
        one["ids"] == found["whole"][0]["ids"] and one["sum"] == found["whole"][0]["sum"]
        for runs in found.values()
        for one in runs
    )
    peaks = {name: max(one["peak"] for one in runs) for name, runs in found.items()}
    # The rest is what the process takes without experts: that of load on demand, less its few slots.
    rest = min(one["peak"] for one in found["naive"]) - found["naive"][0]["slots"]
    ratios = [mine / its for mine, its in zip(speeds["budget"], speeds["naive"], strict=True)]
    counters = found["budget"][0]["counters"]
    values: dict[str, Any] = {
        "speed": _spread(ratios, "×"),
        "speed over layers": _spread([m / i for m, i in zip(speeds["budget"], speeds["layers"], strict=True)], "×"),
        "same": int(same),
        "memory": (peaks["budget"] - rest) / budget,
        "budget": Value(budget, "bytes"),
        "experts bytes": Value(total, "bytes"),
        "rest": Value(rest, "bytes"),
        "hit rate": counters["hit_rate"],
        "reads a token": counters["reads"] / max(counters["passes"], 1),
        "naive reads a token": found["naive"][0]["counters"]["reads"] / max(counters["passes"], 1),
        **{f"{name} tokens/s": _spread(numbers, "tokens/s") for name, numbers in speeds.items()},
        **{f"{name} peak": Value(peak, "bytes") for name, peak in peaks.items()},
    }
    values |= {f"experts {key}": value for key, value in facts["routing"].items()}
    return Report.record(
        "bench",
        "experts",
        values=values,
        claims=CLAIMS,
        reasons={} if statistics.median(ratios) >= 3 else {"speed": _why(facts["routing"], speeds)},
        config={"model": Path(model).name, "rounds": rounds, "tokens": tokens, "share": SHARE, **direct},
        notes=[
            "Ways take turns; a value is the median over the rounds with their lowest and highest.",
            "The routers are random unless --model names a trained mixture: see `experts reuse`.",
            f"{hardware()['cores']} cores; reads {'past' if facts['direct'] else 'through'} the system's page cache.",
        ],
        wall_time=round(time.perf_counter() - started, 3),
    )


def _facts(model: str) -> dict[str, Any]:
    """Sizes, and how the model chooses: from a process of its own, whose memory is not ours."""
    command = [sys.executable, str(Path(__file__).resolve()), "--facts", model]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def facts_of(model: str) -> dict[str, Any]:
    import numpy as np

    from orchard.cache.experts import Records
    from orchard.cache.experts.simulate import Replay
    from orchard.core.errors import UsageError
    from orchard.generate.experts_trace import Recorder
    from orchard.session.model import load

    loaded = load(model, experts_budget="100TB", draft=False)
    program = loaded.experts
    assert program is not None
    program.recorder = recorder = Recorder(program.layers, lookahead=1)
    loaded.generate(PROMPTS[1], max_tokens=48)
    trace = recorder.trace("model")
    chosen = trace.chosen
    reuse = np.mean((chosen[1:, :, :, None] == chosen[:-1, :, None, :]).any(-1))
    counts = np.stack([np.bincount(chosen[:, layer].ravel(), minlength=trace.experts) for layer in range(trace.layers)])
    top = np.sort(counts, 1)[:, ::-1][:, : trace.experts // SHARE].sum() / counts.sum()
    guessed = np.mean((chosen[..., None] == trace.ahead[:, :, 0, None, : trace.k]).any(-1))
    records = program.resident.records
    try:
        Records.open(records.path, direct=True).close()
        direct = True
    except UsageError:
        direct = False
    replay, capacity = Replay(trace), max(trace.layers * trace.experts // SHARE, trace.k)
    routing = {
        "reuse": float(reuse),
        "share of the popular quarter": float(top),
        "guessed one layer ahead": float(guessed),
        **{f"{name} hit rate": replay.run(name, capacity).counters.hit_rate for name in ("belady", "lfu-ahead", "lru")},
    }
    routing["oracle hit rate"] = routing.pop("belady hit rate")
    sizes = {"record": records.record_bytes, "bytes": records.nbytes, "k": trace.k, "experts": trace.experts}
    return {**sizes, "direct": direct, "routing": routing}


def _why(routing: dict[str, float], speeds: dict[str, list[float]]) -> str:
    ceiling = statistics.median(speeds["whole"]) / statistics.median(speeds["naive"])
    return (
        f"with everything in memory it is {ceiling:.2f} × load on demand on this machine, which no cache can pass; and load on "
        "demand reads only what was chosen, so a cache spares no more than that: at this budget the oracle, which knows the "
        f"future, still reads {1 - routing['oracle hit rate']:.0%} of it, and the policy that runs "
        f"{1 - routing['lfu-ahead hit rate']:.0%} (replay of the model's own trace, nothing read ahead)"
    )


def _spread(numbers: list[float], unit: str) -> Value:
    return Value(round(statistics.median(numbers), 4), unit, low=round(min(numbers), 4), high=round(max(numbers), 4))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a mixture; unless given, copies of SmolLM2's layers")
    parser.add_argument("--base", default="smollm2", help="whose layers are copied")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--save", action="store_true", help=f"write {TARGET.relative_to(ROOT)}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--facts", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    if options.facts:
        print(json.dumps(facts_of(options.facts)))
        return 0
    model = options.model
    if model is None:
        path = home() / "bench" / f"{options.base}-16-experts.orchard"
        if not path.is_file():
            make_model(path, options.base, experts=16, k=2)
        model = str(path)
    report = bench(model, options.rounds, options.tokens)
    from rich.console import Console

    Console().print(report.table())
    if options.save:
        report.save(TARGET)
    return 0 if all(claim.passed for claim in report.claims) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
