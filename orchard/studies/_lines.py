"""Counting lines: of a function, between two versions of some files, and how the count grows.

Reads source text only; needs no torch.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Grid = Mapping[tuple[int, int], int]
"""Lines by (models, variants)."""


def code_lines(source: str) -> int:
    """Lines that hold code: blank lines, comments and docstrings are not counted."""
    words = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            words.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            words -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(words)


def function_lines(function: Callable[..., Any]) -> int:
    return code_lines(textwrap.dedent(inspect.getsource(function)))


def entry_lines(module: Any, name: str) -> dict[str, int]:
    """Lines of each entry of a dictionary that a module writes out, by key."""
    for node in ast.parse(inspect.getsource(module)).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            table: Any = node.value  # type: ignore[attr-defined]
            return {
                key.value: value.end_lineno - key.lineno + 1
                for key, value in zip(table.keys, table.values, strict=True)
            }
    raise LookupError(name)


def sources(folders: Iterable[Path]) -> dict[str, str]:
    """Every Python file under some folders, by path."""
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return {path.as_posix(): path.read_text(encoding="utf-8") for path in files}


def changed_lines(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    """Lines added, removed or altered in files that are in both; an altered line counts once. New files are free."""
    total = 0
    for name in before.keys() & after.keys():
        old, new = before[name].splitlines(), after[name].splitlines()
        for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            total += max(i2 - i1, j2 - j1) if kind != "equal" else 0
    return total + sum(len(before[name].splitlines()) for name in before.keys() - after.keys())


def importers(files: Mapping[str, str], module: str) -> list[str]:
    """`path:line` of every import of a module (or of something in it): lines that name a part outside its own files."""
    found = []
    parent, _, last = module.rpartition(".")
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                inside = f"{node.module}.".startswith(f"{module}.")
                if inside or (node.module == parent and any(name.name == last for name in node.names)):
                    found.append(f"{path}:{node.lineno}")
            elif isinstance(node, ast.Import) and any(f"{name.name}.".startswith(f"{module}.") for name in node.names):
                found.append(f"{path}:{node.lineno}")
    return found


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and constant of the least-squares line."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return slope, mean_y - slope * mean_x


def growth(lines: Grid) -> str:
    """The class of growth in models (N) and variants (M), read off the corners of what was measured."""
    models, variants = sorted({n for n, _ in lines}), sorted({m for _, m in lines})
    (n0, n1), (m0, m1) = (models[0], models[-1]), (variants[0], variants[-1])
    in_models, in_variants = lines[n1, m1] - lines[n0, m1], lines[n1, m1] - lines[n1, m0]
    together = in_models - (lines[n1, m0] - lines[n0, m0])
    if in_models and in_variants:
        return "O(NM)" if together else "O(N + M)"
    return "O(N)" if in_models else "O(M)" if in_variants else "O(1)"
