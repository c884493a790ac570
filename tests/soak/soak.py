"""Twenty minutes of everything at once: the real server, and clients of which some are wrong, rude or hostile.

    python -m tests.soak.soak --minutes 20

One in ten requests is malformed, one in ten hangs up at some moment, one in twenty is too long, one in twenty has a schema that
is meant to hurt. All others are greedy requests of every protocol, whose answers were computed before, alone. The Report says
whether the server lived, answered every good request as it had to, refused every bad one with a code and words, stayed within
its memory, kept answering /health, and had nothing running in the end. What is sent depends on the seed alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from orchard.bench.load import own
from orchard.bench.load.client import Endpoint, EndpointFailed, Reply
from orchard.core.report import Bound, Claim, Report, Value
from tests.soak import catalog, hostile
from tests.soak.catalog import Item, Wrong
from tests.soak.hostile import Shot

TARGET = Path(__file__).resolve().parents[2] / "results" / "bench" / "soak.json"
CLIENTS = 6
LONGEST = 90.0
"""Seconds after which a request counts as hanging."""
HEALTH = 2.0
SHARES = {"good": 70, "malformed": 10, "disconnect": 10, "over-long": 5, "schema": 5}
CLAIMS = [
    Claim("alive", "The server lives to the end and stops in order", "ended in order", Bound("==", 1)),
    Claim(
        "right", "Every good request is answered, with the answer that it gets alone", "wrong answers", Bound("==", 0)
    ),
    Claim("refused", "Every bad request is refused with a code and a message", "wrong refusals", Bound("==", 0)),
    Claim("5xx", "No request ends in a fault of the server", "faults of the server", Bound("==", 0)),
    Claim("hang", f"No request takes longer than {LONGEST:g} s", "hangs", Bound("==", 0)),
    Claim("memory", "Resident memory is flat within 5 % after warm-up", "memory, end over warm-up", Bound("<=", 1.05)),
    Claim("health", f"/health answers within {HEALTH:g} s at any time", "slowest health", Bound("<=", HEALTH)),
    Claim("free", "Nothing runs or waits in the end", "left running", Bound("==", 0)),
    Claim("log", "No traceback in the server's log", "tracebacks", Bound("==", 0)),
]
GAUGES = ("orchard_answers_running", "orchard_queue_waiting", "orchard_engine_running", "orchard_engine_waiting")


@dataclass
class Findings:
    """What was seen. Of each kind of fault the first few are kept in words."""

    sent: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    words: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    slowest: dict[str, tuple[float, str]] = field(default_factory=dict)

    def fault(self, kind: str, words: str) -> None:
        self.faults[kind] += 1
        if self.faults[kind] <= 10:
            self.words.append(f"{kind}: {words}"[:600])

    def took(self, kind: str, seconds: float, name: str) -> None:
        self.slowest[kind] = max((seconds, name), self.slowest.get(kind, (0.0, "")))


class Soak:
    """One run against a server that is there."""

    def __init__(self, port: int, pid: int, *, seconds: float, seed: int, clients: int = CLIENTS) -> None:
        self.port, self.pid, self.seconds, self.seed, self.clients = port, pid, seconds, seed, clients
        self.endpoint = Endpoint(f"http://127.0.0.1:{port}/v1")
        self.found = Findings()
        self.items: list[Item] = []
        self.answers: dict[str, str] = {}

    async def run(self) -> Findings:
        await self._reference()
        self.began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch())
            workers = [tasks.create_task(self._client(number)) for number in range(self.clients)]
            await asyncio.wait(workers)
            watch.cancel()
        await self._settled()
        self.endpoint.close()
        return self.found

    async def _reference(self) -> None:
        """Answers of all good requests, one at a time. An item whose route is not there is a fault, told once."""
        models = (await self.endpoint.get("/v1/models")).json()
        embeddings = any(model["id"] == "minilm" for model in models["data"])
        for item in catalog.items(embeddings=embeddings):
            reply = await self._post(item.path, item.bytes(stream=False), item.headers)
            if reply.status != 200:
                self.found.fault("wrong answers", f"{item.name}, alone: {reply.status} {_said(reply)}")
                continue
            try:
                self.answers[item.name] = item.read(reply)
                item.check(self.answers[item.name])
            except (Wrong, ValueError, KeyError, TypeError, IndexError) as error:
                self.found.fault("wrong answers", f"{item.name}, alone: {type(error).__name__} {error}")
            self.items.append(item)

    # Clients ------------------------------------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        draw = random.Random(f"{self.seed}:{number}")
        while time.monotonic() - self.began < self.seconds:
            if draw.random() < 0.1:
                await asyncio.sleep(draw.random() * 0.2)
            kind = draw.choices(list(SHARES), list(SHARES.values()))[0]
            self.found.sent[kind] += 1
            started, name = time.monotonic(), "failed"
            try:
                name = await getattr(self, f"_{kind.replace('-', '_')}")(draw)
            except TimeoutError:
                self.found.fault("hangs", f"{kind}, seed {self.seed}, client {number}")
            except EndpointFailed as error:
                self.found.fault("faults of the server", f"{kind}: {error.message}")
            self.found.took(kind, time.monotonic() - started, name)

    async def _good(self, draw: random.Random) -> str:
        item = draw.choice(self.items)
        stream = item.streams and draw.random() < 0.5
        for _ in range(5):
            reply = await self._post(item.path, item.bytes(stream=stream), item.headers)
            if reply.status != 429:
                break
            self.found.sent["told to wait"] += 1
            await asyncio.sleep(min(5.0, float(reply.headers.get("retry-after", 1))))
        name = f"{item.name}, {'streamed' if stream else 'whole'}"
        if reply.status != 200:
            kind = "faults of the server" if reply.status >= 500 else "wrong answers"
            self.found.fault(kind, f"{name}: {reply.status} {_said(reply)}")
            return name
        try:
            answer = item.read(reply)
            item.check(answer)
        except (Wrong, ValueError, KeyError, TypeError, IndexError) as error:
            self.found.fault("wrong answers", f"{name}: {type(error).__name__} {error}: {_said(reply)}")
            return name
        if answer != self.answers[item.name]:
            self.found.fault("wrong answers", f"{name}: {answer[:200]} instead of {self.answers[item.name][:200]}")
        return name

    async def _disconnect(self, draw: random.Random) -> str:
        """Somebody who asks for much and leaves, while it waits, is read, or is being answered."""
        item = draw.choice(self.items)
        body = {**item.body, "stream": item.streams and draw.random() < 0.7}
        limit = "max_output_tokens" if "max_output_tokens" in body else "max_tokens"
        if limit in body:
            body[limit] = 400
        with contextlib.suppress(TimeoutError):
            await self._post(
                item.path, json.dumps(body).encode(), item.headers, timeout=draw.choice([0.001, 0.02, 0.1, 0.4])
            )
        return item.name

    async def _malformed(self, draw: random.Random) -> str:
        shot = hostile.malformed(draw)
        await self._refused(shot)
        return shot.name

    async def _over_long(self, draw: random.Random) -> str:
        shot = hostile.over_long(draw)
        reply = await self._refused(shot)
        numbers = re.findall(r"\d[\d,]*", _said(reply))
        if reply.status == 400 and len(numbers) < 2:
            self.found.fault("wrong refusals", f"{shot.name}: both counts are missing in {_said(reply)}")
        return shot.name

    async def _schema(self, draw: random.Random) -> str:
        shot = hostile.hostile_schema(draw)
        await self._refused(shot)
        return f"{shot.name} {shot.body[130:230].decode()}"

    async def _refused(self, shot: Shot) -> Reply:
        headers = {"content-type": "application/json", **shot.headers}
        reply = await self.endpoint.send(shot.method, shot.path, shot.body, headers, timeout=LONGEST)
        problem = wrong_refusal(shot, reply)
        if problem:
            kind = "faults of the server" if reply.status >= 500 else "wrong refusals"
            self.found.fault(kind, f"{shot.name}: {problem}: {shot.body[:200]!r}")
        return reply

    async def _post(self, path: str, body: bytes, headers: dict[str, str], *, timeout: float = LONGEST) -> Reply:
        return await self.endpoint.send(
            "POST", path, body, {"content-type": "application/json", **headers}, timeout=timeout
        )

    # Watching -----------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Memory and health, twice a second, each over a connection of its own."""
        while True:
            pause = asyncio.create_task(asyncio.sleep(0.5))
            self.found.memory.append((time.monotonic() - self.began, resident(self.pid)))
            probe = Endpoint(f"http://127.0.0.1:{self.port}")
            started = time.monotonic()
            try:
                reply = await probe.get("/health", timeout=30)
                if reply.status != 200:
                    self.found.fault("faults of the server", f"/health: {reply.status}")
            except (TimeoutError, EndpointFailed) as error:
                self.found.fault("faults of the server", f"/health: {type(error).__name__} {error}")
            self.found.health.append(time.monotonic() - started)
            probe.close()
            await pause

    async def _settled(self) -> None:
        """In the end nothing runs: within ten seconds, for whoever was cut off last."""
        for _ in range(50):
            metrics = (await self.endpoint.get("/metrics")).content.decode()
            found = {
                name: sum(float(x) for x in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.M)) for name in GAUGES
            }
            if not any(found.values()):
                break
            await asyncio.sleep(0.2)
        missing = [name for name in GAUGES if name not in metrics]
        if missing:
            self.found.fault("left running", f"/metrics does not say {', '.join(missing)}")
        for name, number in found.items():
            if number:
                self.found.fault("left running", f"{name} is {number:g}")


