"""Numbers for those who watch, in Prometheus' text form: the line, times, tokens, caches, batches, memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from orchard.session.turn import Done

if TYPE_CHECKING:
    from orchard.serve.service import Service

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
ENGINE = {
    "tokens": "Tokens that the engine has written",
    "prompt_tokens": "Tokens of prompts that the engine has read",
    "cached_tokens": "Tokens of prompts that were still known",
    "preempted": "Answers that lost their place and were read again",
    "steps": "Steps of the engine",
}


class Metrics:
    """A registry of its own: several apps in one process do not mix."""

    def __init__(self, service: Service) -> None:
        self.log = logging.getLogger("orchard.serve")
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry, "namespace": "orchard"}
        self._requests = Counter("requests", "HTTP requests", ["route", "status"], **made)
        self._seconds = Histogram("request_seconds", "Time of a request", ["route"], buckets=SECONDS, **made)
        self._queue = Histogram("queue_seconds", "Time in the line", buckets=SECONDS, **made)
        self._first = Histogram("time_to_first_token_seconds", "From coming", ["model"], buckets=SECONDS, **made)
        self._between = Histogram("inter_token_seconds", "Between two tokens", ["model"], buckets=SHORT, **made)
        self._tokens = Counter("answered_tokens", "Tokens of ended answers", ["model", "kind"], **made)
        self._answers = Counter("answers", "Ended answers", ["model", "finish"], **made)
        self.registry.register(_Watch(service))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def first(self, model: str, seconds: float) -> None:
        self._first.labels(model).observe(seconds)

    def between(self, model: str, seconds: float) -> None:
        self._between.labels(model).observe(seconds)

    def ended(self, model: str, done: Done) -> None:
        self._answers.labels(model, done.finish).inc()
        used = done.usage
        for kind, count in (("input", used.input), ("cached", used.cached), ("output", used.output)):
            self._tokens.labels(model, kind).inc(count)

    def failed(self, model: str) -> None:
        self._answers.labels(model, "error").inc()

    def embedded(self, model: str, tokens: int) -> None:
        self._answers.labels(model, "embedding").inc()
        self._tokens.labels(model, "input").inc(tokens)


class _Watch(Collector):
    """What is asked only when somebody looks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        service = self._service
        yield GaugeMetricFamily("orchard_queue_waiting", "Answers in the line", service.gate.waiting)
        yield GaugeMetricFamily("orchard_answers_running", "Answers that run", service.gate.running)
        yield CounterMetricFamily("orchard_model_loads", "Models loaded", service.hub.loads)
        yield CounterMetricFamily("orchard_model_unloads", "Models let go of", service.hub.unloads)
        yield GaugeMetricFamily("orchard_resident_bytes", "Memory of this process", resident_bytes())
        facts = service.hub.facts()
        for name, words in ENGINE.items():
            family = CounterMetricFamily(f"orchard_engine_{name}", words, labels=["model"])
            for model, found in facts.items():
                family.add_metric([model], found.get(name, 0))
            yield family
        for name, words in (
            ("running", "Sequences that have a slot"),
            ("waiting", "Sequences that wait for one"),
            ("kv_bytes", "Keys and values of sequences"),
            ("prefix_bytes", "Keys and values kept of earlier prompts"),
            ("model_bytes", "Files of the model"),
        ):
            gauge = GaugeMetricFamily(f"orchard_engine_{name}", words, labels=["model"])
            for model, found in facts.items():
                gauge.add_metric([model], found.get(name) or 0)
            yield gauge
        yield _batches(facts)


def _batches(facts: dict[str, dict[str, Any]]) -> HistogramMetricFamily:
    family = HistogramMetricFamily("orchard_engine_batch_size", "Sequences in a step of answers", labels=["model"])
    for model, found in facts.items():
        sizes: dict[int, int] = found.get("batch_sizes", {})
        buckets = [(str(most), float(sum(n for size, n in sizes.items() if size <= most))) for most in BATCHES]
        total = float(sum(sizes.values()))
        family.add_metric([model], [*buckets, ("+Inf", total)], sum(size * n for size, n in sizes.items()))
    return family


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
