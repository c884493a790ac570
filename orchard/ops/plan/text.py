"""A plan for people: what each step does, with what weights, what runs in torch and why, and what a token costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from orchard.ops.kernels.packing import BITS, matrix_bytes
from orchard.ops.plan import steps

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def describe(plan: steps.Plan) -> list[dict[str, Any]]:
    """One table per step: `step`, `layer` (None outside layers), `what`, `matrices`, `bytes` read for one token; `node` and
    `reason` for steps in torch."""
    described = []
    layer: int | None = None
    for step in plan.steps:
        matrices = [
            {
                "name": matrix.tensor,
                "shape": [matrix.rows, matrix.cols] if matrix.count == 1 else [matrix.count, matrix.rows, matrix.cols],
                "format": format_name(matrix),
                "bytes": _bytes(matrix),
            }
            for matrix in _matrices(step)
        ]
        layer = _layer(plan, step, layer)
        entry = {"step": step.kind, "layer": layer, "what": _what(plan, step), "matrices": matrices}
        entry["bytes"] = _bytes_per_token(step)
        if isinstance(step, steps.Torch):
            entry |= {"node": step.node, "reason": step.reason}
        described.append(entry)
    return described


def totals(plan: steps.Plan) -> dict[str, int]:
    """Steps by where they run, bytes of weights, and bytes read per token: of weights, and per cached token of stores."""
    torch_steps = sum(isinstance(step, steps.Torch) for step in plan.steps)
    sizes = {matrix.tensor: _bytes(matrix) for step in plan.steps for matrix in _matrices(step)}
    return {
        "native_steps": len(plan.steps) - torch_steps,
        "torch_steps": torch_steps,
        "weight_bytes": sum(sizes.values()),
        "bytes_per_token": sum(_bytes_per_token(step) for step in plan.steps),
        "store_bytes_per_cached_token": sum(_slot_bytes(spec) for spec in plan.stores),
    }


def table(plan: steps.Plan) -> list[str]:
    """Lines to print. Runs of layers that do the same are told once."""
    lines: list[str] = []
    for first, last, entries in _runs(describe(plan)):
        if first is not None:
            lines.append(f"layer {first}:" if first == last else f"layers {first}-{last}:")
        indent = "" if first is None else "  "
        for entry in entries:
            lines.append(f"{indent}{entry['step']:<8}{entry['what']}".rstrip())
            for matrix in entry["matrices"]:
                shape = " × ".join(map(str, matrix["shape"]))
                name, form, size = _short(matrix["name"]), matrix["format"], _size(matrix["bytes"])
                lines.append(f"{indent}        {name:<24} {shape:<16} {form:<10} {size}")
    sums = totals(plan)
    attends = sum(isinstance(step, steps.Attend) for step in plan.steps)
    lines.append(
        f"keys and values: {sums['store_bytes_per_cached_token']:,} bytes per token, in {len(plan.stores)} of {attends} layers"
    )
    lines.append(f"{sums['native_steps']} native steps, {sums['torch_steps']} in torch")
    lines.append(
        f"{_size(sums['weight_bytes'])} of weights; one token reads {_size(sums['bytes_per_token'])} of them"
        f" and {_size(sums['store_bytes_per_cached_token'])} for every token before it"
    )
    return lines


def format_name(matrix: steps.Matrix) -> str:
    """`bf16`, `q4/32+min`, `p4` (a palette), `blocks`."""
    if matrix.kind not in BITS:
        return matrix.kind
    return f"{matrix.kind}/{matrix.group}" + ("+min" if matrix.minimum else "")


def _short(name: str) -> str:
    """A tensor's name inside its layer."""
    return _LAYER.split(name, maxsplit=1)[-1]


# What a step is about -------------------------------------------------------------------------------------------------


def _matrices(step: steps.Step) -> list[steps.Matrix]:
    if isinstance(step, steps.Linear):
        return [output.matrix for output in step.outputs]
    if isinstance(step, steps.Gated):
        return [step.gate, step.up]
    if isinstance(step, steps.Experts):
        return [step.router, step.gate, step.up, step.down]
    return [step.matrix] if isinstance(step, steps.Embed | steps.Head) else []


