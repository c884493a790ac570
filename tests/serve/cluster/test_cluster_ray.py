"""Two replicas of the default model on a local Ray, as `orchard serve --replicas 2 --cluster` starts them.

Ray is not a part of the development extra: without it these are skipped. They share one server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HAVE_RAY = importlib.util.find_spec("ray") is not None
pytestmark = [
    pytest.mark.skipif(not HAVE_RAY, reason="ray is not installed: pip install 'orchard[cluster]'"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc to find the replicas"),
    pytest.mark.real,
    pytest.mark.loopback,
    pytest.mark.timeout(180),
]
PROGRAM = "from orchard.cli.main import run; run()"
CHAT = "/v1/chat/completions"
CLIENTS = 8
TURNS = 6


@dataclass
class Server:
    """A server that runs in a session of its own, so that all of its processes can be found."""

    process: subprocess.Popen[str]
    url: str
    errors: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def health(self) -> dict[str, Any]:
        return dict(json.loads(self.get("/health")))

    def metric(self, start: str) -> float:
        """The sum of all samples that begin like this."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(start)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def sent(self) -> dict[str, float]:
        return {name: self.metric(f'orchard_cluster_requests_total{{replica="{name}"}}') for name in ("0", "1")}

    def processes(self) -> dict[int, str]:
        """Number and title of every process of the server."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
                title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, ValueError, IndexError):
                continue
            if session == self.process.pid and title:
                found[int(folder.name)] = title
        return found

    def replica(self, name: str) -> int:
        """The process of a replica."""
        found = [number for number, title in self.processes().items() if f"-{name}:replica" in title]
        assert len(found) == 1, self.processes()
        return found[0]

    def wait_for(self, true: Callable[[], bool], seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < until, f"not in time: {self.errors.read_text()[-2000:]}"
            assert self.process.poll() is None, self.errors.read_text()[-2000:]
            time.sleep(0.1)


class Keeper:
    """Starts the server that the tests share, and another where one of them has ended it."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        self._server: Server | None = None

    def running(self) -> Server:
        if self._server is None or self._server.process.poll() is not None:
            self._server = self._started()
            self._server.wait_for(lambda: self._server is not None and self._server.health()["ready"] == 2)
        return self._server

    def _started(self) -> Server:
        options = ["--cluster", "--replicas", "2", "--port", "0", "--json"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with self._errors.open("w") as sink:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "serve", "smollm2", *options],
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=environment,
                start_new_session=True,
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, self._errors.read_text()[-2000:]
        return Server(process, json.loads(line)["url"], self._errors)

    def end(self) -> None:
        if self._server is not None:
            self._server.process.kill()
            self._server.process.wait()
            for number in self._server.processes():  # what a test that failed may have left
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Keeper]:
    made = Keeper(tmp_path_factory.mktemp("cluster") / "stderr")
    yield made
    made.end()


@pytest.fixture
def server(keeper: Keeper) -> Server:
    return keeper.running()


@dataclass
class Reply:
    """What a client saw of one request."""

    status: int = 0
    text: str = ""
    pieces: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    whole: bool = False


def body(text: str, *, tokens: int = 24, stream: bool = False, then: tuple[str, ...] = ()) -> dict[str, Any]:
    roles = ("assistant", "user")
    more = [{"role": roles[place % 2], "content": one} for place, one in enumerate(then)]
    options = {"stream_options": {"include_usage": True}} if stream else {}
    messages = [{"role": "user", "content": text}, *more]
    return {
        "model": "smollm2",
        "messages": messages,
        "temperature": 0,
        "max_tokens": tokens,
        "stream": stream,
        **options,
    }


