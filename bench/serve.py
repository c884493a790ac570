"""Our server beside llama-cpp-python's, on the same GGUF file, under the same load.

Both run at once and take turns: in each round the one and then the other answers 8 clients that each send one request after
another, prompts of 512 tokens and 64 new ones, all different. Who begins changes from round to round. The same program
(`orchard bench serve`) measures both. Then our own server answers one client, for how much more eight get; and some prompts
alone and in a crowd, for whether company changes an answer.

llama.cpp gets its best: two threads, batches of 512, scores of the last token only (its server computes all of them unless told
otherwise), flash attention on or off, whichever is faster in a short trial before; and requests that wait for each other instead
of interrupting each other, which is its server's own choice for one user and would cut seven of eight streams.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchard.bench import peers
from orchard.bench.load import own
from orchard.bench.load.client import Endpoint
from orchard.bench.load.measure import Outcome, calibrated, send
from orchard.bench.load.plan import Load
from orchard.bench.load.report import values
from orchard.bench.load.sample import Sample
from orchard.bench.peers import LLAMA, OWN
from orchard.bench.stats import ratio, spread
from orchard.core.errors import UsageError
from orchard.core.machine import hardware
from orchard.core.report import Bound, Claim, Report, Value
from orchard.weights.library import Library

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "results" / "bench" / "serve.json"
CROWD, PROMPT, NEW = 8, 512, 64
SHORT, LONG_ANSWER = 32, 128
"""A second load of ours, where writing takes most of the time and reading hardly any."""
EXTRAS = "fastapi uvicorn sse-starlette starlette-context pydantic-settings"
CLAIMS = [
    Claim(
        "throughput",
        f"{CROWD} clients, prompts of {PROMPT} tokens, {NEW} new: at least 1.5 × the tokens per second of llama.cpp's server",
        "throughput over llama.cpp",
        Bound(">=", 1.5),
        baseline=f"{LLAMA} output tokens per second",
    ),
    Claim(
        "ttft",
        "The same load: the first text sooner than from llama.cpp's server, at the 95th percentile",
        "ttft p95 over llama.cpp",
        Bound("<", 1.0),
        baseline=f"{LLAMA} ttft p95",
    ),
    Claim(
        "eight",
        f"{CROWD} clients get at least 4 × the tokens per second of one (prompts of {SHORT}, {LONG_ANSWER} new)",
        f"{CROWD} clients over one",
        Bound(">=", 4.0),
        baseline="one client",
    ),
    Claim("same", "Greedy answers are the same alone and in a crowd", "same in a crowd", Bound("==", 1.0)),
    Claim("answered", "Every request was answered", "failed", Bound("==", 0)),
]
FIGURES = {
    "output tokens per second": "tok/s",
    "requests per second": "1/s",
    **{f"{name} p{percent}": "s" for name in ("ttft", "itl") for percent in (50, 95, 99)},
}


@dataclass
class Server:
    """One of the two: where it is, and what its rounds gave."""

    name: str
    endpoint: Endpoint
    load: Load
    rounds: dict[str, list[float]] = field(default_factory=dict)
    failed: int = 0
    tokens: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, outcome: Outcome) -> None:
        found = values(outcome)
        for name in FIGURES:
            self.rounds.setdefault(name, []).append(float(found[name].value or 0) if name in found else float("nan"))
        self.failed += int(found["failed"].value or 0)
        self.tokens += [float(found[name].value or 0) for name in ("output tokens",) if name in found]
        for said in outcome.notes:
            if said not in self.notes:
                self.notes.append(said)


# Servers ----------------------------------------------------------------------------------------------------------------


def llama_command(python: str, path: Path, port: int, *, flash: bool, threads: int) -> list[str]:
    given: dict[str, Any] = {
        "model": path,
        "model_alias": "smollm2",
        "n_ctx": 2048,
        "n_batch": 512,
        "n_threads": threads,
        "n_threads_batch": threads,
        "flash_attn": flash,
        "logits_all": False,
        "interrupt_requests": False,
        "verbose": False,
        "host": "127.0.0.1",
        "port": port,
    }
    words = [str(word).lower() if isinstance(word, bool) else str(word) for word in given.values()]
    return [
        python,
        "-m",
        "llama_cpp.server",
        *(part for pair in zip((f"--{k}" for k in given), words) for part in pair),
    ]


def llama_python(asked: Sequence[str]) -> str:
    """The environment that holds llama-cpp-python with its server."""
    found = peers.find(asked)[LLAMA]
    if not found.python:
        raise UsageError(found.missing, hint="`make bench` sets it up")
    done = subprocess.run([found.python, "-c", "import llama_cpp.server.app"], capture_output=True, check=False)
    if done.returncode:
        hint = f"install there: {EXTRAS}; or name another environment with --peers-python"
        raise UsageError("llama-cpp-python is there, but what its server needs is not", hint=hint)
    return found.python


def best_flash(python: str, path: Path, threads: int) -> tuple[bool, str]:
    """Whether flash attention makes llama.cpp faster here, by a few requests of the load."""
    speeds = {}
    for flash in (True, False):
        port = own.free_port()
        command = llama_command(python, path, port, flash=flash, threads=threads)
        with own.serving(command, port, ready="/v1/models", env=peers.environment()) as served:
            load = Load(endpoint="completions", clients=2, requests=4, prompt_tokens=PROMPT, max_tokens=NEW, seed=77)
            found = values(asyncio.run(_whole(served.url, load)))
        speeds[flash] = float(found["output tokens per second"].value or 0)
    best = max(speeds, key=lambda flash: speeds[flash])
    said = ", ".join(f"{'with' if flash else 'without'} {speed:.0f} tok/s" for flash, speed in speeds.items())
    return best, f"llama.cpp's flash attention is {'on' if best else 'off'}: in a short trial {said}"


async def _whole(url: str, load: Load) -> Outcome:
    endpoint = Endpoint(url)
    try:
        found, notes = await calibrated(load, endpoint)
        return await send(found, endpoint, notes=notes)
    finally:
        endpoint.close()


# Rounds -----------------------------------------------------------------------------------------------------------------


async def measured(
    urls: dict[str, str], rounds: int, requests: int
) -> tuple[dict[str, Server], dict[str, list[float]]]:
    """Everything that takes turns: what both servers gave, and what ours gave besides."""
    base = Load(endpoint="completions", clients=CROWD, requests=requests, prompt_tokens=PROMPT, max_tokens=NEW)
    servers = {}
    for name, url in urls.items():
        endpoint = Endpoint(url)
        load, notes = await calibrated(base, endpoint)
        servers[name] = Server(name, endpoint, load, notes=notes)
        await send(replace(load, requests=CROWD, seed=999), endpoint)  # for caches and clocks
    ours = servers[OWN]
    short, _ = await calibrated(replace(base, prompt_tokens=SHORT, max_tokens=LONG_ANSWER, words=None), ours.endpoint)
    more: dict[str, list[float]] = {}
    for number in range(rounds):
        order = list(servers.values()) if number % 2 == 0 else list(reversed(servers.values()))
        for server in order:
            _say(f"round {number + 1} of {rounds}: {server.name}")
            server.note(await send(replace(server.load, seed=100 + number), server.endpoint))
        _say(f"round {number + 1} of {rounds}: one client and {CROWD}, and the same answers")
        for label, load in (("", ours.load), ("short ", short)):
            for clients in (1, CROWD):
                count = max(2, requests // 4) if clients == 1 else requests
                outcome = await send(
                    replace(load, clients=clients, requests=count, seed=5000 + 10 * number + clients), ours.endpoint
                )
                more.setdefault(f"{label}{clients}", []).append(_speed(outcome))
                ours.failed += sum(not sample.ok for sample in outcome.samples)
        more.setdefault("same", []).append(await same(ours, 9000 + number, alone_first=number % 2 == 0))
    for server in servers.values():
        server.endpoint.close()
    return servers, more


async def same(ours: Server, seed: int, *, alone_first: bool) -> float:
    """The share of answers that are the same, letter for letter, alone and with seven others."""
    load = replace(ours.load, requests=CROWD, seed=seed)
    texts: list[list[str]] = []
    for clients in (1, CROWD) if alone_first else (CROWD, 1):
        outcome = await send(replace(load, clients=clients), ours.endpoint)
        texts.append([_text(sample) for sample in outcome.samples])
    return sum(one == other and one != "" for one, other in zip(*texts)) / CROWD


def _text(sample: Sample) -> str:
    return sample.text if sample.ok else ""


def _speed(outcome: Outcome) -> float:
    return float(values(outcome)["output tokens per second"].value or 0)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# The outcome ------------------------------------------------------------------------------------------------------------


def outcome_values(servers: dict[str, Server], more: dict[str, list[float]]) -> dict[str, Value]:
    made: dict[str, Value] = {}
    for server in servers.values():
        for name, unit in FIGURES.items():
            of = spread(server.rounds[name])
            made[f"{server.name} {name}"] = Value(of.median, unit, of.low, of.high)
        of = spread(server.tokens)
        made[f"{server.name} tokens of an answer"] = Value(of.median, "", of.low, of.high)
    if LLAMA in servers:
        ours, theirs = servers[OWN].rounds, servers[LLAMA].rounds
        made["throughput over llama.cpp"] = _ratio(ours, theirs, "output tokens per second")
        made["ttft p95 over llama.cpp"] = _ratio(ours, theirs, "ttft p95")
        made["itl p95 over llama.cpp"] = _ratio(ours, theirs, "itl p95")
    for label, words in (("", f", prompts of {PROMPT}"), ("short ", "")):
        eight, one = more[f"{label}{CROWD}"], more[f"{label}1"]
        for name, rounds in ((f"{CROWD} clients", eight), ("one client", one)):
            of = spread(rounds)
            made[f"{name}{words}"] = Value(of.median, "tok/s", of.low, of.high)
        of = ratio(eight, one)
        made[f"{CROWD} clients over one{words}"] = Value(of.median, "", of.low, of.high)
    made["same in a crowd"] = Value(min(more["same"]), note=f"{CROWD} answers a round")
    made["failed"] = Value(sum(server.failed for server in servers.values()))
    return made


def _ratio(ours: dict[str, list[float]], theirs: dict[str, list[float]], name: str) -> Value:
    of = ratio(ours[name], theirs[name])
    return Value(of.median, "", of.low, of.high)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=32, help=f"of {CROWD} clients in a round")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--peers-python", action="append", default=[], help="a Python with llama-cpp-python's server")
    parser.add_argument("--to", type=Path, default=TARGET, help="where the Report goes")
    options = parser.parse_args()
    started, path, threads = time.perf_counter(), Library().resolve(options.model), int(hardware()["cores"])
    python = llama_python(options.peers_python)
    flash, said = best_flash(python, path, threads)
    _say(said)
    with ExitStack() as stack:
        ports = {OWN: own.free_port()}
        ports[LLAMA] = next(port for port in iter(own.free_port, None) if port not in ports.values())
        commands = {
            OWN: own.command(options.model, ports[OWN]),
            LLAMA: llama_command(python, path, ports[LLAMA], flash=flash, threads=threads),
        }
        urls = {}
        for name, command in commands.items():
            served = own.serving(
                command, ports[name], ready="/ready" if name == OWN else "/v1/models", env=peers.environment()
            )
            urls[name] = stack.enter_context(served).url
        servers, more = asyncio.run(measured(urls, options.rounds, options.requests))
    notes = [said, "llama.cpp: n_ctx 2048, n_batch 512, logits_all off, interrupt_requests off, threads as ours"]
    notes += [f"{server.name}: {note}" for server in servers.values() for note in server.notes]
    report = Report.record(
        "bench",
        "serve",
        values=outcome_values(servers, more),
        claims=CLAIMS,
        seed=100,
        wall_time=round(time.perf_counter() - started, 1),
        series={
            f"{server.name} {name}": rounds for server in servers.values() for name, rounds in server.rounds.items()
        }
        | {f"clients {name}": rounds for name, rounds in more.items()},
        notes=notes,
        config={"rounds": options.rounds, "requests": options.requests, "clients": CROWD, "prompt": PROMPT, "new": NEW},
    )
    report.save(options.to)
    from rich.console import Console

    Console().print(report.table())
    return int(not report.passed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
