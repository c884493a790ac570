"""Side paths of a model's own (recovery adapters) while a plan is fused: those that read one value share their first half.

y = W x + B (A x). Matrices of few rows cost nearly as much as those of many, and every step costs a meeting of all threads. So
the A of q, k and v, or of gate and up, become one matrix, and each B reads its own part of what that gives: no zeros are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from orchard.ops.plan import steps
from orchard.ops.plan.builder import Node, side_matrix


def side_paths(
    nodes: list[Node], readers: Mapping[int, list[Node]], widths: list[int], tensors: dict[str, np.ndarray]
) -> list[Node]:
    """The nodes with shared first halves, whose widths and tensors are put beside the others. `readers`: of every value."""
    new: dict[int, Node] = {}
    gone: set[int] = set()
    for group in _alike(nodes, readers):
        if len(group) < 2:
            continue
        first, place = group[0], 0
        ranks = np.concatenate([node.fields["ranks"] for node in group])
        packed = side_matrix(ranks)
        name = first.fields["matrix"].tensor.removesuffix("a.weight") + "shared.a.weight"
        matrix = replace(first.fields["matrix"], tensor=name, kind=packed.kind, rows=len(ranks))
        tensors[name], widths[first.out] = packed.data, len(ranks)
        new[first.out] = replace(first, fields={**first.fields, "matrix": matrix})
        for node in group:
            wide, rows = readers[node.out][0], node.fields["matrix"].rows
            part = {**wide.fields, "begin": place, "width": len(ranks)}
            new[wide.out] = replace(wide, inputs=(first.out,), fields=part)
            place += rows
        gone.update(node.out for node in group[1:])
    return [new.get(node.out, node) for node in nodes if node.out not in gone]


def _alike(nodes: list[Node], readers: Mapping[int, list[Node]]) -> list[list[Node]]:
    """First halves that read one value, normalised alike, whose second halves can be one step."""
    by_value = {node.out: node for node in nodes}
    halves: list[tuple[Node, Node]] = []
    for node in nodes:
        after = readers.get(node.out, [])
        if "ranks" in node.fields and len(after) == 1 and after[0].kind == "linear" and "norm" not in after[0].fields:
            halves.append((node, after[0]))
    wides = {wide.out for _, wide in halves}

    def sum_of(value: int) -> int:
        """Where the sum begins that a second half is added to."""
        node = by_value.get(value)
        return sum_of(node.inputs[0]) if node is not None and node.kind == "add" and node.inputs[1] in wides else value

    found: dict[tuple[int, steps.Norm | None], dict[int, Node]] = {}
    for node, wide in halves:
        added = readers.get(wide.out, [])
        onto = sum_of(added[0].inputs[0]) if len(added) == 1 and added[0].kind == "add" else wide.out
        # One step cannot add twice to the same: of several only the first joins.
        found.setdefault((node.inputs[0], node.fields.get("norm")), {}).setdefault(onto, node)
    return [list(group.values()) for group in found.values()]
