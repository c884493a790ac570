"""What the tests of sessions share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the garbage collector: what is freed is freed because nobody holds it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
