"""kvpress on transformers: a conversation is read whole, thrown away in part, and asked about. Runs in an environment of its own.

Each method runs as it is, and with keys turned to packed positions (`KeyRerotationPress`): whichever is better counts where
results are compared. Questions stand where kvpress's own pipeline puts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from kvpress import KeyDiffPress, KeyRerotationPress, SnapKVPress, StreamingLLMPress
from transformers import AutoModelForCausalLM, DynamicCache

METHODS: dict[str, Callable[[float, int], Any]] = {
    "recent": lambda ratio, sinks: StreamingLLMPress(compression_ratio=ratio, n_sink=sinks),
    "snap": lambda ratio, sinks: SnapKVPress(compression_ratio=ratio, window_size=64, kernel_size=5),
    "keydiff": lambda ratio, sinks: KeyDiffPress(compression_ratio=ratio),
}
WAYS = ("plain", "rerotated")
TRIAL = 4
"""Tokens that are written to see which dtype is faster."""


def task(name: str, options: dict[str, Any]) -> Any:
    assert name == "talk"
    torch.set_num_threads(options["threads"])
    transformers.logging.set_verbosity_error()
    dtype, model = _loaded(options["path"], options["dtype"])
    talk, found = options["talk"], {}
    with torch.inference_mode():
        for method in options["methods"]:
            for way in WAYS if method in METHODS else WAYS[:1]:
                press = _press(method, way, options["budget"], len(talk["tokens"]), options["sinks"])
                found[f"{method} {way}"] = Conversation(model, press, way, talk["tokens"]).asked(
                    talk["questions"], options["decode"]
                )
    import kvpress

    version = getattr(kvpress, "__version__", "") or _version("kvpress")
    return {"dtype": dtype, "found": found, "version": version, "transformers": transformers.__version__}


class Conversation:
    """What is left of a conversation after its press."""

    def __init__(self, model: Any, press: Any, way: str, tokens: list[int]) -> None:
        cache: Any = DynamicCache()
        self.model, self.cache = model, cache
        started = time.perf_counter()
        with press(model) if press is not None else nullcontext():
            model.model(input_ids=torch.tensor([tokens]), past_key_values=self.cache)
        self.seconds = time.perf_counter() - started
        self.kept = [layer.keys.shape[2] for layer in cache.layers]
        # As in kvpress's pipeline: turned keys are packed, others stay where they were.
        self.start = self.kept[0] if way == "rerotated" else len(tokens)

    def asked(self, questions: list[dict[str, Any]], decode: int) -> dict[str, Any]:
        right, first, speeds = [], [], []
        for number, question in enumerate(questions):
            started = time.perf_counter()
            scores = self._read(question["prompt"], self.start, 1)[0]
            first.append(time.perf_counter() - started)
            after = self.cache.layers[0].keys.shape[2] - self.kept[0]
            worth = [self._worth(scores, choice, after) for choice in question["choices"]]
            right.append(worth.index(max(worth)) == question["answer"])
            if number < 2 and decode:
                speeds.append(self._decoded(int(scores.argmax()), self.start + after, decode))
            self._back(0)
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
        return {
            "right": right,
            "first": first,
            "decode": speeds,
            "hear": self.seconds,
            "bytes": nbytes,
            "kept": max(self.kept),
        }

    def _worth(self, scores: Any, choice: list[int], after: int) -> float:
        total = float(scores.log_softmax(-1)[choice[0]])
        if len(choice) > 1:
            rest = self._read(choice[:-1], self.start + after, len(choice) - 1).log_softmax(-1)
            total += float(rest.gather(1, torch.tensor(choice[1:])[:, None]).sum())
            self._back(after)
        return total / len(choice)

    def _decoded(self, token: int, place: int, count: int) -> float:
        started = time.perf_counter()
        for step in range(count):
            token = int(self._read([token], place + step, 1)[0].argmax())
        return count / (time.perf_counter() - started)

    def _read(self, tokens: list[int], place: int, wanted: int) -> Any:
        positions = torch.arange(place, place + len(tokens))[None]
        out = self.model(
            input_ids=torch.tensor([tokens]),
            past_key_values=self.cache,
            position_ids=positions,
            logits_to_keep=wanted,
        )
        return out.logits[0].float()

    def _back(self, after: int) -> None:
        """Forget what came later than so many tokens after the conversation."""
        for layer, kept in zip(self.cache.layers, self.kept, strict=True):
            layer.keys, layer.values = layer.keys[:, :, : kept + after], layer.values[:, :, : kept + after]


def _press(method: str, way: str, budget: int, tokens: int, sinks: int) -> Any:
    if method not in METHODS:
        return None
    press = METHODS[method](1 - (budget + 0.5) / tokens, sinks)
    return KeyRerotationPress(press=press) if way == "rerotated" else press


def _loaded(path: str, dtype: str) -> tuple[str, Any]:
    """The model in the dtype that is asked for, or in the one that writes faster on this machine."""
    found = {}
    for name in ("float32", "bfloat16") if dtype == "auto" else (dtype,):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, name)).eval()
        speed = 1.0
        if dtype == "auto":
            with torch.inference_mode():
                one = Conversation(model, None, "plain", list(range(64, 128)))
                one._decoded(70, 64, 1)
                speed = one._decoded(71, 65, TRIAL)
        found[name] = (speed, model)
    best = max(found, key=lambda name: found[name][0])
    return best, found[best][1]


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