def wrong_refusal(shot: Shot, reply: Reply) -> str:
    """What is wrong with the answer to a bad request; empty when it is right."""
    if reply.status >= 500 or not (reply.status in shot.statuses or (4 in shot.statuses and 400 <= reply.status < 500)):
        return f"status {reply.status} {_said(reply)}"
    if reply.status < 400:
        return ""
    try:
        error = reply.json()["error"]
        code, message = error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        return f"{reply.status} without a code and a message: {_said(reply)}"
    if not (isinstance(code, str) and code and isinstance(message, str) and len(message) > 5):
        return f"{reply.status} without a code and a message: {_said(reply)}"
    if shot.codes and code not in shot.codes:
        return f"the code {code!r}: {message}"
    return ""


def _said(reply: Reply) -> str:
    return reply.content[:400].decode(errors="replace")


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# The whole run ----------------------------------------------------------------------------------------------------------


def serve_command(port: int) -> list[str]:
    """`orchard serve` with the default model; and with the embedding model, where it is in the library."""
    from orchard.weights.library import Library

    more = ["minilm"] if (Library().models / "minilm").exists() else []
    return own.command(catalog.MODEL, port, *more)


def soak(*, seconds: float, seed: int = 0, clients: int = CLIENTS) -> Report:
    port, started = own.free_port(), time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(serve_command(port), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            own.wait_until_answers(f"http://127.0.0.1:{port}/ready", process)
            findings = asyncio.run(Soak(port, process.pid, seconds=seconds, seed=seed, clients=clients).run())
            alive = process.poll() is None
            code = own.stop(process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return _report(findings, log, alive and code == 0, code, seed, clients, time.monotonic() - started)


def _report(
    found: Findings, log: IO[bytes], in_order: bool, code: int, seed: int, clients: int, seconds: float
) -> Report:
    log.seek(0)
    text = log.read().decode(errors="replace")
    values: dict[str, Value] = {f"sent {kind}": Value(number) for kind, number in sorted(found.sent.items())}
    for kind in ("wrong answers", "wrong refusals", "faults of the server", "hangs", "left running"):
        values[kind] = Value(found.faults[kind])
    values["ended in order"] = Value(int(in_order), note=f"exit code {code}")
    values["tracebacks"] = Value(text.count("Traceback (most recent call last)"))
    values["slowest health"] = Value(max(found.health, default=None), "s")
    values |= {f"slowest {kind}": Value(took, "s", note=name) for kind, (took, name) in sorted(found.slowest.items())}
    values |= memory_values(found.memory)
    notes = [*found.words]
    if values["tracebacks"].value:
        notes.append("log: " + text[text.index("Traceback") :][:1500])
    return Report.record(
        "bench",
        "soak",
        values=values,
        claims=CLAIMS,
        seed=seed,
        wall_time=round(seconds, 1),
        series={"memory": [[round(when, 1), size] for when, size in found.memory]},
        notes=notes,
        config={"clients": clients},
    )


def memory_values(memory: list[tuple[float, int]]) -> dict[str, Value]:
    """The last fifth of the time beside the part that follows warm-up, the first fifth."""
    if len(memory) < 10:
        return {}
    last = memory[-1][0]
    warm = statistics.median(size for when, size in memory if 0.2 * last <= when <= 0.35 * last)
    end = statistics.median(size for when, size in memory if when >= 0.8 * last)
    high = max(size for when, size in memory if when >= 0.2 * last)
    return {
        "memory after warm-up": Value(warm, "bytes"),
        "memory, end over warm-up": Value(end / warm),
        "memory, highest over warm-up": Value(high / warm),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--to", type=Path, default=TARGET)
    options = parser.parse_args()
    report = soak(seconds=60 * options.minutes, seed=options.seed, clients=options.clients)
    report.save(options.to)
    from rich.console import Console

    Console().print(report.table())
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
