"""A chat template's syntax tree, changed before it is compiled so that every step it takes is counted.

- every loop turn ticks; what a loop runs over is checked for length;
- everything written is charged (text captured by `set` blocks and macros included);
- lists, dicts, slices and `~` joins are charged when they are made;
- control tokens in the template's own text become marks (see `chat.py`), when a marker is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from orchard.core.errors import TemplateError
from orchard.text.limits import Limits, too_much

# Names of the internal filters; a template that calls them by name gains nothing.
TICK, WRITE, FIXED, CREATE, CONCAT, ITERATE = (
    f"orchard_{name}" for name in ("tick", "write", "fixed", "create", "concat", "iterate")
)
_FORBIDDEN = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.EvalContextModifier)


def check_tree(tree: nodes.Template, limits: Limits) -> None:
    """Depth, forbidden statements and huge numbers, without recursion of our own."""
    stack: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > limits.nesting:
            raise too_much(f"is nested more than {limits.nesting} levels deep")
        if isinstance(node, _FORBIDDEN):
            raise TemplateError(
                f"the chat template uses {type(node).__name__.lower()}, which is not allowed",
                hint="a template may only use the variables it is given",
            )
        number = node.value if isinstance(node, nodes.Const) else None
        if isinstance(number, int) and number.bit_length() > limits.integer_bits:
            raise too_much("contains a huge number")
        stack.extend((child, depth + 1) for child in node.iter_child_nodes())


class Rewriter(NodeTransformer):
    def __init__(self, marker: Callable[[str], str] | None = None) -> None:
        self._marker = marker

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if self._marker and isinstance(node.value, str):
            node.value = self._marker(node.value)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        if self._marker:
            node.data = self._marker(node.data)
        return node

    def visit_For(self, node: nodes.For, *args: Any) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, ITERATE)
        node.body = [_statement(node, TICK, 1), *node.body]
        return node

    def visit_Output(self, node: nodes.Output) -> Any:
        self.generic_visit(node)
        fixed = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        node.nodes = [
            child if isinstance(child, nodes.TemplateData) else _filtered(child, WRITE) for child in node.nodes
        ]
        return [_statement(node, FIXED, fixed), node] if fixed else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, CREATE)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, CREATE) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, CREATE) if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _statement(at: nodes.Node, name: str, amount: int) -> nodes.ExprStmt:
    """A statement that charges a fixed amount and prints nothing."""
    return nodes.ExprStmt(_filtered(nodes.Const(amount, lineno=at.lineno), name), lineno=at.lineno)
