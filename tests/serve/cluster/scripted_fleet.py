"""Replicas of a script, behind the same small protocol as those of Ray; and a client that speaks ASGI to the front."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from orchard.serve.cluster.fleet import Fleet
from orchard.serve.cluster.front import Front
from orchard.serve.cluster.link import HttpRequest, Message, Pulse, ReplicaLost
from orchard.serve.settings import Limits, ModelSpec, Settings

Script = Callable[["ScriptedReplica", HttpRequest], AsyncIterator[list[Message]]]


def settings(**limits: Any) -> Settings:
    return Settings(models=(ModelSpec("m", "m"),), limits=Limits(**limits))


class ScriptedReplica:
    """A `Link`. `kill` loses what runs there now, and whatever comes until `revive`."""

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.script = script
        self.seen: list[HttpRequest] = []
        self.cancelled = 0
        self.finished = 0
        self.life = 1
        self.trouble = ""
        self.silent = False
        self._dead = asyncio.Event()

    async def answer(self, request: HttpRequest) -> AsyncIterator[list[Message]]:
        self.seen.append(request)
        dead = self._dead
        messages = self.script(self, request)
        try:
            while True:
                following = asyncio.ensure_future(anext(messages, None))
                death = asyncio.ensure_future(dead.wait())
                try:
                    await asyncio.wait((following, death), return_when=asyncio.FIRST_COMPLETED)
                    if death.done():
                        raise ReplicaLost(f"{self.name} was killed")
                    batch = following.result()
                finally:
                    for task in (following, death):
                        task.cancel()
                    await asyncio.gather(following, death, return_exceptions=True)
                if batch is None:
                    break
                yield batch
            self.finished += 1
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise

    async def pulses(self) -> AsyncIterator[Pulse]:
        while self._dead.is_set():  # as Ray does: a call waits for the next life
            await asyncio.sleep(0.005)
        dead = self._dead
        while True:
            yield Pulse(f"{self.name}/{self.life}", not self.trouble, self.trouble)
            for _ in range(10):
                await asyncio.sleep(0.001)
                if dead.is_set():
                    raise ReplicaLost(f"{self.name} died")
                if self.silent:
                    await asyncio.sleep(60)

    def kill(self) -> None:
        self._dead.set()

    def revive(self) -> None:
        self.life += 1
        self._dead = asyncio.Event()


def start(status: int = 200, kind: str = "application/json") -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def says_its_name(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
    yield [start(), part(json.dumps({"replica": replica.name, "body": len(request.body)}).encode(), more=False)]


def streams(count: int, pause: float = 0.005) -> Script:
    async def script(replica: ScriptedReplica, request: HttpRequest) -> AsyncIterator[list[Message]]:
        yield [start(kind="text/event-stream; charset=utf-8")]
        for number in range(count):
            await asyncio.sleep(pause)
            yield [part(b'data: {"n": %d, "by": "%s"}\n\n' % (number, replica.name.encode()))]
        yield [part(b"data: [DONE]\n\n", more=False)]

    return script


class Rig:
    """A front over scripted replicas, started: `async with Rig(…) as rig`."""

    def __init__(self, script: Script, replicas: int = 2, **limits: Any) -> None:
        self.settings = settings(**limits)
        self.replicas = [ScriptedReplica(str(place), script) for place in range(replicas)]
        self._script = script

    async def __aenter__(self) -> Rig:
        self.fleet = Fleet(self.replicas, self.settings.limits, pause=0.01, patience=1.0)
        self.front = Front(self.settings, self.fleet)
        self.fleet.start()
        while len(self.fleet.ready) < len(self.replicas):
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.stop()

    def home(self, exchange: Exchange) -> ScriptedReplica:
        """The replica that has the exchange's request."""
        return next(one for one in self.replicas if one.seen and one.seen[-1].body == exchange.body)

    def count(self, name: str) -> float:
        found = [line for line in self.front.gauges.text().splitlines() if line.startswith(name + " ")]
        return float(found[0].split()[1])


class Exchange:
    """One request, as a server would make it of a connection."""

    def __init__(self, front: Any, path: str = "/v1/chat/completions", body: Any = None, method: str = "POST") -> None:
        self.body = json.dumps(body).encode() if body is not None else b""
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(b"host", b"localhost"), (b"x-mine", b"1")],
            "client": ("127.0.0.1", 5),
            "server": ("127.0.0.1", 8000),
        }
        self.sent: list[Message] = []
        self.begun = asyncio.Event()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": self.body, "more_body": False})
        self.task = asyncio.ensure_future(front(self.scope, self._inbox.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.begun.set()

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def ended(self) -> Exchange:
        await asyncio.wait_for(self.task, 10)
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def text(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}
