"""From what modules said (`builder`) to the steps that run: fewer steps, fewer passes over memory, few buffers.

1. Two linear maps and their gate become one step; a norm that only feeds steps which can normalise moves into them;
   side paths of one value share their first half; linear maps of one value become one step.
2. A result that is only added to something is added in place by the step that makes it.
3. Values get buffers by how long they live. A step never writes a buffer that it reads, except experts that add to it.
4. Where only the rows whose scores are wanted matter any more, all others are dropped (`Narrow`).

Without `fused` only what has no step of its own (gates) is joined: the plain twin of everything above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchard.core.errors import ConfigError
from orchard.ops.plan import steps
from orchard.ops.plan.builder import Builder, Node, NoStep
from orchard.ops.plan.sides import side_paths

NORMALISES = ("linear", "gate", "experts", "head")
"""Nodes whose steps can normalise what they read."""


@dataclass
class Op:
    """A step before it has buffers. `writes`: (value, the value it is added to or None); `make` gets value → buffer."""

    reads: tuple[int, ...]
    writes: list[tuple[int, int | None]]
    make: Callable[[Op, Mapping[int, int]], steps.Step]
    node: Node
    outputs: list[Node] = field(default_factory=list)
    """The linear maps of one step."""

    def touches(self, value: int) -> bool:
        return value in self.reads or any(onto == value for _, onto in self.writes)


def fuse(builder: Builder, *, fused: bool = True) -> steps.Plan:
    """The plan of a model whose modules have all spoken."""
    nodes, all_widths = _gates(builder.nodes), list(builder.widths)
    tensors = dict(builder.tensors)
    if fused:
        nodes = _left_to_right(nodes)
        nodes = _norms(nodes)
        nodes = side_paths(nodes, _readers(nodes), all_widths, tensors)
    ops = _ops(_grouped(nodes) if fused else [[node] for node in nodes])
    _add_in_place(ops, fused=fused)
    buffers, widths = _buffers(ops, all_widths)
    made = [op.make(op, buffers) for op in ops]
    narrow = _narrow(ops, buffers) if fused else None
    if narrow is not None:
        made.insert(narrow[0], narrow[1])
    embeds = [step for step in made if isinstance(step, steps.Embed)]
    heads = [step for step in made if isinstance(step, steps.Head)]
    if not embeds or not heads:
        raise ConfigError("a model without an embedding or without a head has no plan", hint="lower a whole model")
    used = _tensor_names([made, builder.rotaries])
    used |= {name for spec in builder.stores if spec.books for name in spec.books.tensors}
    return steps.Plan(
        vocab=heads[-1].matrix.rows,
        context=builder.context,
        dim=embeds[0].matrix.cols,
        widths=widths,
        steps=made,
        stores=list(builder.stores),
        rotaries=list(builder.rotaries),
        tensors={name: value for name, value in tensors.items() if name in used},
    )


# 1. Joining nodes -----------------------------------------------------------------------------------------------------


def _readers(nodes: list[Node]) -> dict[int, list[Node]]:
    found: dict[int, list[Node]] = {}
    for node in nodes:
        for value in node.inputs:
            found.setdefault(value, []).append(node)
    return found


def _alive(nodes: list[Node]) -> list[Node]:
    """Without what nobody reads. Attention stays: it also fills a store."""
    kept: list[Node] = []
    wanted: set[int] = set()
    for node in reversed(nodes):
        if node.out in wanted or node.kind in ("head", "attend"):
            kept.append(node)
            wanted.update(node.inputs)
    return kept[::-1]


def _gates(nodes: list[Node]) -> list[Node]:
    """Gates take two linear maps of one value in; the maps go, unless somebody else reads them too."""
    by_value = {node.out: node for node in nodes}
    joined = []
    for node in nodes:
        if node.kind == "gate":
            gate, up = (by_value[value] for value in node.inputs)
            scaled = gate.fields.get("gain") or up.fields.get("gain")
            if {gate.kind, up.kind} != {"linear"} or gate.inputs != up.inputs or scaled:
                joined.append(replace(node, kind="product"))
                continue
            sides = {
                "gate": gate.fields["matrix"],
                "up": up.fields["matrix"],
                "gate_bias": gate.fields["bias"],
                "up_bias": up.fields["bias"],
            }
            node = replace(node, inputs=gate.inputs, fields={**node.fields, **sides})
        joined.append(node)
    return _alive(joined)


def _left_to_right(nodes: list[Node]) -> list[Node]:
    """x + (y + z) → (x + y) + z, so that the side path of an adapter is added where its main path is."""
    nodes = list(nodes)
    place = {node.out: at for at, node in enumerate(nodes)}
    readers = Counter(value for node in nodes for value in node.inputs)
    pending = [at for at, node in enumerate(nodes) if node.kind == "add"]
    while pending:
        outer = pending.pop()
        x, right = nodes[outer].inputs
        inner = place[right]
        if nodes[inner].kind != "add" or readers[right] != 1 or place[x] > inner:
            continue
        y, z = nodes[inner].inputs
        nodes[inner] = replace(nodes[inner], inputs=(x, y))
        nodes[outer] = replace(nodes[outer], inputs=(right, z))
        pending.append(inner)
    return nodes


def _norms(nodes: list[Node]) -> list[Node]:
    """A norm whose readers can all normalise by themselves moves into them."""
    readers = _readers(nodes)
    moved = {
        node.out: node
        for node in nodes
        if node.kind == "norm"
        and node.fields["groups"] == 1
        and all(reader.kind in NORMALISES for reader in readers[node.out])
    }
    out = []
    for node in nodes:
        if node.kind in NORMALISES and node.inputs[0] in moved:
            norm = moved[node.inputs[0]]
            node = replace(node, inputs=norm.inputs, fields={**node.fields, "norm": norm.fields["norm"]})
        out.append(node)
    return [node for node in out if node.out not in moved]


def _grouped(nodes: list[Node]) -> list[list[Node]]:
    """Linear maps of one value, normalised alike, go where the first of them stands."""
    groups: list[list[Node]] = []
    first: dict[tuple[int, steps.Norm | None], list[Node]] = {}
    for node in nodes:
        key = (node.inputs[0], node.fields.get("norm")) if node.kind == "linear" else None
        if key is not None and key in first:
            first[key].append(node)
            continue
        groups.append([node])
        if key is not None:
            first[key] = groups[-1]
    return groups


def _ops(groups: list[list[Node]]) -> list[Op]:
    ops = []
    for group in groups:
        node = group[0]
        if node.kind in ("add", "clip"):  # in place: the first input is where the result goes
            op = Op(node.inputs[1:], [(node.out, node.inputs[0])], MAKE[node.kind], node)
        else:
            writes: list[tuple[int, int | None]] = [(each.out, None) for each in group if each.out >= 0]
            op = Op(node.inputs, writes, MAKE[node.kind], node, group)
        ops.append(op)
    return ops


# 2. Adding in place ---------------------------------------------------------------------------------------------------


def _add_in_place(ops: list[Op], *, fused: bool) -> None:
    """Let the step that makes a value add it to where it belongs, and let every other sum reuse a buffer."""
    index = 0
    while index < len(ops):
        op = ops[index]
        if op.node.kind == "add":
            x, y = op.node.inputs
            if fused and (_moved(ops, index, made=y, onto=x) or _moved(ops, index, made=x, onto=y)):
                continue  # the sum is gone from `ops`
            if not _last(ops, index, x):
                x, y = y, x
            op.reads, op.writes = (y,), [(op.node.out, x)]
        if op.node.kind in ("add", "clip") and (not _last(ops, index, op.writes[0][1]) or op.writes[0][1] in op.reads):
            raise NoStep("a value is needed both before and after something is added to it", hint="run it in torch")
        index += 1


def _last(ops: list[Op], index: int, value: int | None) -> bool:
    return value is not None and not any(op.touches(value) for op in ops[index + 1 :])


def _moved(ops: list[Op], index: int, *, made: int, onto: int) -> bool:
    """Whether the step that makes `made` could take over the sum at `index`, which it then has."""
    # A step that already adds its result to something else cannot.
    maker = next((at for at, op in enumerate(ops) if (made, None) in op.writes), None)
    if maker is None or maker > index or ops[maker].node.kind not in ("linear", "norm", "experts"):
        return False
    read_elsewhere = any(op.touches(made) for at, op in enumerate(ops) if at != index)
    written = next((at for at, op in enumerate(ops) if any(value == onto for value, _ in op.writes)), len(ops))
    # `onto` must be there before the step, and read by nobody after it: its buffer holds the sum from then on. Nor by the
    # step itself, except that experts have read all of their input before they write.
    first = maker + 1 if ops[maker].node.kind == "experts" else maker
    late = ops[first:index] + ops[index + 1 :]
    if read_elsewhere or written >= maker or any(op.touches(onto) for op in late):
        return False
    ops[maker].writes = [
        (ops[index].node.out, onto) if value == made else (value, old) for value, old in ops[maker].writes
    ]
    del ops[index]
    return True


# 3. Buffers -----------------------------------------------------------------------------------------------------------


def _last_reads(ops: list[Op]) -> dict[int, int]:
    last: dict[int, int] = {}
    for index, op in enumerate(ops):
        for value in (*op.reads, *(onto for _, onto in op.writes if onto is not None)):
            last[value] = index
    return last


def _buffers(ops: list[Op], widths: list[int]) -> tuple[dict[int, int], list[int]]:
    """Value → buffer, and the buffers' widths. Only a buffer of exactly the right width is used again."""
    last = _last_reads(ops)
    buffers: dict[int, int] = {}
    made: list[int] = []
    free: list[int] = []
    for index, op in enumerate(ops):
        for value, onto in op.writes:
            if onto is not None:
                buffers[value] = buffers[onto]
                continue
            fitting = next((each for each in free if made[each] == widths[value]), None)
            if fitting is None:
                made.append(widths[value])
                fitting = len(made) - 1
            else:
                free.remove(fitting)
            buffers[value] = fitting
        added_to = {onto for _, onto in op.writes}
        done = {value for value in op.reads if last[value] == index} - added_to
        done |= {value for value, _ in op.writes if value not in last}
        free.extend(sorted(buffers[value] for value in done))
    return buffers, made


