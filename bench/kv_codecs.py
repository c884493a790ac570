"""What keeping keys and values as codes costs and saves while decoding: bfloat16, int8, additive codes of two bits and of one bit.

    python bench/kv_codecs.py --model smollm2 --lengths 2048 8192 --out results/bench/kv-codecs.json

All plans are of one model and run in one process, in turns: a few tokens with each, after contexts of each length. Contexts are
random keys and values (of codes: random codes), because the time does not depend on what they say; `--codebooks FILE` takes
fitted codebooks, as `fit_codebooks` writes them, instead of random ones. Milliseconds are medians over all rounds, with quartiles. On a
machine that others use too, `--cpu` counts the processor's time of this process instead (with --threads 1).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from orchard.core.report import Bound, Claim, Report, Value
from orchard.ops.kernels.native.program import BLOCK, Program, Stores
from orchard.ops.plan.codes import Books, spec_of
from orchard.ops.plan.steps import Plan, StoreSpec

TARGET = Path(__file__).resolve().parent.parent / "results" / "bench" / "kv-codecs.json"
ROUNDS = {"vq2": 14, "vq1": 6}
"""Rounds of keys for codes of about two bits and one bit a number, prescales counted, in heads of 64 channels."""
WORDS, SINKS = 16, 4
CODECS = ("bf16", "int8", *ROUNDS)
SPARE = 128


def random_books(spec: StoreSpec, rounds: int, seed: int) -> Books:
    """Of the shapes that fitted ones have, and of their size: each round is a little smaller than the one before."""
    source = np.random.default_rng(seed)
    heads, dim, shrink = spec.heads, spec.dim, spec.dim**-0.5 * 0.85 ** np.arange(rounds)[None, :, None, None]
    return Books(
        keys=source.standard_normal((heads, rounds, WORDS, dim)) * shrink,
        values=source.standard_normal((heads, 2 * rounds, WORDS, dim)) * np.repeat(shrink, 2, 1),
        key_offset=source.standard_normal((heads, dim)),
        value_offset=source.standard_normal((heads, dim)) * 0.1,
        key_weight=np.ones((heads, dim // 2)),
        value_metric=np.broadcast_to(np.eye(dim), (heads, dim, dim)),
        exact=SINKS,
    )


def fitted_books(file: Path, spec: StoreSpec) -> Books:
    from orchard.cache.codecs.commvq import codebooks_of
    from orchard.cache.codecs.fitted import layers_of

    found = codebooks_of(layers_of(file)[spec.layer], str(file))
    return Books.of(found.for_heads(spec.heads), SINKS)


def with_codec(plan: Plan, codec: str, file: Path | None) -> Plan:
    """The same model with other stores."""
    if codec not in ROUNDS:
        return replace(plan, stores=[replace(spec, codec=codec) for spec in plan.stores])
    tensors, stores = dict(plan.tensors), []

    def put(name: str, array: np.ndarray) -> str:
        tensors[name] = array
        return name

    for spec in plan.stores:
        books = fitted_books(file, spec) if file else random_books(spec, ROUNDS[codec], spec.layer)
        stores.append(replace(spec, codec="vq", books=spec_of(books, f"codebooks.{spec.layer}", put)))
    return replace(plan, stores=stores, tensors=tensors)


def piece(spec: StoreSpec, source: np.random.Generator, first: bool) -> np.ndarray:
    """BLOCK tokens of one store, in the order of `Stores.take`."""
    slots, parts = spec.heads * BLOCK, []
    for side in range(2):
        if spec.books is not None:
            rounds, words = (
                (spec.books.key_rounds * 2, spec.books.key_words)
                if side == 0
                else (
                    spec.books.value_rounds,
                    spec.books.value_words,
                )
            )
            rows = source.integers(0, 256, (slots, -(-rounds * (words.bit_length() - 1) // 8) + 2), np.uint8)
            rows[:, -2:] = np.frombuffer(np.float16(4).tobytes(), np.uint8)
            parts.append(rows)
        elif spec.codec == "int8":
            parts.append(source.integers(-127, 128, slots * spec.dim, np.int8))
        else:
            values = source.standard_normal(slots * spec.dim, np.float32).view(np.uint32) >> 16
            parts.append(values.astype(np.uint16))
    if spec.codec == "int8":
        parts.append(np.full(2 * slots, 0.02, np.float32))
    if spec.books is not None and first:
        parts.append(source.standard_normal(2 * spec.heads * SINKS * spec.dim, np.float32))
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def context(program: Program, length: int) -> Stores:
    """A sequence of so many random tokens, which may grow a little."""
    if any(spec.dim % 32 or spec.keep for spec in program.plan.stores):
        raise SystemExit("heads of a multiple of 32 channels, and stores without windows")
    source, stores = np.random.default_rng(0), program.stores(1, length + SPARE)
    held = [np.concatenate([piece(spec, source, first) for spec in program.plan.stores]) for first in (True, False)]
    count = length // BLOCK
    stores.put(0, count * BLOCK, (held[0], *[held[1]] * (count - 1)), count * BLOCK)
    return stores


def decode(program: Program, stores: Stores, length: int, tokens: int, clock: object) -> list[float]:
    """Milliseconds of single tokens after the context."""
    scores, zero = np.empty((1, program.plan.vocab), np.float32), np.zeros(1, np.int32)
    taken = []
    for number in range(tokens):
        token, place = np.array([1 + number], np.int32), np.array([length + number], np.int32)
        started = clock()  # type: ignore[operator]
        program.run(stores, token, zero, place, zero, scores)
        taken.append(1e3 * (clock() - started))  # type: ignore[operator]
    return taken


def summary(times: list[float]) -> Value:
    low, middle, high = statistics.quantiles(times, n=4)
    return Value(round(middle, 3), unit="ms", low=round(low, 3), high=round(high, 3), note="median, quartiles")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="its native plan is measured")
    parser.add_argument("--lengths", type=int, nargs=2, default=[2048, 8192], help="of contexts (default: 2048 8192)")
    parser.add_argument("--rounds", type=int, default=9, help="turns (default: 9)")
    parser.add_argument("--tokens", type=int, default=8, help="of each turn; the first is not counted (default: 8)")
    parser.add_argument("--threads", type=int, help="default: the cores of this machine")
    parser.add_argument("--cpu", action="store_true", help="count the processor's time, not the clock's")
    parser.add_argument("--codebooks", type=Path, help="fitted codebooks, for vq2")
    parser.add_argument("--out", type=Path, help=f"where the Report goes ({TARGET.name} of results/bench is quoted)")
    asked = parser.parse_args(arguments)

    import orchard
    from orchard.generate.lowering import lower

    started = time.perf_counter()
    plan = lower(orchard.load(asked.model).decoder)
    clock = time.process_time if asked.cpu else time.perf_counter
    programs = {
        codec: Program(with_codec(plan, codec, asked.codebooks if codec == "vq2" else None), threads=asked.threads)
        for codec in CODECS
    }
    times: dict[str, list[float]] = {}
    values: dict[str, Value] = {}
    for length in (at // BLOCK * BLOCK for at in asked.lengths):
        stores = {codec: context(program, length) for codec, program in programs.items()}
        for _ in range(asked.rounds):
            for codec, program in programs.items():
                found = decode(program, stores[codec], length, asked.tokens, clock)[1:]
                times.setdefault(f"{codec}.{length}", []).extend(found)
        for codec in CODECS:
            values[f"bytes.{codec}.{length}"] = Value(stores[codec].bytes(length), unit="B")
    values |= {name: summary(found) for name, found in times.items()}
    longest = max(at // BLOCK * BLOCK for at in asked.lengths)
    for codec in CODECS[1:]:
        for length in {name.split(".")[1] for name in times}:
            ratio = values[f"bf16.{length}"].value / values[f"{codec}.{length}"].value  # type: ignore[operator]
            values[f"faster.{codec}.{length}"] = Value(round(ratio, 3), unit="x")
    statement = (
        f"after {longest:,} tokens, decoding with codes of two bits is at least 1.3 times as fast as with bfloat16"
    )
    claims = [Claim("faster", statement, f"faster.vq2.{longest}", Bound(">=", 1.3), baseline=f"bf16.{longest}")]
    report = Report.record(
        "bench",
        "kv-codecs",
        values=values,
        claims=claims,
        config={"model": asked.model, "threads": programs["bf16"].threads, "clock": "cpu" if asked.cpu else "wall"},
        wall_time=round(time.perf_counter() - started, 3),
    )
    if asked.out is not None:
        report.save(asked.out)
    Console().print(report.table())
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
