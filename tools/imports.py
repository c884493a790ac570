"""Check every import between the folders of `orchard/` against one table: the arrows of docs/architecture.md.

`lint-imports` holds the order of the layers (see .importlinter). This program holds the exact arrows, and unlike a list
of contracts it does not mind folders that are planned but not there yet. It reads the import graph statically, so an
import inside a function counts like one at the top of a file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

PACKAGE = "orchard"


def _arrows() -> dict[str, frozenset[str]]:
    """Folder → the folders it may import."""
    table = {
        "core": "",
        "ops": "core",
        "cache": "core ops",
        "nn": "core ops cache",
        "models": "core ops cache nn",
        "weights": "core nn models",
        "text": "core",
        "data": "core text",
        "transforms": "core ops cache nn",
        "objectives": "core ops",
        "generate": "core ops cache text",
        "posteriors": "core ops",
        "train": "core ops data objectives generate",
        "evals": "core data text generate posteriors",
        "session": "core ops text models weights transforms generate",
    }
    arrows = {folder: frozenset(allowed.split()) for folder, allowed in table.items()}
    arrows["recipes"] = frozenset(table)
    arrows["studies"] = frozenset(arrows)
    arrows["bench"] = frozenset(arrows) - {"studies"}
    arrows["fm"] = arrows["testing"] = frozenset({"session", "core"})
    arrows["serve"] = frozenset({"session", "core"})
    arrows["studio"] = frozenset({"recipes", "weights", "evals", "core"})
    arrows["cli"] = frozenset(arrows)
    return arrows


ARROWS = _arrows()
# The lazy names of the package itself (`orchard.load` …) are for users; inside, only these may call them.
MAY_USE_THE_TOP = frozenset({"cli", "studies"})
# These are not modules of the package but programs for another environment, where the peers of a benchmark are.
PEER_PROGRAMS = "orchard.bench.workers.peer_"
# References to compare with, and ways to run code that came with a file: never in the package, not even lazily.
NEVER = frozenset({"transformers", "peft", "gguf", "pickle", "requests"})
# Modules that must stay cheap, with what none of their imports may lead to.
WITHOUT = {"orchard.core.config": frozenset({"torch"})}


def folder_of(module: str) -> str:
    """`orchard.text.chat` → `text`; the package itself → the empty string."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def violations(graph: grimp.ImportGraph) -> Iterator[str]:
    own = sorted(module for module in graph.modules if module.split(".")[0] == PACKAGE)
    for module in own:
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            reason = refusal(module, imported)
            if reason:
                yield f"{module} -> {imported} (not allowed: {reason})"
    for module, banned in WITHOUT.items():
        if module not in graph.modules:
            continue
        for package in sorted(banned & graph.modules):
            chain = graph.find_shortest_chain(importer=module, imported=package)
            if chain:
                yield f"{' -> '.join(chain)} (not allowed: {module} must not lead to {package})"


def refusal(module: str, imported: str) -> str:
    """Why `module` may not import `imported`; empty when it may."""
    source = folder_of(module)
    if imported.split(".")[0] != PACKAGE:
        never = imported in NEVER and not module.startswith(PEER_PROGRAMS)
        return f"{imported} is never imported in {PACKAGE}/" if never else ""
    target = folder_of(imported)
    if source in ("", "__main__") or source == target:
        return ""
    if source not in ARROWS:
        return f"{source} is not in the table of tools/imports.py"
    if target == "":
        return (
            "" if source in MAY_USE_THE_TOP else f"only {' and '.join(sorted(MAY_USE_THE_TOP))} use the top-level names"
        )
    if target in ARROWS[source]:
        return ""
    allowed = [name for name in ARROWS if name in ARROWS[source]]
    return f"{source} may import {' '.join(allowed) or 'nothing'}"


def unseen(root: Path, graph: grimp.ImportGraph) -> Iterator[str]:
    """Files that the graph does not hold: some folder above them has no `__init__.py`, so nothing would ship them."""
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if module not in graph.modules:
            yield f"{path.relative_to(root)} is not part of the package (a folder above it has no __init__.py)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    root: Path = parser.parse_args(arguments).root
    sys.path.insert(0, str(root))
    graph = grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)
    found = [*unseen(root, graph), *violations(graph)]
    for violation in found:
        print(violation, file=sys.stderr)
    if not found:
        own = sum(1 for module in graph.modules if module.split(".")[0] == PACKAGE)
        print(f"Import arrows: {own} modules, every import follows the table.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
