"""Many requests through one engine: throughput, prompts that begin alike, the first token of a late one, and level memory.

Everything goes through `Engine`, as sessions and servers use it. Each measurement is taken in turns with what it is compared to,
round by round, in one process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from orchard.bench.stats import ratio, spread
from orchard.core.errors import UsageError
from orchard.core.report import Bound, Claim, Value
from orchard.generate.engine import Engine
from orchard.generate.request import Request

CROWD, SHARING, SHORT = 32, 16, 10_000
PREFIX = 1024
"""Tokens that prompts have in common."""
TOKENS = 64

CLAIMS = [
    Claim(
        "requests-32",
        f"{CROWD} requests at once: at least 6 times the tokens per second of one",
        f"requests {CROWD} over one",
        Bound(">=", 6.0),
        baseline="requests 1",
    ),
    Claim(
        "prefix-16",
        f"A prefix of {PREFIX:,} tokens read for {SHARING} requests: at most 1.1 times the time for one",
        f"shared prefix, {SHARING} over one",
        Bound("<=", 1.1),
        baseline="shared prefix 1",
    ),
    Claim(
        "same-tokens",
        "Answers that are the same, token for token, alone and among others",
        "same tokens in a crowd",
        Bound("==", 1.0),
    ),
    Claim(
        "level",
        f"Memory after {SHORT:,} short requests, beside that after the first few",
        f"memory after {SHORT} requests",
        Bound("<=", 1.02),
    ),
]


def measure(model: str, *, rounds: int, quick: bool) -> dict[str, Any]:
    """Numbers by name, one for each round."""
    from orchard.session.model import load

    loaded = load(model)
    engine = loaded.engine
    found: dict[str, list[float]] = {}
    random = np.random.default_rng(0)
    vocab = engine.model.config.vocab
    for number in range(rounds + 1):  # the first is for caches and clocks
        for name, value in _round(loaded, random, vocab).items():
            if number:
                found.setdefault(name, []).append(value)
    found["memory"] = [_level(engine, random, vocab, SHORT // 10 if quick else SHORT)]
    return {"rounds": found, "requests": SHORT // 10 if quick else SHORT}


def values(measured: dict[str, Any]) -> dict[str, Value]:
    rounds = measured["rounds"]
    made: dict[str, Value] = {}
    for name, unit in UNITS.items():
        of = spread(rounds[name])
        made[name] = Value(of.median, unit, of.low, of.high)
    for name, over, under in (
        (f"requests {CROWD} over one", f"requests {CROWD}", "requests 1"),
        (f"shared prefix, {SHARING} over one", f"shared prefix {SHARING}", "shared prefix 1"),
        ("late first token over idle", "late first token", "idle first token"),
    ):
        of = ratio(rounds[over], rounds[under])
        made[name] = Value(of.median, "", of.low, of.high)
    made["same tokens in a crowd"] = Value(min(rounds["same"]), note=f"{CROWD} answers a round")
    count = measured["requests"]
    made[f"memory after {count} requests"] = Value(
        rounds["memory"][0], note="resident, over that after the first few hundred"
    )
    return made


UNITS = {
    "requests 1": "tok/s",
    f"requests {CROWD}": "tok/s",
    "shared prefix 1": "s",
    f"shared prefix {SHARING}": "s",
    "idle first token": "s",
    "late first token": "s",
    "first token beside a long prompt": "s",
}


def _round(loaded: Any, random: np.random.Generator, vocab: int) -> dict[str, float]:
    engine = loaded.engine
    crowd = [Request(_ids(random, 32, vocab), TOKENS, seed=0) for _ in range(CROWD)]
    alone, one = _decode(engine, crowd[:1])
    answers, many = _decode(engine, crowd)
    result = {"requests 1": one, f"requests {CROWD}": many}
    others = [engine.answer([request])[0].ids for request in crowd[1:4]]
    result["same"] = float(answers[:4] == [alone[0], *others])
    first, rest = _prefix(loaded, random, vocab)
    result |= {"shared prefix 1": first, f"shared prefix {SHARING}": rest}
    return result | _late(engine, random, vocab)


def _ids(random: np.random.Generator, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(random.integers(100, min(vocab, 40_000), count).tolist())


def _decode(engine: Engine, requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], float]:
    """Answers, and tokens per second from the moment when all have begun."""
    ids: list[list[int]] = [[] for _ in requests]
    began = counted = 0.0
    for index, piece in engine.run(requests):
        if piece.id is None:
            continue
        ids[index].append(piece.id)
        if began:
            counted += 1
        elif all(ids):
            began = time.perf_counter()
    return [tuple(one) for one in ids], counted / (time.perf_counter() - began)


def _prefix(loaded: Any, random: np.random.Generator, vocab: int) -> tuple[float, float]:
    """Seconds to the first tokens of one request and of many whose prompts begin alike, with a beginning that is new."""
    took = []
    for count in (1, SHARING):
        shared = _ids(random, PREFIX, vocab)
        requests = [Request((*shared, 200 + place), 1, seed=0) for place in range(count)]
        started = time.perf_counter()
        loaded.engine.answer(requests)
        took.append(time.perf_counter() - started)
    return took[0], took[1]


def _late(engine: Engine, random: np.random.Generator, vocab: int) -> dict[str, float]:
    """Seconds to the first token of a small request: alone, beside eight that are answering, beside a long prompt."""

    def small() -> float:
        started = time.perf_counter()
        with engine.stream(Request(_ids(random, 32, vocab), 2, seed=0)) as stream:
            next(iter(stream))
            return time.perf_counter() - started

    idle = median(small() for _ in range(5))
    with _beside(engine, [Request(_ids(random, 64, vocab), 400, seed=0) for _ in range(8)]):
        late = median(small() for _ in range(5))
    limit = int(engine.model.config.context) // 2
    with _beside(engine, [Request(_ids(random, min(4096, limit), vocab), 1, seed=0)], settle=0.02):
        beside = small()
    return {"idle first token": idle, "late first token": late, "first token beside a long prompt": beside}


class _beside:
    """Requests that run in a thread of their own while the block lasts."""

    def __init__(self, engine: Engine, requests: Sequence[Request], *, settle: float = 0.3) -> None:
        self.cancel = threading.Event()
        self.settle = settle
        self.thread = threading.Thread(target=lambda: engine.answer(requests, cancel=self.cancel), daemon=True)

    def __enter__(self) -> None:
        self.thread.start()
        time.sleep(self.settle)

    def __exit__(self, *_: object) -> None:
        self.cancel.set()
        self.thread.join()


def _level(engine: Engine, random: np.random.Generator, vocab: int, count: int) -> float:
    """Resident memory after so many short requests over that after the first tenth of them."""
    marks = [_resident() for _ in _short(engine, random, vocab, count // 10)][-1:]
    marks += [_resident() for _ in _short(engine, random, vocab, count - count // 10)][-1:]
    return marks[1] / marks[0]


def _short(engine: Engine, random: np.random.Generator, vocab: int, count: int) -> Iterator[None]:
    for start in range(0, count, CROWD):
        batch = range(start, min(count, start + CROWD))
        engine.answer([Request(_ids(random, 4 + place % 5, vocab), 1 + place % 3, seed=place) for place in batch])
        yield


def _resident() -> float:
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError as error:
        raise UsageError("this system does not say how much memory is in use", hint="measure on Linux") from error
