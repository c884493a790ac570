"""The generator against an endpoint whose delays are known: what it reports is what was done to it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchard.bench.load.client import Endpoint, EndpointFailed
from orchard.bench.load.measure import EndpointRefused, Outcome, run
from orchard.bench.load.plan import Load
from orchard.bench.load.report import report, table
from orchard.bench.load.trivial import Manner, Trivial, cost
from orchard.cli.main import main

pytestmark = pytest.mark.loopback


def outcome(load: Load, manner: Manner) -> tuple[Outcome, Trivial]:
    async def measured() -> tuple[Outcome, Trivial]:
        async with Trivial(manner) as server:
            endpoint = Endpoint(server.url)
            try:
                return await run(load, endpoint), server
            finally:
                endpoint.close()

    return asyncio.run(measured())


def test_delays_are_measured_as_they_are() -> None:
    found, _ = outcome(Load(clients=4, requests=12, max_tokens=6, prompt_tokens=20), Manner(wait=0.05, gap=0.01))
    values = report(found, "here").values
    assert (
        values["failed"].value == 0 and values["prompt tokens"].value == 20.0
    )  # the frame of 5 is found and taken off
    assert 0.05 <= float(values["ttft p50"].value or 0) < 0.09
    assert 0.009 <= float(values["itl p50"].value or 0) < 0.03
    assert float(values["total p50"].value or 0) >= 0.1
    assert values["output tokens"].value == 6.0 and not found.notes


@pytest.mark.parametrize(("clients", "requests"), [(1, 5), (3, 9), (8, 8)])
def test_a_closed_loop_has_as_many_at_once_as_clients(clients: int, requests: int) -> None:
    found, server = outcome(Load(clients=clients, requests=requests, max_tokens=3, prompt_tokens=8), Manner(wait=0.01))
    assert server.most == clients and [sample.number for sample in found.samples] == list(range(requests))
    assert len({json.dumps(asked) for asked in server.asked}) == len(server.asked)


def test_a_stall_is_felt_by_everybody_who_was_due_in_it() -> None:
    """A generator that waits for answers before it sends would see one slow request here. All that were due see it."""
    found, server = outcome(
        Load(rate=100.0, seconds=0.6, max_tokens=1, prompt_tokens=8, target_ttft=0.1), Manner(stall=(0.2, 0.5))
    )
    waits = {sample.due: sample.ttft or 0.0 for sample in found.samples}
    stalled = [wait for due, wait in waits.items() if wait > 0.1]
    assert len(found.samples) > 30 and len(stalled) > 10 and max(waits.values()) > 0.2
    assert server.most > 10
    values = report(found, "here").values
    share = float(values["goodput share"].value or 0)
    assert share == pytest.approx(1 - len(stalled) / len(found.samples))
    assert float(values["sent late p99"].value or 0) < 0.1


def test_errors_are_counted_by_name_and_answers_go_on() -> None:
    found, _ = outcome(Load(clients=2, requests=12, max_tokens=2, prompt_tokens=8), Manner(error_every=4))
    record = report(found, "here")
    failed = [sample for sample in found.samples if sample.failed]
    assert {sample.failed for sample in failed} == {"429 queue_full"} and len(failed) == 3
    assert record["failed"] == 3 and any("3 × 429 queue_full: too many" in note for note in record.notes)


def test_a_connection_that_breaks_is_a_failure() -> None:
    found, _ = outcome(Load(clients=1, requests=6, max_tokens=4, prompt_tokens=8), Manner(cut_every=4))
    assert {sample.failed for sample in found.samples} == {"", "connection"}


def test_an_endpoint_without_usage_or_without_options() -> None:
    found, _ = outcome(Load(requests=4, max_tokens=5, prompt_tokens=16), Manner(usage=False))
    assert all(sample.counted and sample.output_tokens == 5 for sample in found.samples)
    assert len(found.notes) == 2 and "one word" in found.notes[0] and "no usage" in found.notes[1]
    found, server = outcome(Load(requests=4, max_tokens=5, prompt_tokens=16), Manner(takes_options=False))
    assert all(sample.ok for sample in found.samples) and "refuses stream_options" in found.notes[0]
    assert sum("stream_options" in asked for asked in server.asked) == 1


def test_a_timeout_is_a_failure_and_hangs_up() -> None:
    found, _ = outcome(
        Load(requests=2, clients=2, max_tokens=9, prompt_tokens=8, timeout=0.3), Manner(gap=0.1, tokens=9)
    )
    assert {sample.failed for sample in found.samples} == {"timeout"}


def test_nobody_there_and_no_such_thing() -> None:
    with pytest.raises(EndpointFailed, match="nothing answers"):
        asyncio.run(run(Load(model="m", requests=1), Endpoint("http://127.0.0.1:9/v1")))

    async def refused() -> None:
        async with Trivial(Manner(error_every=1)) as server:
            await run(Load(requests=1), Endpoint(server.url))

    with pytest.raises(EndpointRefused, match="429 queue_full"):
        asyncio.run(refused())


def test_following_a_piece_costs_little() -> None:
    """Some tens of microseconds: a thousand tokens a second take a few per cent of a core (measured: 15 µs)."""

    async def measured() -> dict[str, float]:
        async with Trivial() as server:
            return await cost(server.url, requests=128)

    found = asyncio.run(measured())
    assert found["failed"] == 0 and found["pieces"] == 128 * 64
    assert found["cpu per piece"] < 400e-6  # with the server in the same process, on a machine that does other things


# The command ------------------------------------------------------------------------------------------------------------


@contextmanager
def trivial_server(manner: Manner) -> Iterator[str]:
    """One in a thread of its own, for commands that run an event loop themselves."""
    ready, urls, loop = threading.Event(), list[str](), asyncio.new_event_loop()

    async def serve() -> None:
        async with Trivial(manner) as server:
            urls.append(server.url)
            ready.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_the_command_prints_a_table_and_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    with trivial_server(Manner(wait=0.01)) as url:
        words = ["bench", "serve", "--url", url, "--requests", "6", "--prompt-tokens", "16", "--max-tokens", "4"]
        assert main([*words, "--target-ttft", "500"]) == 0
        shown = capsys.readouterr().out
        assert "time to the first text" in shown and "p99" in shown and "first text within 500 ms" in shown
        assert main([*words, "--json", "--rate", "50", "--seed", "3"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["name"] == "load" and record["seed"] == 3 and record["config"]["rate"] == 50.0
    assert record["values"]["requests"]["value"] == 6 and len(record["series"]["requests"]) == 6


def test_the_command_fails_when_nothing_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with trivial_server(Manner(gap=0.2, tokens=9)) as url:
        words = ["bench", "serve", "--url", url, "--requests", "2", "--timeout", "0.4", "--prompt-tokens", "8"]
        assert main([*words, "--max-tokens", "9"]) == 1
    assert "timeout" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--rate", "1", "--clients", "2"], "rate"),
        (["--extra", "[1]"], "--extra"),
        (["--extra", "{"], "--extra"),
        (["--api-key-file", "nowhere.txt"], "nowhere.txt"),
        (["--url", "gopher://x"], "gopher"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_wrong_usage_of_the_command(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *more]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and "hint: " in err


def test_the_table_shows_what_a_report_holds() -> None:
    from rich.console import Console

    found, _ = outcome(Load(requests=3, max_tokens=1, prompt_tokens=8), Manner(tokens=1))
    console = Console(width=120)
    with console.capture() as shown_text:
        console.print(table(report(found, "here")))
    shown = shown_text.get()
    assert "between pieces" not in shown and "whole answer" in shown  # one token has nothing between
