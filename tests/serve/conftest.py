"""Servers that the tests of `orchard.serve` share. Tests that use them are marked `loopback` (and `real` with `server`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchard.serve.settings import Limits, ModelSpec, Settings
from orchard.testing import ScriptedModel
from tests.serve.serving import Serving, scripted_settings, serving
from tests.serve.wire import ServerProcess


@pytest.fixture(scope="session")
def server(own_home: Path, smollm2: Path) -> Iterator[Serving]:
    """The default model behind the real app; one server for all tests of a process. With vectors where minilm is there."""
    from orchard.session.shelf import installed

    known = ("smollm2", *(name for name in ("minilm",) if name in installed()))
    found = serving(Settings(tuple(ModelSpec(name, name) for name in known)))
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def scripted_server() -> Iterator[Callable[..., Serving]]:
    """`scripted_server(answers)`: a server whose model `scripted` answers so. `answers` may be a `ScriptedModel`; `limits` and
    more settings by name; `models`: further scripts by name."""
    open_ones: list[Serving] = []

    def made(
        answers: Sequence[Any] | ScriptedModel = (),
        *,
        limits: Limits | None = None,
        models: dict[str, ScriptedModel] | None = None,
        **settings: Any,
    ) -> Serving:
        model = answers if isinstance(answers, ScriptedModel) else ScriptedModel(answers)
        more = {"limits": limits} if limits is not None else {}
        found = serving(scripted_settings(**more, **settings), scripted=model, **(models or {}))
        open_ones.append(found)
        return found

    yield made
    for one in open_ones:
        one.close()


@pytest.fixture
def own_server() -> Iterator[Callable[..., ServerProcess]]:
    """`own_server(limits=…)`: a server in a process of its own, for tests that harm or end it."""
    made: list[ServerProcess] = []

    def start(**asked: Any) -> ServerProcess:
        made.append(ServerProcess(**asked))
        return made[-1]

    yield start
    for one in made:
        one.close()
