"""Models behind a server: loaded when asked for, let go for others, adapters beside their base on one engine."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import openai
import pytest

from orchard.serve.errors import ApiError
from orchard.serve.hub import Hub
from orchard.serve.settings import ModelSpec, Settings
from orchard.session.adapters import Adapters
from orchard.session.model import load
from tests.serve.serving import serving
from tests.session.test_adapters import random_adapter
from tests.tiny import tiny_gguf


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [tiny_gguf(tmp_path / f"{name}.gguf") for name in ("one", "two", "three")]


def hub_of(files: list[Path], **settings: Any) -> Hub:
    return Hub(Settings(tuple(ModelSpec(path.stem, str(path)) for path in files), **settings))


def test_models_are_loaded_when_asked_for_and_let_go_for_others(files: list[Path]) -> None:
    hub = hub_of(files, memory=2 * files[0].stat().st_size + 10)
    assert not any(card.loaded for card in hub.cards()) and hub.ready("one") is None
    held = hub.take("one")
    assert hub.take("one").executor is held.executor, "one engine for all"
    hub.give(hub.take("two"))
    hub.give(hub.take("three"))
    assert [card.loaded for card in hub.cards()] == [True, False, True], "two was idle, one is in use"
    with pytest.raises(ApiError) as refused:
        three = hub.take("three")
        hub.take("two")
    assert (refused.value.status, refused.value.code) == (503, "out_of_memory")
    gone = weakref.ref(held.executor.model.engine)  # type: ignore[union-attr]
    for one in (held, held, three):
        hub.give(one)
    del held, one
    hub.give(hub.take("two"))
    assert [card.loaded for card in hub.cards()] == [False, True, True]
    assert gone() is None, "its memory is free"
    assert (hub.loads, hub.unloads) == (4, 2)


def test_two_who_ask_for_a_model_at_once_get_the_same(files: list[Path]) -> None:
    hub = hub_of(files)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(hub.take("one").executor)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1 and hub.loads == 1


def test_names_that_are_not_there(files: list[Path], tmp_path: Path) -> None:
    hub = hub_of(files[:1])
    for name in ("other", "one:none", "", "one:", ":", "../one", str(files[1])):
        with pytest.raises(ApiError) as refused:
            hub.take(name)
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ApiError) as refused:
        hub_of([broken]).take("broken")
    assert (refused.value.status, refused.value.code) == (503, "model_unavailable")
    with pytest.raises(ApiError) as refused:
        hub_of([tmp_path / "gone.gguf"]).take("gone")
    assert refused.value.code == "model_not_found"


@pytest.mark.loopback
def test_adapters_are_asked_for_by_name(files: list[Path], tmp_path: Path) -> None:
    adapter = random_adapter(Adapters(load(files[0])), tmp_path / "my-adapter", seed=1, size=3.0)
    settings = Settings(
        (ModelSpec("tiny", str(files[0]), {"my-adapter": str(adapter), "gone": str(tmp_path / "gone")}),)
    )
    server = serving(settings)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny", "tiny:my-adapter", "tiny:gone"]

        def ask(model: str) -> str:
            return (
                client.completions.create(model=model, prompt=[5, 6, 7, 8], max_tokens=12, temperature=0)
                .choices[0]
                .text
            )

        base, adapted = ask("tiny"), ask("tiny:my-adapter")
        assert base != adapted
        answers: dict[str, list[str]] = {"tiny": [], "tiny:my-adapter": []}
        threads = [
            threading.Thread(target=lambda name=name: answers[name].append(ask(name))) for name in list(answers) * 4
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {"tiny": [base] * 4, "tiny:my-adapter": [adapted] * 4}, "together as alone"
        with pytest.raises(openai.NotFoundError):
            ask("tiny:gone")
        assert ask("tiny") == base
    finally:
        server.close()
