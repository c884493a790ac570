"""Orchard: `via` "runner" is what its engine calls for every token, plus the choice of the best score; "generate" is all
that a user of `model.generate` waits for. With `shape` instead of `model`: random weights of that size."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np

from orchard.bench.limits import DRAM_SET, read_bandwidth
from orchard.bench.shapes import Shape, random_plan
from orchard.session.model import load


class Subject:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.model: Any = None
        self.chunk = 512
        if "shape" in options:
            from orchard.generate.native import NativeRunner

            self.runner: Any = NativeRunner(
                random_plan(Shape(**options["shape"]), options["kind"], group=options["group"])
            )
            return
        self.model = load(options["model"])
        self.runner = self.model.runner
        self.chunk = self.model.engine.prefill_chunk

    def begin(self, prompts: list[list[int]], length: int) -> Any:
        if self.options.get("via") == "generate":
            return GenerateSession(self.model, self._talkative(prompts[0], length), length)
        return RunnerSession(self.runner, prompts, length, self.chunk)

    def _talkative(self, prompt: list[int], length: int) -> list[int]:
        """A prompt of this length whose answer does not end before its room is used: only the count of tokens matters."""
        for turn in range(8):
            turned = [*prompt[turn:], *prompt[:turn]]
            if self.model.generate(turned, max_tokens=length - len(prompt)).finish == "length":
                return turned
        raise RuntimeError("every answer ended early")

    def bandwidth(self) -> float:
        """Bytes per second that all threads read now, from memory and not from cache."""
        return read_bandwidth(DRAM_SET, self.options["threads"], repeats=3) or 0.0

    def about(self) -> dict[str, Any]:
        return {"version": version("orchard"), "system": type(self.runner).__name__}


class RunnerSession:
    def __init__(self, runner: Any, prompts: list[list[int]], length: int, chunk: int) -> None:
        self.runner, self.prompts, self.length, self.chunk = runner, prompts, length, chunk
        self.run: Any = None

    def read(self) -> list[int]:
        """In pieces of the size that the engine takes. Making the stores is part of it: every request needs new ones."""
        self.run = self.runner.begin(self.prompts, length=self.length)
        width = max(1, self.chunk // len(self.prompts))
        for start in range(0, self.run.longest, width):
            self.run.read(start, start + width)
        return _best(self.run.first())

    def step(self, tokens: list[int]) -> list[int]:
        return _best(self.run.step(tokens))

    def close(self) -> None:
        self.run = None


class GenerateSession:
    """One token of a stream is one step."""

    def __init__(self, model: Any, prompt: list[int], length: int) -> None:
        self.model, self.prompt, self.room = model, prompt, length - len(prompt)
        self.pieces: Iterator[Any] = iter(())

    def read(self) -> list[int]:
        self.pieces = iter(self.model.generate(self.prompt, stream=True, max_tokens=self.room))
        next(self.pieces)
        return [0]

    def step(self, tokens: list[int]) -> list[int]:
        if next(self.pieces, None) is None:
            raise RuntimeError("the answer ended before all steps were taken")
        return tokens

    def close(self) -> None:
        self.pieces.close()  # type: ignore[attr-defined]


def _best(scores: np.ndarray) -> list[int]:
    best: list[int] = scores.argmax(-1).tolist()
    return best
