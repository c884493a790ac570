"""`orchard serve`: what it refuses before a port is opened, and a server that is started, asked and stopped."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchard.cli.main import main
from orchard.cli.serving import adapters_of, bytes_of, keys_for, settings_for, sources_of
from orchard.core.errors import ModelNotFound, UsageError
from orchard.serve.keys import hashed, read_keys
from orchard.serve.settings import Limits
from orchard.weights.library import Library

SECONDS = 30
RUN = "import sys; from orchard.cli.main import run; sys.argv = ['orchard', *sys.argv[1:]]; run()"


@pytest.fixture
def library(empty_home: Path) -> Library:
    """Two models by name; what is in them does not matter before they are asked for."""
    library = Library(empty_home)
    for name in ("smollm2", "other"):
        with library.lock(name), library.add(name, source="test", version="1", licence="mit") as folder:
            (folder / "model.gguf").write_bytes(b"GGUF and no more")
    return library


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    assert main(["serve", *arguments]) == code
    return capsys.readouterr().err


# Before anything is opened ------------------------------------------------------------------------------------------------


def test_a_typo_names_what_is_near(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "smolm2", code=2)
    assert "no model called 'smolm2'" in said and "did you mean smollm2" in said
    assert "no file or folder at ./none.gguf" in refused(capsys, "./none.gguf", code=2)


def test_without_the_default_model_the_next_step_is_named(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "orchard pull smollm2" in refused(capsys, code=2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--origin", "*"], 2, "is no origin"),
        (["--origin", "localhost:3000"], 2, "is no origin"),
        (["--allow-host", "*"], 2, "is no name of a host"),
        (["--memory", "much"], 2, "is no size"),
        (["--log-level", "loud"], 2, "--log-level"),
        (["--port", "70000"], 2, "65535"),
        (["--running", "0"], 2, "--running"),
        (["--replicas", "2"], 2, "--cluster"),
        (["--cluster-address", "auto"], 2, "--cluster"),
        (["--tls-cert", "none.pem"], 2, "--tls-key is missing"),
        (["--tls-cert", "none.pem", "--tls-key", "none.key"], 1, "none.pem cannot be read: No such file"),
        (["--api-key-file", "none/keys"], 1, "none/keys cannot be made: No such file"),
        (["--adapter", "mine"], 2, "is not understood"),
        (["smollm2", "smollm2"], 2, "two models are called 'smollm2'"),
        (["a b=smollm2"], 2, "cannot be the name of a model"),
        (["name="], 2, "names no model"),
    ],
)
def test_mistakes(
    library: Library, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    said = refused(capsys, *arguments, code=code)
    assert words in said and said.startswith("error: ") and "Traceback" not in said and len(said.splitlines()) <= 3


@pytest.mark.loopback
def test_a_port_in_use(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused(capsys, "--port", port, code=1)
    assert said.startswith(f"error: port {port} of 127.0.0.1 is in use\nhint: ") and "--port" in said
    assert logging.getLogger("orchard").propagate, "the log is as it was"


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name))
    said = refused(capsys, code=1)
    assert "the server needs uvicorn" in said and "pip install 'orchard[serve]'" in said


def test_names_and_paths_of_models(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my-model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert sources_of(["smollm2", "big=other", str(file)]) == {
        "smollm2": "smollm2",
        "big": "other",
        "my-model": str(file),
    }
    assert sources_of(["named=./my-model.gguf"]) == {"named": str(file)}
    assert sources_of(["my-model.gguf"]) == {"my-model": str(file)}
    with pytest.raises(ModelNotFound, match="thing"):
        sources_of(["name=thing"])


def test_the_library_is_served_where_no_model_is_named(library: Library) -> None:
    how: dict[str, Any] = {"memory": "2GB", "hosts": ["box"], "origins": [], "limits": Limits()}
    found = settings_for([], [], **how)
    assert [spec.name for spec in found.models] == ["smollm2"] and found.any_model
    assert found.memory == 2_000_000_000 and found.hosts == ("box",)
    found = settings_for(["other"], [], **how)
    assert [spec.name for spec in found.models] == ["other"] and not found.any_model


def test_adapters(library: Library, adapter: Path) -> None:
    sources = {"smollm2": "smollm2"}
    assert adapters_of([f"mine={adapter}"], sources, any_model=False) == {"smollm2": {"mine": str(adapter)}}
    found = adapters_of([f"other:mine={adapter}", f"smollm2:mine={adapter}"], sources, any_model=True)
    assert set(found) == {"smollm2", "other"} and set(sources) == {"smollm2", "other"}
    for text, words in (
        (f"third:mine={adapter}", "is not served"),
        (f"mine={adapter}/none", "is no adapter"),
        (f"={adapter}", "is not understood"),
        (f":mine={adapter}", "is not understood"),
        ("mine=", "is not understood"),
    ):
        with pytest.raises(UsageError, match=words):
            adapters_of([text], {"smollm2": "smollm2"}, any_model=False)
    with pytest.raises(UsageError, match="two are called smollm2:mine"):
        adapters_of([f"mine={adapter}", f"smollm2:mine={adapter}"], {"smollm2": "smollm2"}, any_model=False)
    with pytest.raises(ModelNotFound, match="--adapter"):
        adapters_of([f"third:mine={adapter}"], {"smollm2": "smollm2"}, any_model=True)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8GB", 8 * 10**9),
        ("8 gib", 8 * 2**30),
        ("500MB", 5 * 10**8),
        ("1.5k", 1500),
        ("1234", 1234),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes(text: str, amount: int) -> None:
    assert bytes_of(text) == amount


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1e9", "8 XB", "1" * 400 + "x", "inf"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        bytes_of(text)


def test_keys_that_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys_for("127.0.0.1", None) == () and keys_for("localhost", None) == ()
    assert capsys.readouterr().err == ""
    found = keys_for("0.0.0.0", None)
    said = capsys.readouterr().err
    shown = next(word for word in said.split() if word.startswith("orchard-"))
    assert found == (hashed(shown),) and said.count(shown) == 1 and "not shown again" in said
    file = tmp_path / "keys"
    made = keys_for("127.0.0.1", file)
    said = capsys.readouterr().err
    assert made == read_keys(file).hashes and "orchard-" in said
    assert keys_for("0.0.0.0", file) == made and capsys.readouterr().err == "", "shown once"
    file.chmod(0o644)
    assert keys_for("127.0.0.1", file) == made and "chmod 600" in capsys.readouterr().err


# A server that runs -------------------------------------------------------------------------------------------------------


class Running:
    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "ORCHARD_NO_NETWORK": "loopback"}
        command = [sys.executable, "-c", RUN, "serve", "--port", "0", "--json", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate(timeout=SECONDS)[1])
        self.facts = json.loads(line)
        self.url = self.facts["url"]

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as found:
                return found.status, json.loads(found.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit code, and what it said on stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        errors = self.process.communicate(timeout=SECONDS)[1]
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[Any]:
    made: list[Running] = []

    def run(*arguments: str) -> Running:
        made.append(Running(*arguments))
        return made[-1]

    yield run
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate(timeout=SECONDS)


@pytest.mark.loopback
def test_a_server_with_a_key(library: Library, start: Any, tmp_path: Path, adapter: Path) -> None:
    keys = tmp_path / "keys"
    running = start("smollm2", "big=other", "--api-key-file", str(keys), "--adapter", f"big:mine={adapter}")
    assert running.facts["models"] == ["smollm2", "big", "big:mine"] and running.facts["pid"] == running.process.pid
    assert running.facts["url"].startswith("http://127.0.0.1:")
    assert running.get("/health")[0] == 200
    status, body = running.get("/v1/models")
    assert status == 401 and body["error"]["code"] == "invalid_api_key"
    key = keys.read_text().splitlines()[-1]
    status, body = running.get("/v1/models", Authorization=f"Bearer {key}")
    assert status == 200 and {"smollm2", "big", "big:mine"} <= {model["id"] for model in body["data"]}
    assert running.get("/health", Host="evil.example")[0] == 403
    code, said = running.stop(signal.SIGTERM)
    assert code == 0
    assert f"listening at {running.url}/v1 for smollm2, big, big:mine\n" in said
    assert f"chat page: {running.url}/\n" in said and "Ctrl-C" in said and said.count(key) == 1
    assert "GET" not in said, "a line for each request only where it was asked for"


@pytest.mark.loopback
@pytest.mark.real
def test_the_default_model_answers_and_is_stopped_by_the_keyboard(smollm2: Path, start: Any) -> None:
    running = start("--log-level", "info", "--no-page", "--max-tokens", "8")
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Say hello."}]}
    request = urllib.request.Request(
        running.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as found:
        answer = json.loads(found.read())
    assert 0 < answer["usage"]["completion_tokens"] <= 8
    assert running.get("/")[0] == 404
    code, said = running.stop(signal.SIGINT)
    assert code == 0 and "POST /v1/chat/completions 200" in said and "chat page" not in said
    assert "Traceback" not in said and "Say hello" not in said