# 4. Narrowing ---------------------------------------------------------------------------------------------------------


def _narrow(ops: list[Op], buffers: Mapping[int, int]) -> tuple[int, steps.Narrow] | None:
    """After the last step that fills a store: what follows is needed for the wanted rows alone."""
    fills = [
        index
        for index, op in enumerate(ops)
        if op.node.kind == "torch" or (op.node.kind == "attend" and len(op.node.inputs) == 3)
    ]
    if not fills or len(ops) - fills[-1] <= 2:  # only the head follows
        return None
    at = fills[-1]
    last = _last_reads(ops)
    live = {value for op in ops[: at + 1] for value, _ in op.writes if last.get(value, -1) > at}
    return at + 1, steps.Narrow(tuple(sorted({buffers[value] for value in live})))


# Steps ----------------------------------------------------------------------------------------------------------------


def _linear(op: Op, at: Mapping[int, int]) -> steps.Step:
    outputs = tuple(
        steps.Output(
            matrix=node.fields["matrix"],
            to=at[value],
            bias=node.fields["bias"],
            add=onto is not None,
            gain=node.fields.get("gain"),
            begin=node.fields.get("begin"),
            width=node.fields.get("width"),
        )
        for node, (value, onto) in zip(op.outputs, op.writes, strict=True)
    )
    return steps.Linear(src=at[op.reads[0]], outputs=outputs, norm=op.node.fields.get("norm"))


