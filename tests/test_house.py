"""The house itself: the Makefile's set-up, the checks in tools/, and the rule that tests stay off the network."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = Path("orchard", "ops", "kernels", "native")
TARGETS = ("chat", "test", "check", "bench", "docs", "fuzz", "help")


def tool(name: str) -> ModuleType:
    """A program of tools/, imported by its path: tools/ is no package and need not be one."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# The Makefile -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def yard(tmp_path: Path) -> Path:
    """A folder with the Makefile, what its stamps depend on, and room for stand-ins of python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / KERNELS).mkdir(parents=True)
    (tmp_path / KERNELS / "one.cpp").touch()
    (tmp_path / "path").mkdir()
    return tmp_path


def stand_in(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
    path.chmod(0o755)


def make(yard: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    tools = [str(Path(found).parent) for name in ("sh", "touch", "mkdir", "awk") if (found := shutil.which(name))]
    env = {"PATH": os.pathsep.join([str(yard / "path"), *dict.fromkeys(tools)]), "HOME": str(yard)}
    program = shutil.which("make")
    assert program is not None
    return subprocess.run(
        [program, *arguments], cwd=yard, env=env, input=text, capture_output=True, text=True, timeout=60
    )


# A python that makes a "virtual environment" whose python and orchard write down how they were called.
WORKING_PYTHON = """
    case "$1 $2" in
        "-m venv")
            mkdir -p .venv/bin
            cat > .venv/bin/python <<'END'
    #!/bin/sh
    echo "$@" >> calls
    case "$*" in *"$FAIL_ON"*) exit 1;; esac
    echo "noise from pip"
    END
            cat > .venv/bin/orchard <<'END'
    #!/bin/sh
    echo "orchard $@" >> calls
    if [ "$1" = pull ] && [ -e no_model ]; then exit 1; fi
    if [ "$1" = chat ]; then read question; echo "answer to: $question"; fi
    END
            chmod +x .venv/bin/python .venv/bin/orchard;;
        -c*) exit 0;;
    esac
