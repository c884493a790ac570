"""The pages tell the truth: every snippet in them runs, and shows the output that it really has.

Pages hold four kinds of fenced blocks. ```python blocks of a page run in order in one module. In ```console blocks each
line that begins with `$ ` runs in a shell, and the lines below it must appear in its output (`…` stands for anything).
```console norun is for commands that set up a machine; the few that may stand there are listed below. ```text is prose.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/start.md", "docs/concepts.md", "CONTRIBUTING.md")
KINDS = ("python", "console", "console norun", "text")
RUN = re.compile(r"(orchard|python|echo .* \| orchard) .*")
NOT_RUN = re.compile(
    r"make \w+|echo .* \| make -s chat|git clone .*|pip install .*|orchard (pull|rm|adapt|train|compress) .*|orchard serve"
)
CITED = re.compile(r"`((?:tests|tools)/[\w/]+\.py)(?:::(\w+))?`")
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: what kind it is, what it holds, and the line of the page where its text begins."""

    kind: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(m[1].strip(), m[2], text[: m.start(2)].count("\n") + 1) for m in FENCE.finditer(text)]


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block with the output lines shown below it."""
    command: str | None = None
    shown: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command, shown
            command, shown = line[2:], []
        elif line.strip():
            shown.append(line.strip())
    if command is not None:
        yield command, shown


def appears(shown: str, output: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in shown.split("…"))
    return any(re.fullmatch(pattern, line.strip()) for line in output.splitlines())


@pytest.mark.parametrize("page", PAGES)
def test_pages_hold_only_blocks_that_are_tested_or_named(page: str) -> None:
    for block in blocks(page):
        assert block.kind in KINDS, f"{page}:{block.line}: a block of kind {block.kind!r}"
        if block.kind.startswith("console"):
            allowed = NOT_RUN if block.kind == "console norun" else RUN
            for command, _ in commands(block):
                assert allowed.fullmatch(command), f"{page}:{block.line}: {command!r} may not stand in ```{block.kind}"


@pytest.mark.real
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.kind == "python" for b in blocks(page))])
def test_python_snippets_run(page: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page_" + re.sub(r"\W", "_", page))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # configs written in a page find their own module
    for block in blocks(page):
        if block.kind == "python":
            # Blank lines in front make a traceback show the line of the page.
            exec(compile("\n" * (block.line - 1) + block.text, ROOT / page, "exec"), module.__dict__)  # noqa: S102


@pytest.mark.real
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.kind == "console" for b in blocks(page))])
def test_console_snippets_run_and_show_their_real_output(page: str, smollm2: Path, tmp_path: Path) -> None:
    binaries = str(Path(sys.executable).parent)
    env = os.environ | {"PATH": binaries + os.pathsep + os.environ["PATH"], "ORCHARD_OFFLINE": "1", "COLUMNS": "120"}
    for block in blocks(page):
        if block.kind != "console":
            continue
        for command, shown in commands(block):
            done = subprocess.run(
                ["sh", "-c", command], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            place = f"{page}:{block.line}: {command}"
            assert done.returncode == 0, f"{place}\n{done.stderr}"
            for line in shown:
                assert appears(line, done.stdout), f"{place}\nshows {line!r}, printed\n{done.stdout}"


def all_pages() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", all_pages())
def test_links_inside_the_repository_lead_somewhere(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if not re.match(r"[a-z]+:", target):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", all_pages())
def test_cited_tests_and_tools_exist(page: str) -> None:
    for path, name in CITED.findall(FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))):
        if path == "tests/cache/test_half.py":  # the worked example's
            continue
        assert (ROOT / path).is_file(), f"{page} names {path}"
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{page} names {path}::{name}"


def test_the_output_check_can_fail() -> None:
    assert appears("Paris …", "The answer\nParis is it\n")
    assert not appears("Paris", "Paris is it\n")
    assert list(commands(Block("console", "$ orchard a\none\n$ orchard b\n", 1))) == [
        ("orchard a", ["one"]),
        ("orchard b", []),
    ]
