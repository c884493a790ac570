"""A served mixture whose experts are on disk: the same answers, several at once, and a disk that goes away for a while."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import openai
import pytest

from orchard.ops.kernels.native import library, why_not
from orchard.serve.settings import ModelSpec, Settings
from orchard.session import experts
from orchard.session.model import load
from tests.serve.serving import serving
from tests.session.export_models import folder_of

pytestmark = [pytest.mark.loopback, pytest.mark.skipif(library() is None, reason=why_not())]


def test_one_request_fails_with_the_disk_and_others_go_on(
    tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_make_apart", experts.make)
    source = folder_of(tmp_path / "tiny-moe", "qwen3-moe-all")
    whole = load(source)
    server = serving(Settings((ModelSpec("tiny", str(source), experts_budget=1 << 30),)))
    try:
        client = server.openai()

        def ask(first: int) -> str:
            found = client.completions.create(model="tiny", prompt=[first, 6, 7], max_tokens=10, temperature=0)
            return found.choices[0].text

        expected = {first: whole.generate([first, 6, 7], max_tokens=10).text for first in range(5, 9)}
        answers: dict[int, str] = {}
        threads = [threading.Thread(target=lambda n=n: answers.__setitem__(n, ask(n))) for n in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == expected
        held = server.service.hub.ready("tiny")
        assert held is not None and held.executor is not None
        program = held.executor.model.experts
        assert program is not None
        path = program.resident.records.path
        data = path.read_bytes()
        for layer, unit in list(program.resident.table.slot):  # nothing is in memory any more
            program.resident.table.remove((layer, unit))
        os.truncate(path, 4096)
        with pytest.raises(openai.APIStatusError) as failed:
            ask(5)
        assert failed.value.status_code >= 500
        path.write_bytes(data)
        assert ask(5) == expected[5]
    finally:
        server.close()