def ask(server: Server, fields: dict[str, Any], seen: Callable[[Reply], bool] = lambda _: True) -> Reply:
    """One request, read to its end, or for as long as `seen` is true."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + CHAT, json.dumps(fields).encode(), headers)
    reply = Reply()
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            reply.status = answer.status
            if not fields["stream"]:
                found = json.loads(answer.read())
                reply.text, reply.usage = found["choices"][0]["message"]["content"], found["usage"]
                reply.whole = True
                return reply
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    reply.whole = True
                    break
                _read(reply, json.loads(line[6:]))
                if not seen(reply):
                    break
    except urllib.error.HTTPError as error:
        reply.status, reply.error = error.code, error.read().decode()
    return reply


def _read(reply: Reply, event: dict[str, Any]) -> None:
    if "error" in event:
        reply.error = event["error"]["code"]
    for choice in event.get("choices", ()):
        reply.text += choice["delta"].get("content") or ""
        reply.pieces += 1
    reply.usage = event.get("usage") or reply.usage


def question(number: int) -> str:
    return f"Client {number}: tell a story about a tree with {number + 3} branches."


@pytest.fixture(scope="module")
def alone(smollm2: Path) -> dict[str, str]:
    """The answers of one server: the same app, in this process."""
    from orchard.serve.cluster.link import HttpRequest
    from orchard.serve.cluster.replica import Replica
    from orchard.serve.settings import ModelSpec, Settings

    async def answers() -> dict[str, str]:
        replica = Replica(Settings(models=(ModelSpec("smollm2", "smollm2"),)))
        found = {}
        for number in range(CLIENTS):
            scope = {
                "method": "POST",
                "path": CHAT,
                "raw_path": CHAT.encode(),
                "query_string": b"",
                "http_version": "1.1",
            }
            headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"1")]
            request = HttpRequest.of(
                {**scope, "scheme": "http", "headers": headers}, json.dumps(body(question(number))).encode()
            )
            parts = [one async for batch in replica.answer(request.scope, request.body) for one in batch]
            told = json.loads(b"".join(part.get("body", b"") for part in parts))
            found[question(number)] = told["choices"][0]["message"]["content"]
        return found

    return asyncio.run(answers())


def test_every_port_is_on_the_loopback_interface(server: Server) -> None:
    owners = server.processes()
    inodes = {}
    for number in owners:
        for link in Path(f"/proc/{number}/fd").glob("*"):
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes[target[8:-1]] = owners[number][:60]
    open_to_others, listening = [], 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening += 1
                address = fields[1].split(":")[0]
                loopback = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
                if address not in loopback:
                    open_to_others.append((fields[1], inodes[fields[9]]))
    assert listening > 5
    assert open_to_others == []


def test_a_conversation_stays_where_it_is_known(server: Server) -> None:
    for number in range(4):
        text = question(100 + number) + " It grows near a river, and everybody in the village knows its name."
        first = ask(server, body(text))
        before = server.sent()
        second = ask(server, body(text, stream=True, then=(first.text, "And then?")))
        grown = {name: count - before[name] for name, count in server.sent().items()}
        assert sorted(grown.values()) == [0, 1]
        cached = second.usage["prompt_tokens_details"]["cached_tokens"]
        assert first.status == 200 and cached > 0.5 * first.usage["prompt_tokens"], (first.usage, second.usage)
    assert server.metric('orchard_cluster_sticky_total{outcome="home"}') >= 8


def test_both_replicas_work_and_tell_their_metrics(server: Server) -> None:
    for number in range(6):
        ask(server, body(f"Number {number}", tokens=1))
    assert all(count > 0 for count in server.sent().values()), server.sent()
    assert server.metric('orchard_answers_total{replica="0"') > 0
    assert server.metric('orchard_answers_total{replica="1"') > 0
    assert "smollm2" in server.get("/v1/models")


def test_errors_are_those_of_one_server(server: Server) -> None:
    wrong = ask(server, body("x") | {"model": "nope"})
    assert wrong.status == 404
    assert json.loads(wrong.error)["error"]["code"] == "model_not_found"
    assert ask(server, body("x") | {"messages": 5}).status == 400


def test_a_client_that_hangs_up_frees_its_place(server: Server) -> None:
    gone = server.metric("orchard_cluster_clients_gone_total ")
    reply = ask(server, body("Count to a thousand.", tokens=4000, stream=True), seen=lambda reply: reply.pieces < 3)
    assert reply.pieces == 3
    begun = time.monotonic()
    server.wait_for(lambda: server.metric("orchard_answers_running{") == 0, 10)
    assert time.monotonic() - begun < 5  # four thousand tokens would take longer
    assert server.metric("orchard_cluster_clients_gone_total ") == gone + 1


def test_a_replica_killed_under_load_loses_nothing_that_had_not_begun(server: Server, alone: dict[str, str]) -> None:
    replies: list[tuple[str, bool, Reply]] = []
    under_way = threading.Semaphore(0)

    def client(number: int) -> None:
        for turn in range(TURNS):
            stream = (number + turn) % 2 == 0
            reply = ask(server, body(question(number), stream=stream))
            replies.append((question(number), stream, reply))
            under_way.release()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    victim = max("01", key=lambda name: server.sent()[name])
    number = server.replica(victim)
    for thread in threads:
        thread.start()
    for _ in range(CLIENTS):  # in the midst of it
        under_way.acquire()
    os.kill(number, signal.SIGKILL)
    for thread in threads:
        thread.join(150)

    assert len(replies) == CLIENTS * TURNS
    broken = [reply for _, _, reply in replies if not reply.whole]
    for text, stream, reply in replies:
        assert reply.status == 200, reply
        if reply.whole:
            assert reply.text == alone[text]
        else:
            assert stream and reply.pieces > 0 and reply.error == "replica_lost", reply
            assert alone[text].startswith(reply.text)
    retried = server.metric("orchard_cluster_retries_total ")
    assert server.metric("orchard_cluster_streams_lost_total ") == len(broken)
    assert retried + len(broken) > 0, "the replica had nothing to do when it was killed"
    assert f"replica {victim} is lost" in server.errors.read_text()

    server.wait_for(lambda: server.health()["ready"] == 2)
    assert server.health()["replicas"][victim]["restarts"] == 1
    assert server.replica(victim) != number
    assert ask(server, body(question(0))).text == alone[question(0)]


def test_told_to_stop_it_finishes_what_runs_and_leaves_nothing(server: Server) -> None:
    replies: list[Reply] = []
    begun = threading.Event()

    def seen(reply: Reply) -> bool:
        begun.set()
        return True

    def client() -> None:
        replies.append(ask(server, body("Tell a long story.", tokens=150, stream=True), seen))

    thread = threading.Thread(target=client)
    thread.start()
    assert begun.wait(30)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    late = ask(server, body("Am I late?", tokens=1))
    thread.join(60)
    assert replies[0].whole and replies[0].usage["completion_tokens"] > 40
    assert late.status == 503 and json.loads(late.error)["error"]["code"] == "draining"
    assert server.process.wait(60) == 0
    assert server.process.stdout is not None and server.process.stdout.read() == ""
    until = time.monotonic() + 10
    while server.processes() and time.monotonic() < until:
        time.sleep(0.1)
    assert server.processes() == {}
