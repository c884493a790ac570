"""What is measured: each case is some prompts that are read and some steps after them, and gives one or more figures.

A figure is a name with the length it was taken at, such as `decode 2048`; topics are what `--only` chooses by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

TOPICS = (
    "ttft",
    "prefill",
    "decode",
    "batch",
    "memory",
    "start",
    "busy",
    "linear",
    "shape",
    "quality",
    "families",
    "many",
    "speculation",
    "gpu",
)
UNITS = {"ttft": "s", "start": "s", "memory": "bytes", "linear": "s", "bandwidth": "B/s"}  # all else: tokens per second
PROMPT = 37
LINEAR = (512, 1024, 2048, 4096, 8192, 16_384)


@dataclass(frozen=True)
class Case:
    """`reads` and `steps_give` name the figures (topic and length) that the two times become; empty: not of interest."""

    name: str
    prompts: tuple[int, ...]
    steps: int = 0
    repeats: int = 1
    warm: int = 0
    read_gives: str = ""
    step_gives: str = ""
    memory_gives: str = ""
    limit_gives: str = ""
    """How fast memory was read between repeats: beside a figure of the same minute, as neighbours come and go."""

    @property
    def figures(self) -> tuple[str, ...]:
        return tuple(name for name in (self.read_gives, self.step_gives, self.memory_gives, self.limit_gives) if name)

    @property
    def length(self) -> int:
        """Room for a sequence, the same for every engine: a multiple of 256, as llama.cpp rounds its own."""
        return -(-(max(self.prompts) + self.steps + 1) // 256) * 256

    def wanted(self, topics: frozenset[str]) -> bool:
        return any(topic_of(figure) in topics for figure in self.figures)

    def message(self, *, slow: bool) -> dict[str, Any]:
        """For a worker. A slow engine takes fewer steps and repeats: each of them is long enough to be timed well."""
        return {
            "name": self.name,
            "prompts": list(self.prompts),
            "steps": min(self.steps, 16) if slow else self.steps,
            "repeats": min(self.repeats, 2) if slow else self.repeats,
            "warm": self.warm,
            "length": self.length,
            "limit": bool(self.limit_gives),
        }

    def measured(self, answer: Mapping[str, Any]) -> dict[str, float]:
        """Figures from a worker's times."""
        found: dict[str, float] = {}
        if self.read_gives and answer["read"]:
            seconds = median(answer["read"])
            found[self.read_gives] = seconds if topic_of(self.read_gives) == "ttft" else sum(self.prompts) / seconds
        if self.step_gives and answer["step"]:
            seconds = median(answer["step"])
            found[self.step_gives] = seconds if topic_of(self.step_gives) == "linear" else len(self.prompts) / seconds
        if self.memory_gives:
            found[self.memory_gives] = float(answer["memory"])
        if self.limit_gives and all(answer["bandwidth"]):
            found[self.limit_gives] = median(answer["bandwidth"])
        return found


def topic_of(figure: str) -> str:
    return figure.split()[0]


def unit_of(figure: str) -> str:
    return UNITS.get(topic_of(figure), "tok/s")


def smaller_is_better(figure: str) -> bool:
    return topic_of(figure) in UNITS and topic_of(figure) != "bandwidth"


def context_case(length: int, *, steps: int, repeats: int = 1, warm: int = 0) -> Case:
    """A prompt of this length and some steps after it."""
    return Case(
        f"context {length}",
        (length,),
        steps=steps,
        repeats=repeats,
        warm=warm,
        read_gives=f"prefill {length}" if length >= 512 else "",
        step_gives=f"decode {length}",
        memory_gives=f"memory {length}",
    )


def one_sequence() -> list[Case]:
    """Short before long: the peak of memory only grows within a process."""
    return [
        Case("first", (PROMPT,), repeats=5, warm=1, read_gives=f"ttft {PROMPT}"),
        context_case(32, steps=64, repeats=3, warm=1),
        Case("prompt 512", (512,), repeats=2, warm=1, read_gives="prefill 512"),
        context_case(
            2048, steps=128
        ),  # what a long prompt did to the shared caches wears off in the first thirty or so
    ]


def long_context(limit: int) -> list[Case]:
    length = min(8_000, limit - 64) // 8 * 8
    return [context_case(length, steps=32)] if length > 2048 else []


def batches(sizes: Sequence[int] = (1, 8, 32)) -> list[Case]:
    """Large ones take long, so they are run once."""
    return [
        Case(
            f"batch {size}",
            (32,) * size,
            steps=64 if size < 32 else 16,
            warm=int(size < 32),
            step_gives=f"batch {size}",
        )
        for size in sizes
    ]


def linear() -> list[Case]:
    """Steps at growing contexts, beyond the model's own limit: the cost of a step does not depend on what it answers."""
    return [Case(f"linear {length}", (length,), steps=24, step_gives=f"linear {length}") for length in LINEAR]


BUSY = Case("busy", (32,), steps=64, repeats=3, warm=1, step_gives="busy 32")
GENERATE = Case("generate", (32,), steps=64, repeats=3, warm=1, step_gives="decode 32")
SHAPE = Case("shape", (32,), steps=32, repeats=3, warm=1, step_gives="shape 32")
OWN_SHAPE = replace(SHAPE, limit_gives="bandwidth")
