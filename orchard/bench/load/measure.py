"""Send a load to an endpoint and note what comes back.

Open loop: requests go out at the times that were drawn beforehand, however many are still being answered. Closed loop: each
client sends its next request when its last one ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from orchard.bench.load.client import Endpoint, EndpointFailed, Reply
from orchard.bench.load.plan import ENDPOINTS, Load
from orchard.bench.load.sample import Sample, error_of, read

_PROBE = 10_000_019
"""Prompts for finding things out have numbers that no request of a run has."""
_LATE = 0.0005
"""Seconds before an arrival at which waiting stops being left to the event loop's clock."""
Told = Callable[[Sample], None]


class EndpointRefused(EndpointFailed):
    """The endpoint answered, but not with an answer: a wrong model, a missing key, a prompt that is too long."""

    code = "endpoint-refused"
    retryable = False


@dataclass
class Outcome:
    """A run: what was sent (with what was found out about the endpoint), what came back, and how long it took."""

    load: Load
    samples: list[Sample]
    seconds: float
    busy: float = 0.0
    """The share of one core that sending and listening took."""
    notes: list[str] = field(default_factory=list)


async def run(load: Load, endpoint: Endpoint, told: Told | None = None) -> Outcome:
    """Find out what the endpoint counts and understands, then send the load. A wrong model or key is an error here, before."""
    load, notes = await calibrated(load, endpoint)
    return await send(load, endpoint, told, notes)


async def send(load: Load, endpoint: Endpoint, told: Told | None = None, notes: list[str] | None = None) -> Outcome:
    """Send the load as it is. Bodies of an open loop are made before its clock starts."""
    samples: list[Sample] = []

    def done(sample: Sample) -> None:
        samples.append(sample)
        if told is not None:
            told(sample)

    planned = [] if load.rate is None else [(due, load.body(n)) for n, due in enumerate(load.arrivals())]
    spent, started = time.process_time(), time.perf_counter()
    if load.rate is None:
        await _closed(load, endpoint, started, done)
    else:
        await _open(load, endpoint, planned, started, done)
    spent, wall = time.process_time() - spent, time.perf_counter() - started
    busy = spent / max(1e-9, wall)
    samples.sort(key=lambda sample: sample.number)
    last = max((sample.ended for sample in samples), default=0.0)
    return Outcome(load, samples, last, busy, [*(notes or ()), *_remarks(samples, busy if wall > 1 else 0.0)])


async def _open(load: Load, endpoint: Endpoint, planned: list[tuple[float, bytes]], started: float, done: Told) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number, (due, body) in enumerate(planned):
            await _until(started + due)
            tasks.create_task(_request(load, endpoint, number, body, started, due, done))


async def _closed(load: Load, endpoint: Endpoint, started: float, done: Told) -> None:
    numbers = iter(range(load.count if load.count is not None else 1 << 60))

    async def client() -> None:
        for number in numbers:
            if load.seconds is not None and time.perf_counter() - started >= load.seconds:
                return
            await _request(load, endpoint, number, load.body(number), started, None, done)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(load.at_once):
            tasks.create_task(client())


async def _until(when: float) -> None:
    """Sleep up to a moment. The last half millisecond is spent giving way, for clocks of event loops are coarse."""
    rest = when - time.perf_counter()
    if rest > _LATE:
        await asyncio.sleep(rest - _LATE)
    while time.perf_counter() < when:
        await asyncio.sleep(0)


async def _request(
    load: Load, endpoint: Endpoint, number: int, body: bytes, started: float, due: float | None, done: Told
) -> None:
    sent = time.perf_counter() - started
    sample = Sample(number, sent if due is None else due, sent)
    try:
        reply = await endpoint.post(ENDPOINTS[load.endpoint], body, timeout=load.timeout)
        read(sample, reply, started)
        if sample.counted and sample.finish == "length":  # a piece may hold several tokens; this answer had them all
            sample.output_tokens = load.max_tokens
    except TimeoutError:
        sample.failed, sample.message = "timeout", f"no whole answer within {load.timeout:g} s"
    except EndpointFailed as error:
        sample.failed, sample.message = "connection", error.message
    sample.ended = sample.ended or time.perf_counter() - started
    done(sample)


# Before the run ---------------------------------------------------------------------------------------------------------