def _what(plan: steps.Plan, step: steps.Step) -> str:
    words: list[str] = []
    if getattr(step, "norm", None) is not None and not isinstance(step, steps.Normalise):
        words.append("normalise first")
    if isinstance(step, steps.Linear):
        words += ["added in place"] if any(output.add for output in step.outputs) else []
        words += ["rows scaled"] if any(output.gain for output in step.outputs) else []
        words += ["with bias"] if any(output.bias for output in step.outputs) else []
    elif isinstance(step, steps.Gated | steps.Gate):
        words.append(step.activation)
    elif isinstance(step, steps.Attend):
        words += _attention(plan, step)
    elif isinstance(step, steps.Experts):
        words.append(f"{step.activation}, {step.k} of {step.gate.count}")
    elif isinstance(step, steps.Normalise):
        words.append(_short(step.norm.tensor))
        words += [f"over {step.groups} parts"] if step.groups > 1 else []
    elif isinstance(step, steps.Clip):
        words.append(f"to ±{step.bound:g}")
    elif isinstance(step, steps.Embed) and step.scale != 1.0:
        words.append(f"times {step.scale:g}")
    elif isinstance(step, steps.Narrow):
        words.append("only rows whose scores are wanted go on")
    elif isinstance(step, steps.Torch):
        words.append(f"{step.node}: {step.reason}")
    if isinstance(step, steps.Normalise | steps.Experts) and step.add:
        words.append("added in place")
    if isinstance(step, steps.Attend | steps.Head) and step.softcap:
        words.append(f"scores bounded to ±{step.softcap:g}")
    return ", ".join(words)


def _attention(plan: steps.Plan, step: steps.Attend) -> Iterator[str]:
    spec = plan.stores[step.store]
    yield f"{step.heads} heads on {step.kv_heads} of {step.dim}"
    yield f"own {spec.codec} store" if step.k is not None else f"{spec.codec} store of layer {spec.layer}"
    if spec.keep:
        yield f"keeps {spec.keep}" + (f" and the first {spec.sinks}" if spec.sinks else "")
    if step.window:
        yield f"window {step.window}"
    if step.q_norm is not None:
        yield "normalised heads"
    if step.rotary is not None:
        yield "rotary" + (f" {step.rotary}" if len(plan.rotaries) > 1 else "")


def _layer(plan: steps.Plan, step: steps.Step, before: int | None) -> int | None:
    """The layer a step belongs to: by the names of its tensors, else that of the step before it."""
    if isinstance(step, steps.Embed | steps.Head):
        return None
    names = [matrix.tensor for matrix in _matrices(step)]
    names += [step.node] if isinstance(step, steps.Torch) else []
    names += [step.norm.tensor] if isinstance(step, steps.Normalise) else []
    for name in names:
        found = _LAYER.search(name + ".")
        if found:
            return int(found.group(1))
        return None
    return before


# Bytes ----------------------------------------------------------------------------------------------------------------


def _bytes(matrix: steps.Matrix) -> int:
    return matrix.count * matrix_bytes(matrix.kind, matrix.rows, matrix.cols, matrix.group, matrix.minimum)


def _bytes_per_token(step: steps.Step) -> int:
    """Of weights: one row of a table, the chosen experts, all of everything else."""
    if isinstance(step, steps.Embed):
        return _bytes(step.matrix) // step.matrix.rows
    if isinstance(step, steps.Experts):
        chosen = sum(_bytes(matrix) // matrix.count for matrix in (step.gate, step.up, step.down))
        return _bytes(step.router) + step.k * chosen
    return sum(map(_bytes, _matrices(step)))


def _slot_bytes(spec: steps.StoreSpec) -> int:
    if spec.books is not None:
        return spec.heads * spec.books.slot_bytes
    width = {"f32": 4 * spec.dim, "bf16": 2 * spec.dim, "int8": spec.dim + 4}[spec.codec]
    return 2 * spec.heads * width


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


# Runs of equal layers -------------------------------------------------------------------------------------------------


def _runs(entries: list[dict[str, Any]]) -> Iterator[tuple[int | None, int | None, list[dict[str, Any]]]]:
    """(first layer, last layer, the steps of one of them), and (None, None, steps) outside layers."""
    layers: list[tuple[int | None, list[dict[str, Any]]]] = []
    for entry in entries:
        if layers and layers[-1][0] == entry["layer"]:
            layers[-1][1].append(entry)
        else:
            layers.append((entry["layer"], [entry]))
    start = 0
    for index in range(1, len(layers) + 1):
        both = None if index == len(layers) else (layers[start], layers[index])
        if both and None not in (both[0][0], both[1][0]) and _signature(both[0]) == _signature(both[1]):
            continue
        yield layers[start][0], layers[index - 1][0], layers[start][1]
        start = index


def _signature(layer: tuple[int | None, list[dict[str, Any]]]) -> str:
    """A layer's steps with its own number taken out of every name."""
    number, entries = layer
    return repr([{**entry, "layer": None} for entry in entries]).replace(f"layers.{number}.", "layers.N.")
