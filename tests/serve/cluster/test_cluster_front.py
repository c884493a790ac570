"""The front's own pages, its counters, its end, and the metrics of all replicas on one page: no Ray."""

from __future__ import annotations

import asyncio
import socket
import sys
import types
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchard.core.errors import MissingExtra, UsageError
from orchard.serve.cluster.fleet import Fleet
from orchard.serve.cluster.front import Front
from orchard.serve.cluster.gauges import labelled, merged
from orchard.serve.cluster.link import HttpRequest, Message
from orchard.serve.cluster.rays import NoRay, Placement, RayCluster
from tests.serve.cluster.scripted_fleet import (
    Exchange,
    Rig,
    ScriptedReplica,
    chat,
    part,
    says_its_name,
    settings,
    start,
    streams,
)

PAGE = """# HELP orchard_requests_total HTTP requests
# TYPE orchard_requests_total counter
orchard_requests_total{route="/v1/models",status="200"} 3.0
# HELP orchard_seconds Time
# TYPE orchard_seconds histogram
orchard_seconds_bucket{le="1.0"} 2.0
orchard_seconds_bucket{le="+Inf"} 3.0
orchard_seconds_count 3.0
orchard_seconds_sum 1.5
# HELP orchard_running Answers
# TYPE orchard_running gauge
orchard_running 4.0
"""


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


async def get(rig: Rig, path: str) -> Exchange:
    return await Exchange(rig.front, path, method="GET").ended()


def test_health_and_ready_follow_the_replicas() -> None:
    async def main() -> None:
        async with Rig(says_its_name) as rig:
            found = await get(rig, "/ready")
            assert found.status == 200
            assert found.json["ready"] == 2
            rig.replicas[0].kill()
            while len(rig.fleet.ready) == 2:
                await asyncio.sleep(0.005)
            assert (await get(rig, "/ready")).status == 200
            rig.replicas[1].kill()
            while rig.fleet.ready:
                await asyncio.sleep(0.005)
            assert (await get(rig, "/ready")).status == 503
            health = await get(rig, "/health")
            assert health.status == 200
            assert health.json["status"] == "starting"
            assert {one["state"] for one in health.json["replicas"].values()} == {"lost"}

    run(main())


def test_before_the_first_sign_of_life_it_is_not_ready() -> None:
    async def main() -> None:
        front = Front(settings(), Fleet([ScriptedReplica("0", says_its_name)], settings().limits))
        found = await Exchange(front, "/ready", method="GET").ended()
        assert found.status == 503
        assert found.json["replicas"] == {"0": {"state": "starting", "running": 0, "restarts": 0}}

    run(main())


def test_replicas_that_cannot_start_say_why() -> None:
    async def main() -> None:
        replica = ScriptedReplica("0", says_its_name)
        replica.trouble = "there is no model nope"
        fleet = Fleet([replica], settings().limits)
        front = Front(settings(), fleet)
        fleet.start()
        while not fleet.members["0"].trouble:
            await asyncio.sleep(0.005)
        found = await Exchange(front, body=chat("x")).ended()
        assert found.status == 503
        assert "no model nope" in found.json["error"]["message"]
        assert (await Exchange(front, "/ready", method="GET").ended()).json["replicas"]["0"]["trouble"]
        assert b"nope" not in (await Exchange(front, "/health", method="GET").ended()).text
        await fleet.stop()

    run(main())


def test_metrics_are_the_fronts_and_every_replicas() -> None:
    async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
        if request.path == "/metrics":
            assert b"accept" not in dict(request.scope["headers"])
            yield [start(kind="text/plain"), part(PAGE.encode(), more=False)]
        else:
            async for batch in says_its_name(replica, request):
                yield batch

    async def main() -> None:
        async with Rig(script) as rig:
            await Exchange(rig.front, body=chat("x")).ended()
            found = await get(rig, "/metrics")
            families = {family.name: family for family in text_string_to_metric_families(found.text.decode())}
            seconds = families["orchard_seconds"].samples
            assert {sample.labels["replica"] for sample in seconds} == {"0", "1"}
            assert len(seconds) == 8
            assert len(families["orchard_requests"].samples) == 2
            up = {sample.labels["replica"]: sample.value for sample in families["orchard_cluster_replica_up"].samples}
            assert up == {"0": 1.0, "1": 1.0}
            sent = [sample for sample in families["orchard_cluster_requests"].samples if sample.name.endswith("_total")]
            assert sum(sample.value for sample in sent) == 1

            rig.replicas[0].kill()
            found = await get(rig, "/metrics")
            assert found.status == 200
            assert 'replica="1"' in found.text.decode()

    run(main())