def _attend(op: Op, at: Mapping[int, int]) -> steps.Step:
    q, k, v = (*(at[value] for value in op.reads), None, None)[:3]
    assert q is not None
    return steps.Attend(q=q, k=k, v=v, to=at[op.writes[0][0]], **op.node.fields)


def _product(op: Op, at: Mapping[int, int]) -> steps.Step:
    gate, up = (at[value] for value in op.reads)
    return steps.Gate(gate=gate, up=up, to=at[op.writes[0][0]], **op.node.fields)


def _normalise(op: Op, at: Mapping[int, int]) -> steps.Step:
    value, onto = op.writes[0]
    return steps.Normalise(src=at[op.reads[0]], to=at[value], add=onto is not None, **op.node.fields)


def _experts(op: Op, at: Mapping[int, int]) -> steps.Step:
    value, onto = op.writes[0]
    return steps.Experts(src=at[op.reads[0]], to=at[value], add=onto is not None, **op.node.fields)


def _from_to(kind: Callable[..., steps.Step]) -> Callable[[Op, Mapping[int, int]], steps.Step]:
    return lambda op, at: kind(src=at[op.reads[0]], to=at[op.writes[0][0]], **op.node.fields)


MAKE: dict[str, Callable[[Op, Mapping[int, int]], steps.Step]] = {
    "embed": lambda op, at: steps.Embed(to=at[op.writes[0][0]], **op.node.fields),
    "linear": _linear,
    "gate": _from_to(steps.Gated),
    "product": _product,
    "torch": _from_to(steps.Torch),
    "attend": _attend,
    "norm": _normalise,
    "experts": _experts,
    "add": lambda op, at: steps.Add(src=at[op.reads[0]], to=at[op.writes[0][0]]),
    "clip": lambda op, at: steps.Clip(buffer=at[op.writes[0][0]], bound=op.node.fields["bound"]),
    "head": lambda op, at: steps.Head(src=at[op.reads[0]], **op.node.fields),
}


def _tensor_names(thing: Any) -> set[str]:
    """Every tensor that steps name, wherever in them."""
    found: Counter[str] = Counter()
    pending = [thing]
    while pending:
        each = pending.pop()
        if isinstance(each, list | tuple):
            pending.extend(each)
        elif isinstance(each, steps.Matrix | steps.Norm | steps.RotarySpec):
            found[each.tensor] += 1
        elif hasattr(each, "__dataclass_fields__"):
            values = {name: getattr(each, name) for name in each.__dataclass_fields__}
            vectors = {name: value for name, value in values.items() if name.endswith(("bias", "gain"))}
            found.update(value for value in vectors.values() if value is not None)
            pending.extend(value for name, value in values.items() if name not in vectors)
    return set(found)