async def calibrated(load: Load, endpoint: Endpoint) -> tuple[Load, list[str]]:
    """The load with what the endpoint calls its model, as many words as make its tokens, and no field that it refuses.

    Two short requests of different lengths say how many tokens a word and the frame around it take. They also wake up what
    sleeps in a server; a third one, streamed, shows whether it takes `stream_options`.
    """
    notes: list[str] = []
    if not load.model:
        load = replace(load, model=await _first_model(endpoint))
    lengths = (max(8, load.prompt_tokens // 4), max(16, load.prompt_tokens))
    counts = [await _count(replace(load, words=words, shared_prefix=0), endpoint, words) for words in lengths]
    if counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
        notes.append("the endpoint does not say how long prompts are: one word was taken for one token")
    else:
        slope = (counts[1] - counts[0]) / (lengths[1] - lengths[0])
        frame = counts[1] - slope * lengths[1]
        words = max(1, round((load.prompt_tokens - frame) / slope))
        load = replace(load, words=words, shared_prefix=round(load.shared_prefix / slope))
    reply = await _probe(load, endpoint, replace(load, seed=load.seed + 1).body(_PROBE, max_tokens=2))
    if reply.status in (400, 422) and "stream_options" in error_of(reply)[1]:
        load = replace(load, usage=False)
        notes.append("the endpoint refuses stream_options, so tokens are counted by pieces of the stream")
    elif reply.status != 200:
        raise _refused(reply)
    return load, notes


async def _probe(load: Load, endpoint: Endpoint, body: bytes) -> Reply:
    try:
        return await endpoint.post(ENDPOINTS[load.endpoint], body, timeout=load.timeout)
    except TimeoutError as error:
        hint = "give it more time with --timeout, or see why it is slow"
        raise EndpointFailed(f"not one answer within {load.timeout:g} s", hint=hint) from error


async def _count(load: Load, endpoint: Endpoint, words: int) -> int | None:
    """Tokens of a prompt of so many words, by the endpoint's own account."""
    body = replace(load, seed=load.seed + 1).body(_PROBE + words, stream=False, max_tokens=1)
    reply = await _probe(load, endpoint, body)
    if reply.status != 200:
        raise _refused(reply)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        return int(reply.json()["usage"]["prompt_tokens"])
    return None


async def _first_model(endpoint: Endpoint) -> str:
    reply = await endpoint.get(f"{endpoint.base}/models")
    if reply.status == 401:
        raise _refused(reply)
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        return str(reply.json()["data"][0]["id"])
    raise EndpointRefused(f"{endpoint.url} names no models", hint="give the model's name with --model")


def _refused(reply: Reply) -> EndpointRefused:
    code, message = error_of(reply)
    hint = {
        401: "give the key in ORCHARD_API_KEY or with --api-key-file",
        403: "give the key in ORCHARD_API_KEY or with --api-key-file, and the address as the server knows itself",
        404: "check --url (it ends in /v1 for most servers), --model and --endpoint",
    }.get(reply.status, "change what it complains about, then run this again")
    said = f"{code}: {message}" if code else message
    return EndpointRefused(f"the endpoint answered {reply.status} {said}".strip(), hint=hint)


def _remarks(samples: list[Sample], busy: float) -> list[str]:
    """What one should know to read the figures."""
    notes = []
    if busy > 0.7:
        notes.append(
            f"the generator itself kept {busy:.0%} of a core busy: the server may be faster than these figures"
        )
    counted = sum(sample.counted for sample in samples if sample.ok)
    if counted:
        words = "their tokens are the pieces of text in the stream, or --max-tokens where that ended them"
        notes.append(f"no usage in {counted} answers: {words}")
    cached = sum(sample.cached_tokens or 0 for sample in samples)
    if cached:
        share = cached / max(1, sum(sample.prompt_tokens or 0 for sample in samples))
        notes.append(f"{cached:,} tokens of prompts ({share:.0%}) came from the server's cache")
    many = [s for s in samples if s.ok and not s.counted and s.output_tokens > 1.5 * max(1, len(s.pieces))]
    if many:
        notes.append("pieces of the stream hold several tokens: gaps are between pieces, time per token is by usage")
    return notes


def described(load: Load) -> dict[str, object]:
    """The load as plain data, for a Report."""
    return {name: value for name, value in dataclasses.asdict(load).items() if value not in (None, {})}
