"""What came of one request: when its first text came, how long between pieces, how many tokens, or why there was no answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from orchard.bench.load.client import Reply


@dataclass
class Sample:
    """Times are seconds from the start of the run. `due` is when the request should have been sent: latency counts from there.

    `failed` is empty for an answer, otherwise the status and code ("429 queue_full") or what broke ("timeout").
    """

    number: int
    due: float
    sent: float
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted: bool = False
    """The server did not say how many tokens there were; its pieces were counted instead."""
    failed: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def ttft(self) -> float | None:
        """Seconds until the first text."""
        return self.pieces[0] - self.due if self.pieces else None

    @property
    def total(self) -> float:
        return self.ended - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of text, as somebody who reads along sees them."""
        return [after - before for before, after in pairwise(self.pieces)]

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first, on average: several may come in one piece."""
        if self.output_tokens < 2 or len(self.pieces) < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1)

    def meets(self, ttft: float | None, itl: float | None) -> bool:
        """Whether it was answered, and soon enough: the first text within `ttft`, each further token within `itl` on average."""
        soon = ttft is None or (self.ttft is not None and self.ttft <= ttft)
        return self.ok and soon and (itl is None or self.per_token is None or self.per_token <= itl)


def read(sample: Sample, reply: Reply, started: float) -> None:
    """Fill in what a reply says. Anything that is not a whole stream of an answer is a failure with a name."""
    sample.ended = reply.ended - started
    if reply.status != 200:
        code, sample.message = error_of(reply)
        sample.failed = f"{reply.status} {code}".strip()
        return
    finished = False
    for when, data in reply.events():
        if data.strip() == "[DONE]":
            finished = True
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            sample.failed, sample.message = "no JSON in the stream", data[:200]
            return
        if not isinstance(chunk, dict):
            continue
        if chunk.get("error"):
            sample.failed, sample.message = f"200 {_code(chunk)}", _message(chunk)
            return
        _chunk(sample, chunk, when - started)
    if not finished and not sample.finish:
        sample.failed, sample.message = "stream cut", "the stream ended without a finish reason and without [DONE]"
    elif not sample.pieces and not sample.output_tokens:
        sample.failed, sample.message = "no text", f"finish reason {sample.finish!r}"
    if not sample.output_tokens:
        sample.output_tokens, sample.counted = len(sample.pieces), True


def _chunk(sample: Sample, chunk: dict[str, Any], when: float) -> None:
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        usage_into(sample, usage)
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        if text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"):
            sample.pieces.append(when)
            sample.text += text if isinstance(text, str) else ""
        sample.finish = choice.get("finish_reason") or sample.finish


def usage_into(sample: Sample, usage: dict[str, Any]) -> None:
    details = usage.get("prompt_tokens_details") or {}
    sample.prompt_tokens = usage.get("prompt_tokens", sample.prompt_tokens)
    sample.cached_tokens = details.get("cached_tokens", sample.cached_tokens)
    sample.output_tokens = usage.get("completion_tokens") or sample.output_tokens


def error_of(reply: Reply) -> tuple[str, str]:
    """The code and the message of an error, in OpenAI's form or in whatever a server has."""
    try:
        body = reply.json()
    except ValueError:
        return "", reply.content[:200].decode(errors="replace")
    if not isinstance(body, dict):
        return "", str(body)[:200]
    return _code(body), _message(body)


def _code(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("code") or error.get("type") or "") if isinstance(error, dict) else ""


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    said = error.get("message") if isinstance(error, dict) else error or body.get("detail") or body
    return str(said)[:500]


PERCENTS = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest of the sorted values, in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Sequence[float]) -> Iterator[tuple[int, float]]:
    for percent in PERCENTS if values else ():
        yield percent, percentile(values, percent)
