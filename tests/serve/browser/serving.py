"""A server of a test's own: the real app under uvicorn, in a thread, on this machine only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI

from orchard.serve.app import create_app
from orchard.serve.gate import Gate
from orchard.serve.settings import ModelSpec, Settings
from orchard.session.executors.scripted import ScriptedModel


@contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The address of the running app. Port 0: any that is free. Leaving stops it, answers that run included."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive() and time.monotonic() < end, "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"


class Scripted(NamedTuple):
    url: str
    model: ScriptedModel
    gate: Gate


@contextmanager
def scripted(*answers: Any, port: int = 0, **settings: Any) -> Iterator[Scripted]:
    """The real app over a model that answers by a script."""
    model = ScriptedModel(list(answers), repeat=True)
    app = create_app(Settings(models=(ModelSpec("scripted", "scripted"),), **settings))
    app.state.service.hub.add("scripted", model)
    with serving(app, port) as url:
        yield Scripted(url, model, app.state.service.gate)