def test_merged_pages_hold_each_family_once() -> None:
    text = merged({"0": PAGE, "1": PAGE, "2": ""})
    assert text.count("# TYPE orchard_seconds histogram") == 1
    families = list(text_string_to_metric_families(text))
    assert [family.name for family in families] == ["orchard_requests", "orchard_seconds", "orchard_running"]
    assert [len(family.samples) for family in families] == [2, 8, 2]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("a 1.0", 'a{replica="0"} 1.0'),
        ('a{b="c"} 1.0', 'a{replica="0",b="c"} 1.0'),
        ("a{} 1.0", 'a{replica="0"} 1.0'),
        ('a{b="x y} {"} 1.0 123', 'a{replica="0",b="x y} {"} 1.0 123'),
    ],
)
def test_a_label_is_added(line: str, wanted: str) -> None:
    assert labelled(line, "0") == wanted


def test_draining_refuses_new_requests_and_lets_running_ones_end() -> None:
    async def main() -> None:
        async with Rig(streams(20, 0.01)) as rig:
            one = Exchange(rig.front, body=chat("x", stream=True))
            await one.begun.wait()
            rig.front.drain()
            late = await Exchange(rig.front, body=chat("y")).ended()
            assert (late.status, late.json["error"]["code"]) == (503, "draining")
            assert "retry-after" in late.headers
            assert (await get(rig, "/ready")).status == 503
            assert (await get(rig, "/health")).json["status"] == "draining"
            assert not one.task.done()
            await one.ended()
            assert one.text.endswith(b"data: [DONE]\n\n")

    run(main())


def test_a_body_over_the_limit_is_refused_by_the_front() -> None:
    async def main() -> None:
        async with Rig(says_its_name, body_bytes=100) as rig:
            found = await Exchange(rig.front, "/v1/messages", body=chat("x" * 200)).ended()
            assert found.status == 413
            assert found.json["type"] == "error"
            assert found.json["error"]["code"] == "body_too_large"
            assert not any(replica.seen for replica in rig.replicas)

    run(main())


def test_lifespan_starts_the_watch_and_ends_the_replicas() -> None:
    async def main() -> None:
        ended: list[str] = []

        async def stop() -> None:
            ended.append("stopped")

        fleet = Fleet([ScriptedReplica("0", says_its_name)], settings().limits)
        front = Front(settings(), fleet, stop)
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        sent: list[str] = []

        async def send(message: Message) -> None:
            sent.append(message["type"])

        task = asyncio.ensure_future(front({"type": "lifespan"}, inbox.get, send))
        inbox.put_nowait({"type": "lifespan.startup"})
        while not fleet.ready:
            await asyncio.sleep(0.005)
        assert (sent, ended) == (["lifespan.startup.complete"], [])
        inbox.put_nowait({"type": "lifespan.shutdown"})
        await task
        assert (sent[-1], ended) == ("lifespan.shutdown.complete", ["stopped"])

    run(main())


def test_websockets_are_closed() -> None:
    async def main() -> None:
        async with Rig(says_its_name) as rig:
            sent: list[Message] = []

            async def send(message: Message) -> None:
                sent.append(message)

            await rig.front({"type": "websocket", "path": "/"}, asyncio.Queue().get, send)
            assert [message["type"] for message in sent] == ["websocket.close"]

    run(main())


def test_requests_are_plain_data_without_what_the_door_has_dealt_with() -> None:
    headers = [(b"A", b"b"), (b"Authorization", b"Bearer secret"), (b"x-api-key", b"secret"), (b"origin", b"http://a")]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "app": object(), "client": None}
    request = HttpRequest.of(scope | {"orchard.key": "name"}, b"x")
    wanted = {
        "method": "GET",
        "path": "/",
        "headers": [(b"a", b"b")],
        "client": None,
        "server": None,
        "orchard.key": "name",
    }
    assert request.scope == wanted
    assert request.asgi_scope()["type"] == "http"


@pytest.mark.parametrize(
    ("placement", "words"),
    [({"replicas": 0}, "--replicas"), ({"replicas": 2, "address": "ray://somewhere:10001"}, "HOST:PORT")],
)
def test_placements_that_make_no_sense(placement: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Placement(**placement)
    assert words in caught.value.hint


@pytest.mark.loopback
def test_a_ray_that_is_not_there_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(serve=None))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(NoRay, match=address) as caught:
            RayCluster(settings(), Placement(2, address), port=8000)
    assert "ray status" in caught.value.hint


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)  # what an import of a missing package comes to
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")
    with pytest.raises(MissingExtra) as caught:
        RayCluster(settings(), Placement(2), port=8000)
    assert "pip install 'orchard[cluster]'" in caught.value.hint
