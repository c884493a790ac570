"""Write the generated pages: a card for each study, their index, and the command line.

Cards come from a study's docstring and its last Report in results/studies/; docs/cli.md comes from the help texts. With
`--check` nothing is written, and the program fails when a page is missing, left over, or not what would be written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchard.core.report import Report

ROOT = Path(__file__).resolve().parent.parent
NOTICE = "<!-- Written by `make docs`. Do not edit. -->\n"
HELP_WIDTH = 100


def technique_pages(root: Path) -> dict[Path, str]:
    """A card for every study and an index of them."""
    from orchard.core.report import Report
    from orchard.studies import available, card, results_folder

    folder = root / "docs" / "techniques"
    pages: dict[Path, str] = {}
    rows = []
    for slug, line in sorted(available().items()):
        pages[folder / f"{slug}.md"] = f"{NOTICE}\n{card(slug).strip()}\n"
        stored = results_folder() / f"{slug}.json"
        rows.append(
            f"| [{slug}]({slug}.md) | {line.rstrip('.')} | {state(Report.load(stored)) if stored.exists() else 'none yet'} |"
        )
    if rows:
        table = "\n".join(["| study | what it is | last Report |", "|---|---|---|", *rows])
        intro = "Each study states what was published and runs it so that it can fail: `orchard study <slug>`."
        pages[folder / "README.md"] = f"{NOTICE}\n# Techniques\n\n{intro}\n\n{table}\n"
    return pages


def state(report: Report) -> str:
    held = sum(claim.passed for claim in report.claims)
    return f"{held} of {len(report.claims)} claims hold"


def cli_page(root: Path) -> dict[Path, str]:
    """Every command's help, as a terminal of fixed width shows it."""
    from typer.main import get_command

    from orchard.cli.main import app

    parts = [NOTICE, "# The command line"]
    for verb in _verbs(get_command(app), []):
        parts.append(f"## {' '.join(['orchard', *verb])}\n\n```text\n{help_text(verb)}\n```")
    return {root / "docs" / "cli.md": "\n\n".join(part.strip() for part in parts) + "\n"}


def _verbs(command: Any, path: list[str]) -> Iterator[list[str]]:
    """A command and those below it, by name."""
    yield path
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _verbs(below, [*path, name])


def help_text(verb: list[str]) -> str:
    from orchard.cli.main import main as run

    os.environ["COLUMNS"] = str(HELP_WIDTH)
    os.environ["NO_COLOR"] = "1"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run([*verb, "--help"])
    if code != 0:
        raise SystemExit(f"orchard {' '.join(verb)} --help ended with {code}")
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def stale(pages: dict[Path, str], root: Path) -> list[Path]:
    """Pages that are missing or differ, and pages of studies that are gone."""
    written = {
        path for path in (root / "docs" / "techniques").glob("*.md") if NOTICE in path.read_text(encoding="utf-8")
    }
    wrong = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    return sorted({*wrong, *(written - pages.keys())})


def write(pages: dict[Path, str], root: Path) -> None:
    for path in stale(pages, root):
        if path not in pages:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[path], encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    pages = technique_pages(options.root) | cli_page(options.root)
    changed = stale(pages, options.root)
    names = [str(path.relative_to(options.root)) for path in changed]
    if options.check:
        for name in names:
            print(f"{name} is out of date; run `make docs`", file=sys.stderr)
        if not names:
            print(f"Generated pages: {len(pages)}, all up to date.")
        return int(bool(names))
    write(pages, options.root)
    print("\n".join(f"wrote {name}" for name in names) or "Every generated page was up to date.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
