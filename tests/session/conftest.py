"""Models of these tests are packed into a home of their own, not the user's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def packing_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHARD_HOME", str(tmp_path_factory.mktemp("home")))
        yield
