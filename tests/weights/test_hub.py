"""Pulling from a hub: a small one on this machine that can cut, corrupt, refuse and redirect."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchard.core.errors import DownloadFailed, ModelNotFound, Offline, OrchardError, UnsupportedFormat
from orchard.weights.hub import RemoteFile, choose
from orchard.weights.library import Library
from orchard.weights.pull import pull

pytestmark = pytest.mark.loopback
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
REPO = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"raise SystemExit",
    "onnx/model.safetensors": b"other",
}


class FakeHub(ThreadingHTTPServer):
    """Serves one repository, `org/name`. `trouble` maps a file (or `info`) to what goes wrong with it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = dict(REPO)
        self.trouble: dict[str, Any] = {}
        self.requests: list[tuple[str, str]] = []  # (file, Range header)
        self.agents: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def info(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\x00" % len(content) + content).hexdigest()
            row: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
            if len(content) > 1000 or name.endswith(".gguf"):
                digest = hashlib.sha256(content).hexdigest()
                row["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(row)
        return {"id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": siblings, "tags": ["license:mit"]}


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        return None

    def do_GET(self) -> None:
        self.server.agents.add(self.headers.get("User-Agent", ""))
        if self.path.startswith("/api/models/"):
            if "org/name" not in self.path:
                return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if "info" in self.server.trouble:
                return self.reply(*self.server.trouble["info"])
            return self.reply(200, json.dumps(self.server.info()).encode(), {"Content-Type": "application/json"})
        name = self.path.removeprefix("/cdn").removeprefix(f"/org/name/resolve/{COMMIT}/")
        if "redirect" in self.server.trouble and not self.path.startswith("/cdn"):
            return self.reply(302, b"", {"Location": f"/cdn{self.path}"})
        self.send_file(name)

    def send_file(self, name: str) -> None:
        wanted = self.headers.get("Range", "")
        self.server.requests.append((name, wanted))
        trouble = self.server.trouble.get(name)
        if isinstance(trouble, tuple):
            return self.reply(*trouble)
        content = self.server.files[name]
        if trouble == "corrupt":
            content = b"x" + content[1:]
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and trouble != "no ranges" else 0
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        if trouble == "cut":  # half of what is left, then the line goes dead
            del self.server.trouble[name]
            self.reply(206 if start else 200, content[start:], headers, stop_after=(len(content) - start) // 2)
            self.close_connection = True
            return
        self.reply(206 if start else 200, content[start:], headers)

    def reply(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, stop_after: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:stop_after])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 64 * 1024)  # what a broken line can lose; 10 MB as it comes
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_takes_safetensors_with_their_companions_and_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    entry = pull("org/name", home=tmp_path)
    assert set(entry.files) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (entry.path / "model.safetensors").read_bytes() == WEIGHTS
    assert (entry.source, entry.version, entry.licence) == ("hub:org/name", COMMIT, "mit")
    assert entry.verify() == "" and entry.model_path == entry.path
    assert {name for name, _ in hub.requests} == set(entry.files)
    assert sorted(path.name for path in entry.path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "orchard.json",
        "tokenizer.json",
    ]
    before = len(hub.requests)
    assert pull("org/name", home=tmp_path, offline=True).pulled == entry.pulled
    assert len(hub.requests) == before


def test_a_redirect_to_a_file_store_is_followed(hub: FakeHub, tmp_path: Path) -> None:
    hub.trouble["redirect"] = True
    assert pull("org/name", home=tmp_path).verify() == ""


def test_a_cut_transfer_goes_on_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    hub.trouble["model.safetensors"] = "cut"
    entry = pull("org/name", home=tmp_path)
    assert entry.verify() == ""
    ranges = [wanted for name, wanted in hub.requests if name == "model.safetensors"]
    assert ranges[0] == "" and ranges[1].startswith("bytes=") and len(ranges) == 2


def test_an_interrupted_pull_goes_on_where_it_was(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import file_download

    hub.trouble["model.safetensors"] = "cut"
    sleep = file_download.time.sleep

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(file_download.time, "sleep", interrupted)  # where it waits before it tries again
    with pytest.raises(KeyboardInterrupt):
        pull("org/name", home=tmp_path)
    monkeypatch.setattr(file_download.time, "sleep", sleep)
    library = Library(tmp_path)
    assert library.list() == []
    kept = library.leftovers()
    assert kept > len(WEIGHTS) // 2 - 100_000
    hub.requests.clear()
    assert pull("org/name", home=tmp_path).verify() == ""
    assert [name for name, _ in hub.requests] == ["model.safetensors"]  # the small files were whole already
    start = int(hub.requests[0][1].removeprefix("bytes=").rstrip("-"))
    assert 0 < start <= kept
    assert library.leftovers() == 0


def test_a_server_without_ranges_starts_again(hub: FakeHub, tmp_path: Path) -> None:
    part = tmp_path / "models" / ".partial" / "org--name"
    part.mkdir(parents=True)
    digest = hashlib.sha256(WEIGHTS).hexdigest()[:16]
    (part / f".model.safetensors.{digest}.part").write_bytes(WEIGHTS[:1000])
    hub.trouble["model.safetensors"] = "no ranges"
    assert pull("org/name", home=tmp_path).verify() == ""
    assert ("model.safetensors", "bytes=1000-") in hub.requests


def test_rests_of_another_version_are_not_used(hub: FakeHub, tmp_path: Path) -> None:
    part = tmp_path / "models" / ".partial" / "org--name"
    part.mkdir(parents=True)
    (part / ".model.safetensors.ffffffffffffffff.part").write_bytes(b"old")
    (part / "model-old.safetensors").write_bytes(b"old")
    (part / "config.json").write_bytes(b"old")
    entry = pull("org/name", home=tmp_path)
    assert set(entry.files) == {"config.json", "tokenizer.json", "model.safetensors"} and entry.verify() == ""
    assert (entry.path / "config.json").read_bytes() == REPO["config.json"]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_wrong_checksum_is_refused_and_thrown_away(hub: FakeHub, tmp_path: Path, file: str) -> None:
    pull("org/name", home=tmp_path)
    hub.trouble[file] = "corrupt"
    with pytest.raises(DownloadFailed, match="wrong checksum"):
        pull("org/name", home=tmp_path, force=True)
    present = Library(tmp_path).find("org/name")
    assert present is not None and present.verify() == ""  # what was there is still there
    hub.trouble.clear()
    assert pull("org/name", home=tmp_path, force=True).verify() == ""


REFUSALS: dict[str, tuple[dict[str, Any], type[OrchardError], str]] = {
    "unknown": ({"info": (404, b"{}", {"X-Error-Code": "RepoNotFound"})}, ModelNotFound, "HF_TOKEN"),
    "unauthorised": ({"info": (401, b"{}", {"X-Error-Code": "RepoNotFound"})}, ModelNotFound, "HF_TOKEN"),
    "bad token": ({"info": (401, b'{"error": "Invalid"}', {"X-Error-Message": "Invalid"})}, OrchardError, "HF_TOKEN"),
    "gated": ({"model.safetensors": (403, b"", {"X-Error-Code": "GatedRepo"})}, DownloadFailed, "terms"),
    "file gone": ({"model.safetensors": (404, b"", {"X-Error-Code": "EntryNotFound"})}, ModelNotFound, "again"),
    "server error": ({"model.safetensors": (500, b"", {})}, DownloadFailed, "same command"),
    "nonsense": ({"info": (200, b"<html>", {})}, DownloadFailed, "same command"),
    "no list": ({"info": (200, b'{"id": "org/name", "sha": "1"}', {})}, UnsupportedFormat, "never taken"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_refusals_are_typed_and_say_what_to_do(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    trouble, error, hint = REFUSALS[kind]
    hub.trouble.update(trouble)
    with pytest.raises(error) as caught:
        pull("org/name", home=tmp_path)
    assert hint in caught.value.hint and "\n" not in caught.value.message
    assert Library(tmp_path).list() == []


def test_an_unreachable_hub_is_a_download_that_failed(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match="cannot be reached") as caught:
        pull("org/name", home=tmp_path)
    assert "HTTPS_PROXY" in caught.value.hint


@pytest.mark.parametrize("config", [b'{"model_type": "banana"}', b"[]", b"{", b"[" * 100_000])
def test_a_model_that_could_not_run_is_refused_before_its_weights_come(
    hub: FakeHub, tmp_path: Path, config: bytes
) -> None:
    hub.files["config.json"] = config
    with pytest.raises(OrchardError) as caught:
        pull("org/name", home=tmp_path)
    assert "\n" not in caught.value.message and caught.value.hint
    assert "model.safetensors" not in {file for file, _ in hub.requests}
    assert Library(tmp_path).list() == [] and Library(tmp_path).leftovers() == 0


def test_offline_needs_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(Offline):
        pull("org/name", home=tmp_path, offline=True)
    assert hub.requests == []


def test_a_chosen_gguf_is_an_entry_of_its_own(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"m-Q8_0.gguf": b"GGUF8", "m-Q4_K_M.gguf": b"GGUF4", "README.md": b""}
    plain = pull("org/name", home=tmp_path)
    chosen = pull("org/name:m-Q8_0.gguf", home=tmp_path)
    assert plain.model_path.read_bytes() == b"GGUF4" and chosen.model_path.read_bytes() == b"GGUF8"
    assert {entry.name for entry in Library(tmp_path).list()} == {"org/name", "org/name:m-Q8_0.gguf"}
    with pytest.raises(ModelNotFound) as caught:
        pull("org/name:other.gguf", home=tmp_path)
    assert "m-Q8_0.gguf" in caught.value.hint


def test_hostile_names_are_never_written(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"../../evil-Q8_0.gguf": b"x", "/abs-Q8_0.gguf": b"x", "ok-Q8_0.gguf": b"GGUF"}
    entry = pull("org/name", home=tmp_path / "home")
    assert set(entry.files) == {"ok-Q8_0.gguf"}
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


def test_no_telemetry_is_sent(hub: FakeHub, tmp_path: Path) -> None:
    pull("org/name", home=tmp_path)
    assert len(hub.agents) == 1 and "torch" not in next(iter(hub.agents))


def names(files: list[str], wanted: str | None = None) -> list[str]:
    remote = [RemoteFile(name=name, bytes=1, sha256="0" * 64) for name in files]
    return [file.name for file in choose(remote, wanted, repo="org/name")]


def test_choosing_files() -> None:
    sharded = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert set(names([*sharded, "config.json", "consolidated.safetensors", "x.gguf"])) == {*sharded, "config.json"}
    assert names(["a.IQ2_XS.gguf", "a.Q8_0.gguf", "a.q4_k_m.gguf", "mmproj-Q4_K_M.gguf"]) == ["a.q4_k_m.gguf"]
    assert names(["a-IQ2_XS.gguf"]) == ["a-IQ2_XS.gguf"]
    assert names(["model.safetensors", "a-F16.gguf"]) == ["a-F16.gguf"]  # no config.json
    for hopeless in (["pytorch_model.bin", "config.json"], ["a-Q8_0-00001-of-00002.gguf"], []):
        with pytest.raises(UnsupportedFormat):
            names(hopeless)
