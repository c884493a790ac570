"""What happens to a request when replicas die, are full, or its client goes: with scripted replicas, no Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from orchard.serve.cluster import fleet as fleet_module
from orchard.serve.cluster.link import HttpRequest, Message
from tests.serve.cluster.scripted_fleet import (
    Exchange,
    Rig,
    ScriptedReplica,
    chat,
    part,
    says_its_name,
    start,
    streams,
)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


def test_a_request_goes_to_a_replica_and_its_answer_comes_back_unchanged() -> None:
    async def main() -> None:
        async with Rig(says_its_name) as rig:
            one = await Exchange(rig.front, body=chat("hello")).ended()
            assert one.status == 200
            assert one.headers["content-type"] == "application/json"
            assert one.json["body"] == len(one.body)
            seen = rig.home(one).seen[-1]
            assert (b"x-mine", b"1") in seen.scope["headers"]
            assert seen.scope["client"] == ("127.0.0.1", 5)
            assert seen.scope["orchard.request"] == one.headers["x-request-id"] == one.headers["request-id"]

    run(main())


def test_the_same_beginning_goes_to_the_same_replica() -> None:
    async def main() -> None:
        async with Rig(says_its_name, replicas=3) as rig:
            where: dict[str, set[str]] = {}
            for text in ["a", "b", "c", "d", "e", "f"] * 3:
                where.setdefault(text, set()).add((await Exchange(rig.front, body=chat(text)).ended()).json["replica"])
            assert all(len(names) == 1 for names in where.values())
            assert len(set.union(*where.values())) > 1
            assert rig.count('orchard_cluster_sticky_total{outcome="home"}') == 18

    run(main())


def test_a_request_without_a_first_byte_is_sent_again() -> None:
    async def main() -> None:
        async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
            yield [start()]  # headers are not yet a byte that a client has seen
            if replica.life == 1 and len(replica.seen) == 1:
                await asyncio.sleep(60)
            yield [part(b"from " + replica.name.encode(), more=False)]

        async with Rig(script) as rig:
            one = Exchange(rig.front, body=chat("x"))
            await asyncio.sleep(0.05)
            first = rig.home(one)
            other = next(replica for replica in rig.replicas if replica is not first)
            other.seen.append(first.seen[0])  # the other one answers its first request at once
            first.kill()
            await one.ended()
            assert (one.status, one.text) == (200, b"from " + other.name.encode())
            assert other.seen[-1].scope["orchard.request"] == first.seen[-1].scope["orchard.request"]
            assert rig.count("orchard_cluster_retries_total") == 1
            assert rig.count("orchard_cluster_streams_lost_total") == 0

    run(main())


def test_an_answer_that_is_no_stream_is_sent_again_even_if_it_had_begun_to_come() -> None:
    async def main() -> None:
        async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
            yield [start(), part(b"half ")]
            await asyncio.sleep(0.2)
            yield [part(b"whole", more=False)]

        async with Rig(script) as rig:
            one = Exchange(rig.front, body=chat("x"))
            await asyncio.sleep(0.05)
            assert one.sent == []
            rig.home(one).kill()
            await one.ended()
            assert one.text == b"half whole"

    run(main())


@pytest.mark.parametrize(
    ("path", "named"), [("/v1/chat/completions", False), ("/v1/messages", True), ("/v1/responses", True)]
)
def test_a_stream_that_had_begun_ends_with_an_error_of_its_protocol(path: str, named: bool) -> None:
    async def main() -> None:
        async with Rig(streams(1000)) as rig:
            body = chat("x", stream=True) | {"input": "x"}
            one = Exchange(rig.front, path, body=body)
            await one.begun.wait()
            rig.home(one).kill()
            await one.ended()
            events = one.text.split(b"\n\n")
            assert events[-1] == b""
            last = events[-2].split(b"\n")
            assert (last[0] == b"event: error") == named
            fields = json.loads(last[-1].removeprefix(b"data: "))
            told = fields.get("error", fields)
            assert told["code"] == "replica_lost"
            assert "ask again" in told["message"]
            assert all(json.loads(event.removeprefix(b"data: "))["by"] for event in events[:-2])
            assert one.sent[-1]["more_body"] is False
            assert rig.count("orchard_cluster_streams_lost_total") == 1
            assert rig.count("orchard_cluster_retries_total") == 0

    run(main())


def test_a_replica_that_dies_after_its_last_word_has_answered() -> None:
    async def main() -> None:
        async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
            async for batch in streams(2)(replica, request):
                yield batch
            await asyncio.sleep(60)

        async with Rig(script) as rig:
            one = Exchange(rig.front, body=chat("x", stream=True))
            while not one.text.endswith(b"[DONE]\n\n"):
                await asyncio.sleep(0.005)
            rig.home(one).kill()
            await one.ended()
            assert one.text.count(b"data: ") == 3
            assert [message.get("more_body") for message in one.sent].count(False) == 1
            assert rig.count("orchard_cluster_streams_lost_total") == 0

    run(main())


def test_half_an_event_is_never_passed_on() -> None:
    async def main() -> None:
        async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
            yield [start(kind="text/event-stream"), part(b'data: {"a": 1}\n\nda'), part(b'ta: {"b"')]
            await asyncio.sleep(60)

        async with Rig(script) as rig:
            one = Exchange(rig.front, body=chat("x", stream=True))
            await one.begun.wait()
            assert one.text == b'data: {"a": 1}\n\n'
            rig.home(one).kill()
            await one.ended()
            assert [json.loads(event[6:]) for event in one.text.split(b"\n\n")[:-1]][1]["error"][
                "code"
            ] == "replica_lost"

    run(main())


def test_the_error_goes_on_counting_where_a_protocol_numbers_its_events() -> None:
    async def main() -> None:
        async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
            yield [start(kind="text/event-stream")]
            yield [part(b"".join(b'event: x\ndata: {"sequence_number": %d}\n\n' % number for number in range(3)))]
            yield [part(b": still here\n\n")]
            await asyncio.sleep(60)

        async with Rig(script) as rig:
            one = Exchange(rig.front, "/v1/responses", body={"model": "m", "input": "x"})
            await one.begun.wait()
            await asyncio.sleep(0.01)
            rig.home(one).kill()
            await one.ended()
            last = json.loads(one.text.rpartition(b"data: ")[2])
            assert (last["type"], last["code"], last["sequence_number"]) == ("error", "replica_lost", 3)

    run(main())


def test_with_everybody_dead_a_request_waits_for_the_first_to_come_back() -> None:
    async def main() -> None:
        async with Rig(says_its_name) as rig:
            for replica in rig.replicas:
                replica.kill()
            while rig.fleet.ready:
                await asyncio.sleep(0.005)
            one = Exchange(rig.front, body=chat("x"))
            await asyncio.sleep(0.1)
            assert not one.task.done()
            rig.replicas[1].revive()
            await one.ended()
            assert one.json["replica"] == "1"
            health = await Exchange(rig.front, "/health", method="GET").ended()
            assert health.json["replicas"]["1"] == {"state": "ready", "running": 0, "restarts": 1}
            assert health.json["replicas"]["0"]["state"] == "lost"

    run(main())


def test_a_replica_that_is_silent_is_left_and_its_requests_go_elsewhere() -> None:
    async def main() -> None:
        async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
            if replica.silent:
                await asyncio.sleep(60)
            yield [start(), part(replica.name.encode(), more=False)]

        async with Rig(script) as rig:
            first = (await Exchange(rig.front, body=chat("x")).ended()).text
            stuck = rig.replicas[int(first)]
            stuck.silent = True
            one = await Exchange(rig.front, body=chat("x")).ended()
            assert one.text != first
            assert stuck.cancelled == 1
            assert rig.fleet.members[stuck.name].state == "lost"
            stuck.silent = False
            while len(rig.fleet.ready) < 2:
                await asyncio.sleep(0.01)
            assert (await Exchange(rig.front, body=chat("x")).ended()).text == first

    run(main())


def test_when_nobody_comes_back_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "LONGEST_WAIT", 0.1)

    async def main() -> None:
        async with Rig(says_its_name) as rig:
            for replica in rig.replicas:
                replica.kill()
            one = await Exchange(rig.front, "/v1/messages", body=chat("x")).ended()
            assert one.status == 503
            assert one.json["error"]["code"] == "not_ready"
            assert int(one.headers["retry-after"]) >= 1

    run(main())


def test_a_request_that_kills_every_replica_is_given_up() -> None:
    async def main() -> None:
        async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
            if b"deadly" in request.body:
                asyncio.get_running_loop().call_later(0.05, replica.revive)
                replica.kill()
                await asyncio.sleep(60)
            yield [start(), part(b"{}", more=False)]

        async with Rig(script) as rig:
            one = await Exchange(rig.front, body=chat("deadly")).ended()
            assert one.status == 503
            assert one.json["error"]["code"] == "replica_lost"
            assert sum(len(replica.seen) for replica in rig.replicas) == 3
            assert (await Exchange(rig.front, body=chat("harmless")).ended()).status == 200

    run(main())


def test_a_client_that_hangs_up_ends_the_request_in_the_replica() -> None:
    async def main() -> None:
        async with Rig(streams(10_000)) as rig:
            one = Exchange(rig.front, body=chat("x", stream=True))
            await one.begun.wait()
            replica = rig.home(one)
            one.hang_up()
            await one.ended()
            assert (replica.cancelled, replica.finished) == (1, 0)
            assert rig.fleet.running == 0
            assert rig.count("orchard_cluster_clients_gone_total") == 1

    run(main())


def test_full_replicas_refuse_with_429_and_a_time() -> None:
    async def main() -> None:
        async with Rig(streams(10_000), running=1, queue=1) as rig:
            running = [Exchange(rig.front, body=chat(f"x{n}")) for n in range(4)]
            for one in running:
                await one.begun.wait()
            assert [member.running for member in rig.fleet.members.values()] == [2, 2]
            more = await Exchange(rig.front, body=chat("y")).ended()
            assert more.status == 429
            assert more.json["error"]["code"] == "queue_full"
            assert int(more.headers["retry-after"]) >= 1
            for one in running:
                one.hang_up()
                await one.ended()

    run(main())


def test_an_app_that_fails_is_no_lost_replica() -> None:
    async def main() -> None:
        async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
            if b"stream" in request.body:
                yield [start(kind="text/event-stream"), part(b"data: 1\n\n")]
            raise RuntimeError("secret words")

        async with Rig(script) as rig:
            one = await Exchange(rig.front, body=chat("x")).ended()
            assert one.status == 500
            assert b"secret" not in one.text
            two = await Exchange(rig.front, body=chat("stream")).ended()
            assert two.status == 200
            assert two.text.startswith(b"data: 1\n\n") and b'"internal"' in two.text
            assert len(rig.fleet.ready) == 2
            assert rig.count("orchard_cluster_retries_total") == 0

    run(main())


def test_killed_under_load_nothing_is_lost_that_had_not_begun() -> None:
    """Eight clients, replicas that die and come back: every whole answer arrives, every broken stream had begun."""

    async def main() -> None:
        async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
            await asyncio.sleep(0.01)
            chosen = streams(5, 0.002) if b"stream" in request.body else says_its_name
            async for batch in chosen(replica, request):
                yield batch

        async with Rig(script) as rig:
            ended: list[Exchange] = []

            async def client(number: int) -> None:
                for turn in range(12):
                    kind = "stream" if turn % 2 else "whole"
                    ended.append(await Exchange(rig.front, body=chat(f"{number} {turn} {kind}")).ended())

            async def killer() -> None:
                for replica in rig.replicas:  # twice, so that no request sees three of them die
                    await asyncio.sleep(0.1)
                    replica.kill()
                    await asyncio.sleep(0.05)
                    replica.revive()

            await asyncio.gather(killer(), *(client(number) for number in range(8)))
            assert len(ended) == 96
            assert [one.text for one in ended if one.status != 200] == []
            broken = [one for one in ended if b"replica_lost" in one.text]
            assert all(one.text.startswith(b'data: {"n": 0') for one in broken)
            assert all(one.text.endswith(b"[DONE]\n\n") for one in ended if b"stream" in one.body and one not in broken)
            assert rig.count("orchard_cluster_streams_lost_total") == len(broken)
            assert rig.count("orchard_cluster_retries_total") > 0
            assert rig.fleet.running == 0

    run(main())
