"""`import orchard` and `orchard --help` stay light. How long they take is measured by bench/startup.py."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "numpy", "pydantic", "rich", "tokenizers", "jinja2", "safetensors", "llguidance", "transformers")
# `import orchard` brings in a handful of its own modules and what they take from the standard library.
MODULE_BUDGET = 60


def loaded_by(code: str) -> set[str]:
    """Names of the modules that running `code` in a fresh interpreter adds to those of a bare one."""
    program = (
        "import json, sys; before = set(sys.modules)\n"
        f"{code}\n"
        "print('\\n' + json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_orchard_loads_nothing_heavy() -> None:
    loaded = loaded_by("import orchard")
    assert "orchard" in loaded
    assert not loaded & set(HEAVY)


def test_import_orchard_stays_within_its_module_budget() -> None:
    loaded = loaded_by("import orchard")
    assert len(loaded) <= MODULE_BUDGET, sorted(loaded)


def test_the_config_tree_needs_no_torch() -> None:
    assert not loaded_by("import orchard.core.config") & {"torch", "numpy"}


def test_help_loads_no_torch() -> None:
    loaded = loaded_by(
        "import contextlib\n"
        "from orchard.cli.main import run\n"
        "sys.argv = ['orchard', '--help']\n"
        "with contextlib.suppress(SystemExit):\n"
        "    run()\n"
    )
    assert "orchard.cli.main" in loaded
    assert not loaded & {"torch", "numpy", "tokenizers", "transformers", "pydantic", "safetensors"}


def test_dir_lists_the_public_names_without_loading_them() -> None:
    loaded = loaded_by("import orchard; assert {'load', 'study', 'Report'} <= set(dir(orchard))")
    assert "torch" not in loaded
