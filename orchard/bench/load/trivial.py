"""An endpoint that only pretends: it answers at once, or as slowly as it is told, with made-up text.

It shows what the generator itself costs (`cost`), and tests hold the generator's figures against delays that they set.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from orchard.bench.load.client import Endpoint
from orchard.bench.load.measure import send
from orchard.bench.load.plan import Load


@dataclass
class Manner:
    """How it behaves. `stall`: from second a to second b of its life, nothing is answered."""

    wait: float = 0.0
    gap: float = 0.0
    tokens: int | None = None
    usage: bool = True
    takes_options: bool = True
    error_every: int = 0
    cut_every: int = 0
    stall: tuple[float, float] | None = None
    frame: int = 5
    """Tokens that it counts on top of a prompt's words."""


class Trivial:
    """`async with Trivial(Manner()) as server: server.url`"""

    def __init__(self, manner: Manner | None = None) -> None:
        self.manner = manner or Manner()
        self.asked: list[dict[str, Any]] = []
        self.streams = self.most = 0
        self.url = ""
        self.open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Trivial:
        self.born = time.perf_counter()
        self.server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in self.open:
            task.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").lower().split("\r\n")
                length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length")), 0)
                body = await reader.readexactly(length)
                if lines[0].startswith("get"):
                    _plain(writer, 200, {"data": [{"id": "trivial"}]})
                else:
                    await self._answer(json.loads(body), lines[0], writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open.discard(task)
            writer.close()

    async def _answer(self, asked: dict[str, Any], line: str, writer: asyncio.StreamWriter) -> None:
        manner = self.manner
        self.asked.append(asked)
        if not manner.takes_options and "stream_options" in asked:
            return _plain(writer, 400, {"error": {"message": "stream_options: unknown field", "code": "unknown"}})
        if manner.error_every and asked["stream"] and len(self.asked) % manner.error_every == 0:
            return _plain(writer, 429, {"error": {"message": "too many; wait a second", "code": "queue_full"}})
        prompt = asked["prompt"] if "prompt" in asked else asked["messages"][-1]["content"]
        tokens = min(asked["max_tokens"], manner.tokens or asked["max_tokens"])
        read = len(prompt.split()) + manner.frame
        usage = {"prompt_tokens": read, "completion_tokens": tokens, "total_tokens": read + tokens}
        if not asked["stream"]:
            return _plain(writer, 200, {"choices": [{"text": "word"}], **({"usage": usage} if manner.usage else {})})
        self.streams += 1
        self.most = max(self.most, self.streams)
        try:
            await self._stream(writer, "delta" if "chat" in line else "text", tokens, usage)
        finally:
            self.streams -= 1

    async def _stream(self, writer: asyncio.StreamWriter, kind: str, tokens: int, usage: dict[str, int]) -> None:
        manner = self.manner
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if kind == "delta":
            _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        await asyncio.sleep(manner.wait + self._stalled())
        for number in range(tokens):
            if manner.cut_every and number and len(self.asked) % manner.cut_every == 0:
                return writer.close()
            text: Any = {"content": " word"} if kind == "delta" else " word"
            _event(writer, {"choices": [{"index": 0, kind: text}]})
            await writer.drain()
            if number < tokens - 1:
                await asyncio.sleep(manner.gap + self._stalled())
        _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if manner.usage and self.asked[-1].get("stream_options"):
            _event(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _stalled(self) -> float:
        if self.manner.stall is None:
            return 0.0
        begins, ends = self.manner.stall
        now = time.perf_counter() - self.born
        return ends - now if begins <= now < ends else 0.0


def _event(writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
    data = f"data: {json.dumps(chunk)}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _plain(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def cost(url: str, *, clients: int = 64, requests: int = 1024, tokens: int = 64) -> dict[str, float]:
    """Processor time that the generator takes for a piece and for a request, and how many pieces a second it can follow.

    `url` is a trivial server in another process: its work is not counted.
    """
    load = Load(model="trivial", clients=clients, requests=requests, max_tokens=tokens, prompt_tokens=512)
    endpoint = Endpoint(url)
    before, began = time.process_time(), time.perf_counter()
    outcome = await send(load, endpoint)
    spent, seconds = time.process_time() - before, time.perf_counter() - began
    endpoint.close()
    pieces = sum(len(sample.pieces) for sample in outcome.samples)
    return {
        "failed": float(sum(not sample.ok for sample in outcome.samples)),
        "pieces": float(pieces),
        "seconds": seconds,
        "cpu per piece": spent / max(1, pieces),
        "pieces per second": pieces / seconds,
        "cpu share": spent / seconds,
    }


async def _serve() -> None:
    async with Trivial() as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    import sys

    if len(sys.argv) > 1:
        print(json.dumps(asyncio.run(cost(sys.argv[1])), indent=1))
    else:
        asyncio.run(_serve())