"""


def working_python(yard: Path, fail_on: str = "no such call") -> None:
    stand_in(yard / "path" / "python3", WORKING_PYTHON.replace("$FAIL_ON", fail_on))


def calls(yard: Path) -> list[str]:
    lines = (yard / "calls").read_text().splitlines()
    (yard / "calls").unlink()
    return [line for line in lines if not line.startswith("-c")]


def test_help_names_every_target(yard: Path) -> None:
    done = make(yard)
    assert done.returncode == 0
    for target in TARGETS:
        assert f"make {target} " in done.stdout


def test_an_old_python_is_refused_in_one_line(yard: Path) -> None:
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        stand_in(yard / "path" / name, "exit 1")
    done = make(yard, "-s", "chat")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0 and done.stdout == ""
    assert len(said) == 1 and "Python 3.11 or newer" in said[0]
    assert not (yard / ".venv").exists()


def test_chat_sets_up_and_leaves_stdin_and_stdout_to_the_conversation(yard: Path) -> None:
    working_python(yard)
    done = make(yard, "-s", "chat", text="What is the capital of France?\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "answer to: What is the capital of France?\n"
    assert "Setting up .venv" in done.stderr
    installs = calls(yard)
    assert "install" in installs[0] and installs[0].endswith("torch==2.13.0")
    assert installs[1].endswith("-e .") and not any("[dev]" in call for call in installs)
    assert installs[-1] == "orchard chat"


def test_a_second_time_nothing_is_set_up(yard: Path) -> None:
    working_python(yard)
    make(yard, "-s", "chat", text="one\n")
    calls(yard)
    done = make(yard, "-s", "chat", text="two\n")
    assert done.stderr == ""
    assert not any("install" in call for call in calls(yard))


def test_new_requirements_are_installed(yard: Path) -> None:
    working_python(yard)
    make(yard, "-s", "chat", text="one\n")
    calls(yard)
    future = (yard / ".venv" / ".runtime").stat().st_mtime + 10
    os.utime(yard / "constraints.txt", (future, future))
    make(yard, "-s", "chat", text="two\n")
    assert any("-e ." in call for call in calls(yard))


def test_changed_kernels_are_built_and_nothing_is_installed(yard: Path) -> None:
    working_python(yard)
    make(yard, "-s", "chat", text="one\n")
    assert "setup.py -q build_ext --inplace" in calls(yard)
    make(yard, "-s", "chat", text="two\n")
    assert not any("build_ext" in call for call in calls(yard))
    future = (yard / ".venv" / ".native").stat().st_mtime + 10
    os.utime(yard / KERNELS / "one.cpp", (future, future))
    make(yard, "-s", "chat", text="three\n")
    seen = calls(yard)
    assert "setup.py -q build_ext --inplace" in seen and not any("install" in call for call in seen)


def test_setup_always_looks_after_the_kernels(yard: Path) -> None:
    """So that it mends a library that is missing or stale, whatever the stamps say."""
    working_python(yard)
    for _ in range(2):
        assert make(yard, "-s", "setup").returncode == 0
        assert "setup.py -q build_ext --inplace" in calls(yard)


@pytest.mark.parametrize("step", ["torch==2.13.0", "-e .", "build_ext"])
def test_a_set_up_that_breaks_off_is_taken_up_again(yard: Path, step: str) -> None:
    working_python(yard, fail_on=step)
    assert make(yard, "-s", "chat", text="one\n").returncode != 0
    assert (yard / ".venv" / ".runtime").exists() == (step == "build_ext")
    assert not (yard / ".venv" / ".native").exists()
    shutil.rmtree(yard / ".venv")
    working_python(yard)
    assert make(yard, "-s", "chat", text="two\n").stdout == "answer to: two\n"


def test_tests_add_the_tools_and_run_in_two_processes_of_one_thread(yard: Path) -> None:
    working_python(yard)
    assert make(yard, "-s", "test").returncode == 0
    seen = calls(yard)
    assert any(call.endswith("-e .[dev]") for call in seen)
    assert seen[-1].startswith("-m pytest -n 2")
    assert (yard / ".venv" / ".dev").exists()


def test_tests_do_not_run_without_the_default_model(yard: Path) -> None:
    working_python(yard)
    (yard / "no_model").touch()
    done = make(yard, "-s", "test")
    assert done.returncode != 0 and "could not be fetched" in done.stderr
    assert not any("pytest" in call for call in calls(yard))


def test_the_model_is_fetched_only_when_it_is_missing(yard: Path) -> None:
    working_python(yard)
    make(yard, "-s", "chat", text="one\n")
    assert [call for call in calls(yard) if "pull" in call] == ["orchard pull smollm2 --offline"]


def test_the_pinned_torch_is_the_one_that_make_installs() -> None:
    wanted = re.search(r"^TORCH := (torch==\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert wanted is not None and wanted[1] in (ROOT / "constraints.txt").read_text().splitlines()


def test_nothing_names_a_package_registry() -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run"):
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", (ROOT / name).read_text()), name


def test_ci_runs_the_same_two_targets() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text() and "for target in check test" in script.read_text()


# The checks ---------------------------------------------------------------------------------------------------------------


def test_file_sizes_warns_then_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = tool("file_sizes")
    package = tmp_path / "orchard"
    package.mkdir()
    (package / "fine.py").write_text("x = 1\n" * 400)
    assert sizes.check(tmp_path) == []
    (package / "smell.py").write_text("x = 1\n" * 401)
    assert sizes.main([str(tmp_path)]) == 0
    assert "warning: orchard/smell.py: 401 lines" in capsys.readouterr().err
    (package / "long.py").write_text("x = 1\n" * 601)
    assert sizes.main([str(tmp_path)]) == 1
    assert "error: orchard/long.py: 601 lines" in capsys.readouterr().err


def test_file_sizes_refuses_a_fourth_level(tmp_path: Path) -> None:
    sizes = tool("file_sizes")
    third = tmp_path / "orchard" / "a" / "b" / "c"
    third.mkdir(parents=True)
    (third / "part.py").touch()
    assert sizes.check(tmp_path) == []
    (third / "d").mkdir()
    (third / "d" / "part.py").touch()
    assert [finding.fatal for finding in sizes.check(tmp_path)] == [True]


@pytest.mark.parametrize(
    ("module", "imported", "reason"),
    [
        ("orchard.text.chat", "orchard.nn.linear", "text may import core"),
        ("orchard.core.config", "orchard.ops.rope", "core may import nothing"),
        ("orchard.cache.store", "orchard.nn.linear", "cache may import core ops"),
        ("orchard.session.session", "orchard.recipes.small", "session may import core ops"),
        ("orchard.models.language.decoder", "orchard.weights.gguf", "models may import core ops cache nn"),
        ("orchard.train.loop", "orchard", "only cli and studies use the top-level names"),
        ("orchard.weights.gguf", "gguf", "gguf is never imported"),
        ("orchard.weights.hub", "requests", "requests is never imported"),
        ("orchard.widgets.box", "orchard.core.errors", "widgets is not in the table"),
    ],
)
def test_wrong_imports_are_refused_with_the_reason(module: str, imported: str, reason: str) -> None:
    assert reason in tool("imports").refusal(module, imported)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("orchard.text.chat", "orchard.core.errors"),
        ("orchard.text.chat", "orchard.text.tokenizer"),
        ("orchard.studies.axlearn", "orchard.session.model"),
        ("orchard.cli.respond", "orchard"),
        ("orchard", "orchard.session.model"),
        ("orchard.nn.linear", "torch"),
    ],
)
def test_right_imports_pass(module: str, imported: str) -> None:
    assert tool("imports").refusal(module, imported) == ""


def test_import_check_finds_hidden_imports_and_folders_that_would_not_ship(tmp_path: Path) -> None:
    """In a program of its own: the package under test here is another `orchard`."""
    package = tmp_path / "orchard"
    for name in ("core", "text"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "core" / "config.py").write_text("from orchard.core import helper\n")
    (package / "core" / "helper.py").write_text("def late():\n    import torch\n    return torch\n")
    (package / "text" / "chat.py").write_text("def late():\n    import pickle\n    return pickle\n")
    (package / "loose").mkdir()
    (package / "loose" / "part.py").touch()
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "imports.py", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "orchard.core.config -> orchard.core.helper -> torch" in done.stderr
    assert "orchard.text.chat -> pickle" in done.stderr
    assert "orchard/loose/part.py is not part of the package" in done.stderr


def test_stale_pages_are_found_and_written_again(tmp_path: Path) -> None:
    docs = tool("docs")
    folder = tmp_path / "docs" / "techniques"
    folder.mkdir(parents=True)
    page, gone, by_hand = folder / "one.md", folder / "gone.md", folder / "by_hand.md"
    pages = {page: docs.NOTICE + "right"}
    gone.write_text(docs.NOTICE + "a study that is no more")
    by_hand.write_text("not generated, so none of our business")
    assert docs.stale(pages, tmp_path) == [gone, page]
    docs.write(pages, tmp_path)
    assert docs.stale(pages, tmp_path) == [] and not gone.exists() and by_hand.exists()
    page.write_text(docs.NOTICE + "edited by hand")
    assert docs.stale(pages, tmp_path) == [page]


def test_the_command_line_page_shows_every_verb(tmp_path: Path) -> None:
    [(path, text)] = tool("docs").cli_page(tmp_path).items()
    assert path == tmp_path / "docs" / "cli.md"
    for verb in ("respond", "chat", "pull", "list", "show", "rm", "study", "doctor"):
        assert f"## orchard {verb}\n" in text
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 100


# The network --------------------------------------------------------------------------------------------------------------


def test_sockets_are_refused_in_tests() -> None:
    with pytest.raises(RuntimeError, match="blocked"):
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    with pytest.raises(RuntimeError, match="blocked"):
        socket.getaddrinfo("localhost", 80)
    with socket.socket() as one, pytest.raises(RuntimeError, match="blocked"):
        one.connect_ex(("127.0.0.1", 9))


def test_sockets_are_refused_in_programs_that_tests_start() -> None:
    program = "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the network is blocked in tests" in done.stderr


@pytest.mark.loopback
def test_loopback_reaches_this_machine_and_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
    with socket.socket() as one, pytest.raises(RuntimeError, match="blocked"):
        one.connect(("192.0.2.1", 80))
    with pytest.raises(RuntimeError, match="blocked"):
        socket.getaddrinfo("example.org", 80)


def test_sockets_between_processes_pass(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "s"))
        server.listen()
        client.connect(str(tmp_path / "s"))


def test_empty_home_is_empty_and_in_use(empty_home: Path) -> None:
    from orchard.weights.library import Library

    assert Library().home == empty_home and Library().list() == []
