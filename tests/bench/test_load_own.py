"""Servers that are started for a measurement: they answer, they are gone afterwards, and one that fails says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from orchard.bench.load import own
from orchard.bench.load.client import EndpointFailed
from orchard.cli.main import main

pytestmark = pytest.mark.loopback
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *given): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.real
@pytest.mark.timeout(120)
def test_our_own_server_is_started_measured_and_stopped(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--requests",
        "3",
        "--clients",
        "3",
        "--prompt-tokens",
        "40",
        "--max-tokens",
        "4",
        "--endpoint",
        "completions",
    ]
    assert main(["bench", "serve", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    values = json.loads(out)["values"]
    assert values["failed"]["value"] == 0 and values["requests"]["value"] == 3
    assert values["prompt tokens"]["value"] == 40.0  # exactly: the server's own count steers the words
    assert 1 <= values["output tokens"]["value"] <= 4 and "starting orchard serve" in err


def test_a_server_lives_as_long_as_the_block() -> None:
    port = own.free_port()
    with own.serving([sys.executable, "-c", SERVER, str(port)], port) as served:
        assert served.url == f"http://127.0.0.1:{port}/v1" and served.process.poll() is None
    assert served.process.poll() is not None


def test_a_server_that_dies_says_its_last_words() -> None:
    with (
        pytest.raises(EndpointFailed, match=r"ended with code 3.*no such port"),
        own.serving([sys.executable, "-c", "import sys; print('no such port'); sys.exit(3)"], own.free_port()),
    ):
        raise AssertionError("not reached")
