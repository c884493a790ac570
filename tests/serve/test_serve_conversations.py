"""Served conversations in fixed memory: a client sends all of it every time, and the server reads only what is new."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orchard.ops.kernels.native import library, why_not
from orchard.serve.settings import ModelSpec, Settings
from orchard.session.model import load
from tests.serve.serving import serving
from tests.session.export_models import folder_of

pytestmark = [pytest.mark.loopback, pytest.mark.skipif(library() is None, reason=why_not())]


@pytest.mark.parametrize(("turns", "size"), [(60, 300_000), pytest.param(300, 1_000_000, marks=pytest.mark.long)])
def test_a_long_conversation_stays_within_the_budget(tmp_path: Path, empty_home: Path, turns: int, size: int) -> None:
    source = folder_of(tmp_path / "tiny", "llama")
    plain, most = load(source), 0
    server = serving(Settings((ModelSpec("tiny", str(source), conversation=size, conversations=2),)))
    words = np.random.default_rng(0).integers(3, plain.runner.config.vocab, (turns, 6)).tolist()
    try:
        client = server.openai()
        prompt: list[int] = []
        for turn, said in enumerate(words):
            prompt += said
            found = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)
            details = found.usage.prompt_tokens_details
            if turn:
                assert details.cached_tokens >= len(prompt) - 8
            else:
                expected = plain.generate(prompt, max_tokens=2).text
                assert found.choices[0].text == expected
            held = server.service.hub.ready("tiny").executor.model.runner
            most = max(most, held.nbytes)
        (talk,) = held.conversations
        assert most <= size and talk.forgotten > 1 and not talk.restarts
        assert talk.kept.peak <= talk.kept.budget + talk.kept.block and len(prompt) > talk.kept.budget + talk.kept.block
    finally:
        server.close()
