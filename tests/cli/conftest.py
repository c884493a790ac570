"""A model that is small enough for every test of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_gguf


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one layer and random weights, whose tokens are bytes."""
    return tiny_gguf(tmp_path_factory.mktemp("model") / "small.gguf")
