"""A config tree as folds that open: each node with what it builds, its numbers, and the nodes below it.

Neighbours in a list that are equal but for their number (thirty layers of one kind) are shown once. A field that the parent has
yet to fill in is not shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchard.core.report_page_chart import escape

MOST_NODES = 3000
DEEPEST = 40
_KIND, _NUMBER = "kind", "layer"
_REQUIRED = {"required": True}


def tree_html(config: Any) -> str:
    """The fields of a tree as nested folds."""
    return _Writer().fields(config, 0) if isinstance(config, Mapping) else _leaf(config)


class _Writer:
    """Counts what it writes, so that a page stays a page."""

    def __init__(self) -> None:
        self.left = MOST_NODES

    def fields(self, node: Mapping[str, Any], depth: int) -> str:
        shown = {str(name): value for name, value in node.items() if name != _KIND and value != _REQUIRED}
        flat = {name: value for name, value in shown.items() if not _deep(value)}
        deep = {name: value for name, value in shown.items() if _deep(value)}  # what folds stands after what does not
        return "".join(self.entry(name, value, depth) for name, value in (*flat.items(), *deep.items()))

    def entry(self, name: str, value: Any, depth: int) -> str:
        self.left -= 1
        if self.left < 0:
            return "<p>…</p>" if self.left == -1 else ""
        if not _deep(value):
            return f"<p>{escape(name)}: {_leaf(value)}</p>"
        if depth >= DEEPEST:
            return f"<p>{escape(name)}: …</p>"
        if isinstance(value, Mapping):
            kind, body = _short(value.get(_KIND)), self.fields(value, depth + 1)
        else:
            kind, body = f"{len(value):,}", self.items(value, depth + 1)
        if not body:
            return f"<p>{escape(name)}: <em>{escape(kind)}</em></p>"
        opened = " open" if depth < 1 else ""
        return f"<details{opened}><summary>{escape(name)}: <em>{escape(kind)}</em></summary>{body}</details>"

    def items(self, values: Sequence[Any], depth: int) -> str:
        parts, start = [], 0
        while start < len(values) and self.left >= 0:
            stop, same = start + 1, _unnumbered(values[start])
            while stop < len(values) and _unnumbered(values[stop]) == same:
                stop += 1
            alone = stop == start + 1
            name = f"{start}" if alone else f"{start} to {stop - 1}"
            parts.append(self.entry(name, values[start] if alone else same, depth))
            start = stop
        return "".join(parts)


def _unnumbered(value: Any, depth: int = 0) -> Any:
    """Without the numbers of layers."""
    if isinstance(value, Mapping) and depth < DEEPEST:
        return {name: _unnumbered(item, depth + 1) for name, item in value.items() if name != _NUMBER}
    return value


def _deep(value: Any) -> bool:
    """Whether it folds: a node, or a list that has nodes in it or is long."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and (len(value) > 12 or any(isinstance(item, (Mapping, list)) for item in value))


def _leaf(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"<em>{escape(text if len(text) <= 400 else f'{text[:400]} …')}</em>"


def _short(kind: Any) -> str:
    """`orchard.nn.stack:Block` → `Block`."""
    return str(kind).rpartition(":")[2] if kind else ""
