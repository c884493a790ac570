"""A server of a test's own: the real app behind uvicorn on a free port of this machine, on a thread."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import openai
import pytest
import uvicorn
from fastapi import FastAPI

from orchard.serve.app import create_app
from orchard.serve.service import Service
from orchard.serve.settings import ModelSpec, Settings
from orchard.testing import ScriptedModel

SECONDS = 60


class Serving:
    """A running server. `url` has no slash at its end; `base_url` is what OpenAI's package wants."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.service: Service = app.state.service
        with pytest.MonkeyPatch.context() as patch:  # fixtures may be made before a test's own marks are obeyed
            patch.setenv("ORCHARD_NO_NETWORK", "loopback")
            listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.base_url = f"{self.url}/v1"
        config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        _until(lambda: self._server.started or not self._thread.is_alive(), "the server to start")

    def openai(self, **settings: Any) -> openai.OpenAI:
        """OpenAI's own client, which tries once."""
        return openai.OpenAI(
            **{"base_url": self.base_url, "api_key": "none", "max_retries": 0, "timeout": 60.0} | settings
        )

    def facts(self, model: str) -> dict[str, Any]:
        """What a model's engine does."""
        return self.service.hub.facts()[model]

    def settled(self) -> None:
        """Wait until no answer runs or waits."""
        gate = self.service.gate
        _until(lambda: not gate.running and not gate.waiting, "all answers to end")

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(SECONDS)


def serving(settings: Settings, **models: ScriptedModel) -> Serving:
    """`models`: scripts behind names, besides what the settings name."""
    app = create_app(settings)
    for name, model in models.items():
        app.state.service.hub.add(name, model)
    return Serving(app)


def scripted_settings(**more: Any) -> Settings:
    return Settings((ModelSpec("scripted", "scripted"),), **more)


def _until(done: Any, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {SECONDS} s for {what}")
        time.sleep(0.005)
