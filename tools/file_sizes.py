"""Fail when a Python file has grown too long or a folder lies too deep; warn before that.

A file holds one idea. Above 400 lines it usually holds two, so that is said; above 600 the check fails and the file has
to be split. Folders go at most three levels below `orchard/`, so that a path stays something a person can remember.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("orchard", "tests", "bench", "tools")
SMELL_LINES = 400
FAIL_LINES = 600
MAX_DEPTH = 3


@dataclass(frozen=True)
class Finding:
    """One remark about one path; a `fatal` one makes the check fail."""

    path: Path
    message: str
    fatal: bool

    def __str__(self) -> str:
        return f"{'error' if self.fatal else 'warning'}: {self.path}: {self.message}"


def python_files(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted(path for path in (root / folder).rglob("*.py") if "__pycache__" not in path.parts)


def long_files(root: Path) -> Iterator[Finding]:
    for path in python_files(root):
        lines = path.read_bytes().count(b"\n")
        if lines > SMELL_LINES:
            fatal = lines > FAIL_LINES
            limit = FAIL_LINES if fatal else SMELL_LINES
            yield Finding(path.relative_to(root), f"{lines} lines (above {limit}): split it by idea", fatal)


def deep_folders(root: Path) -> Iterator[Finding]:
    package = root / "orchard"
    for folder in sorted({path.parent for path in package.rglob("*.py") if "__pycache__" not in path.parts}):
        depth = len(folder.relative_to(package).parts)
        if depth > MAX_DEPTH:
            yield Finding(folder.relative_to(root), f"{depth} levels below orchard/ (at most {MAX_DEPTH})", fatal=True)


def check(root: Path) -> list[Finding]:
    return [*long_files(root), *deep_folders(root)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    root: Path = parser.parse_args(arguments).root
    findings = check(root)
    for finding in findings:
        print(finding, file=sys.stderr)
    failed = any(finding.fatal for finding in findings)
    if not failed:
        print(f"File sizes: {sum(1 for _ in python_files(root))} files, none above {FAIL_LINES} lines.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
