"""OpenAI's own package, for tests that talk to the server of all tests."""

from __future__ import annotations

import openai
import pytest

from tests.serve.serving import Serving


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return server.openai()
