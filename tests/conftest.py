"""What every test gets: no network, one thread, a home of its own, a repeatable hypothesis, and the default model on request."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_NETWORK = ROOT / "tools" / "no_network"

# Before torch or transformers are imported anywhere: they read these once. Programs started by tests inherit them.
# One thread of the native engine unless a test asks for more: several test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ORCHARD_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["ORCHARD_NO_NETWORK"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(NO_NETWORK), os.environ.get("PYTHONPATH", "")]))

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

_spec = importlib.util.spec_from_file_location("no_network", NO_NETWORK / "sitecustomize.py")
assert _spec is not None and _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))  # installs the hook in this process

# ORCHARD_TEST_EXAMPLES=400 make test tries more of whatever has no number of its own.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=os.environ.get("ORCHARD_TEST_RANDOM", "") in ("", "0"),
    max_examples=int(os.environ.get("ORCHARD_TEST_EXAMPLES", "40")),
)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the native library is not there, files that import its runner are skipped, with the reason.

    Where it should be there, tests/ops/test_native_build.py fails.
    """
    from orchard.ops.kernels.native import why_not

    missing = why_not()
    for item in items if missing else ():
        if hasattr(getattr(item, "module", None), "NativeRunner"):
            item.add_marker(pytest.mark.skip(reason=f"no native kernels: {missing}"))


@pytest.fixture(autouse=True)
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets are refused, here and in programs that a test starts, unless the test is marked otherwise."""
    if request.node.get_closest_marker("loopback"):
        monkeypatch.setenv("ORCHARD_NO_NETWORK", "loopback")
    if request.node.get_closest_marker("network"):
        for name in ("ORCHARD_NO_NETWORK", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def modes() -> Iterator[None]:
    """A test that leaves gradients switched off breaks others, far from where it stands."""
    yield
    import torch

    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), "gradients were left switched off"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests run several processes at once; more threads would only fight over the cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for this run of the tests, so that what they pack is not left in the user's: with the models of the real library
    where there are any, and shared by the processes of the run, so that a model is packed once."""
    from orchard.weights.library import Library

    base = tmp_path_factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "orchard-home"
    home.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (home / "models").symlink_to(Library().models, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHARD_HOME", str(home))
        # Models that came with the checkout are joined into a library by being named: a test that means them unsets this.
        patch.setenv("ORCHARD_WEIGHTS", str(home / "no-weights"))
        yield home


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model store of this test's own (ORCHARD_HOME, for programs that it starts as well)."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("ORCHARD_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def smollm2(own_home: Path) -> Path:
    """The default model's file. Without it the tests marked `real` fail: a skip would look like a pass."""
    from orchard.core.errors import OrchardError
    from orchard.weights.library import Library

    try:
        return Library().resolve("smollm2")
    except OrchardError as error:
        pytest.fail(f"the default model is needed: {error}. Run `make test`, or `orchard pull smollm2` first.")
