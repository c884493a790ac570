"""A plan bound to a device: its weights brought there once, its steps as calls of kernels over numbered buffers.

Kernels are those of Triton on a GPU and their torch twins elsewhere; both go by the same names. Buffers are float32, but for
those that only pass the result of one step to a matrix product, which rounds them to bfloat16 anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from orchard.core.errors import UnsupportedPair
from orchard.ops.kernels.triton.rows import Heads, Pages, Rows, turns_of
from orchard.ops.kernels.triton.weights import Weight, alike, bring, joined, widened
from orchard.ops.plan import steps

SIDE_BY_SIDE = 3
"""Tables that one product can write to."""


@dataclass
class Call:
    """One run over some rows. `wanted`: the rows whose scores are wanted, or None for all of them."""

    rows: Rows
    buffers: list[Tensor]
    pages: Sequence[Pages]
    wanted: Tensor | None = None
    scores: Tensor | None = None
    """Where they go, or None: a table is made."""
    read: Tensor | None = None
    """What the head read."""


Op = Callable[[Call], None]


class Program:
    """A plan that can be run on `device`. `weights`: matrices that are there already, by their names in the plan."""

    def __init__(self, plan: steps.Plan, device: torch.device, weights: Mapping[str, Weight] | None = None) -> None:
        self.plan = plan
        self.device = device
        self.kernels = _kernels(device)
        self.weights: dict[str, Weight] = dict(weights or {})
        self._vectors: dict[str, Tensor] = {}
        self._kinds = _buffer_kinds(plan, device)
        self.ops: list[Op] = []
        for store in plan.stores:
            if store.codec == "vq":
                raise UnsupportedPair(
                    f"the codes that layer {store.layer} keeps have no form on {device.type}",
                    hint="run this model on the CPU, or in torch with a named dtype",
                )
        for step in plan.steps:
            bind = BIND.get(type(step))
            if bind is None:
                raise UnsupportedPair(
                    f"the step {step.kind!r} has no form on {device.type}: {_why(step)}",
                    hint="run this model on the CPU, or in torch with a named dtype",
                )
            self.ops += bind(self, step)
        self.weight_bytes = sum(weight.nbytes for weight in self.weights.values())

    def buffers(self, rows: int) -> list[Tensor]:
        """Room for calls of up to so many rows. Zeros: rows that only fill a batch must stay finite."""
        return [
            torch.zeros(rows, width, dtype=kind, device=self.device)
            for width, kind in zip(self.plan.widths, self._kinds, strict=True)
        ]

    def run(self, call: Call) -> None:
        for op in self.ops:
            if not len(call.rows):
                return  # nobody wants scores, and later steps keep nothing
            op(call)

    # Tensors ------------------------------------------------------------------------------------------------------

    def weight(self, matrix: steps.Matrix) -> Weight:
        if matrix.tensor not in self.weights:
            self.weights[matrix.tensor] = bring(matrix, self.plan.tensors[matrix.tensor], self.device)
        return self.weights[matrix.tensor]

    def together(self, matrices: Sequence[steps.Matrix]) -> Weight:
        """One matrix above another; each alone is then forgotten."""
        name = " + ".join(matrix.tensor for matrix in matrices)
        if name not in self.weights:
            self.weights[name] = joined([self.weight(matrix) for matrix in matrices])
            for matrix in matrices if len(matrices) > 1 else ():
                del self.weights[matrix.tensor]
        return self.weights[name]

    def vector(self, name: str) -> Tensor:
        if name not in self._vectors:
            self._vectors[name] = torch.tensor(self.plan.tensors[name], device=self.device)
        return self._vectors[name]

    def turns(self, index: int) -> Tensor:
        """The table of a rotary embedding."""
        name = f"turns {index}"
        if name not in self._vectors:
            rotary = self.plan.rotaries[index]
            self._vectors[name] = turns_of(self.vector(rotary.tensor), rotary.gain, self.plan.context)
        return self._vectors[name]

    def norm(self, norm: steps.Norm | None) -> tuple[Tensor, float] | None:
        return None if norm is None else (self.vector(norm.tensor), norm.eps)

    def biases(self, parts: Sequence[tuple[str | None, int]]) -> Tensor | None:
        """Biases side by side, zeros where there is none; None where there are none at all."""
        if all(name is None for name, _ in parts):
            return None
        zeros = (torch.zeros(rows, device=self.device) for _, rows in parts)
        return torch.cat([none if name is None else self.vector(name) for (name, _), none in zip(parts, zeros)])

    def gains(self, outputs: Sequence[steps.Output]) -> Tensor | None:
        """The same for gains, with ones."""
        if all(output.gain is None for output in outputs):
            return None
        ones = (torch.ones(output.matrix.rows, device=self.device) for output in outputs)
        return torch.cat([one if each.gain is None else self.vector(each.gain) for each, one in zip(outputs, ones)])

    # Steps --------------------------------------------------------------------------------------------------------

    def head_input(self, row: Tensor) -> Tensor:
        """What the head reads of a row: normalised, float32."""
        head = self.plan.steps[-1]
        row = row.float()
        norm = self.norm(head.norm) if isinstance(head, steps.Head) else None
        return row if norm is None else row * torch.rsqrt(row.square().mean() + norm[1]) * norm[0]

    def embed(self, step: steps.Embed) -> list[Op]:
        table = self.weight(step.matrix)
        return [lambda call: self.kernels.embed(call.rows.tokens, table, call.buffers[step.to], step.scale)]

    def linear(self, step: steps.Linear) -> list[Op]:
        return [self._product(step, part) for part in self._parts(step.outputs)]

    def _parts(self, outputs: Sequence[steps.Output]) -> list[list[steps.Output]]:
        """Outputs that one launch can serve together: neighbours of one kind."""
        parts: list[list[steps.Output]] = []
        for output in outputs:
            last = parts[-1] if parts else []
            same = bool(last) and len(last) < SIDE_BY_SIDE and last[0].add == output.add
            kinds = [_kind(one.matrix) for one in (*last, output)]
            if same and len(set(kinds)) == 1:
                last.append(output)
            else:
                parts.append([output])
        return parts

    def _product(self, step: steps.Linear, outputs: list[steps.Output]) -> Op:
        for output in outputs:
            if output.begin is not None and output.width is not None:
                name = output.matrix.tensor
                part = widened(output.matrix, self.plan.tensors[name], output.begin, output.width, self.device)
                self.weights.setdefault(name, part)
        weight = self.together([output.matrix for output in outputs])
        bias = self.biases([(output.bias, output.matrix.rows) for output in outputs])
        norm, add, places = self.norm(step.norm), outputs[0].add, [output.to for output in outputs]
        gain = self.gains(outputs)

        def scaled(call: Call) -> None:
            """Rows with a gain (DoRA): the product is made beside what they are added to, which has none."""
            outs = [call.buffers[place] for place in places]
            made = [torch.empty_like(out) for out in outs]
            self.kernels.linear(call.buffers[step.src], weight, made, norm=norm)
            assert gain is not None
            y = torch.cat(made, dim=1) * gain
            y = y if bias is None else y + bias
            for out, part in zip(outs, y.split([out.shape[1] for out in outs], dim=1), strict=True):
                out.copy_(out + part if add else part)

        def run(call: Call) -> None:
            outs = [call.buffers[place] for place in places]
            self.kernels.linear(call.buffers[step.src], weight, outs, norm=norm, bias=bias, add=add)

        return run if gain is None else scaled

    def gated(self, step: steps.Gated) -> list[Op]:
        if not alike([self.weight(step.gate), self.weight(step.up)]):
            raise UnsupportedPair(
                f"{step.gate.tensor} is {step.gate.kind} and {step.up.tensor} is {step.up.kind}",
                hint="give gate and up one format",
            )
        weight = self.together([step.gate, step.up])
        bias = self.biases([(step.gate_bias, step.gate.rows), (step.up_bias, step.up.rows)])
        norm = self.norm(step.norm)

        def run(call: Call) -> None:
            outs = [call.buffers[step.to]]
            source = call.buffers[step.src]
            self.kernels.linear(source, weight, outs, norm=norm, bias=bias, activation=step.activation)

        return [run]

    def gate(self, step: steps.Gate) -> list[Op]:
        def run(call: Call) -> None:
            places = call.buffers[step.gate], call.buffers[step.up], call.buffers[step.to]
            self.kernels.gate(*places, step.activation)

        return [run]

    def attend(self, step: steps.Attend) -> list[Op]:
        heads = Heads(
            step=step,
            turns=None if step.rotary is None else self.turns(step.rotary),
            q_norm=None if step.q_norm is None else self.vector(step.q_norm.tensor),
            k_norm=None if step.k_norm is None else self.vector(step.k_norm.tensor),
        )

        def run(call: Call) -> None:
            pages, q = call.pages[step.store], call.buffers[step.q]
            k = None if step.k is None else call.buffers[step.k]
            v = None if step.v is None else call.buffers[step.v]
            self.kernels.keep_and_attend(q, k, v, call.buffers[step.to], call.rows, heads, pages)

        return [run]

    def normalise(self, step: steps.Normalise) -> list[Op]:
        norm = (self.vector(step.norm.tensor), step.norm.eps)

        def run(call: Call) -> None:
            self.kernels.normalise(call.buffers[step.src], call.buffers[step.to], norm, step.groups, step.add)

        return [run]

    def add(self, step: steps.Add) -> list[Op]:
        return [lambda call: call.buffers[step.to].add_(call.buffers[step.src])]

    def clip(self, step: steps.Clip) -> list[Op]:
        return [lambda call: call.buffers[step.buffer].clamp_(-step.bound, step.bound)]

    def narrow(self, step: steps.Narrow) -> list[Op]:
        def run(call: Call) -> None:
            if call.wanted is None:
                return
            for place in step.buffers:
                call.buffers[place] = call.buffers[place][call.wanted]
            _narrow_rows(call, call.wanted)
            for place, buffer in enumerate(call.buffers):
                call.buffers[place] = buffer[: len(call.rows)]

        return [run]

    def head(self, step: steps.Head) -> list[Op]:
        weight, norm = self.weight(step.matrix), self.norm(step.norm)
        bias = self.biases([(step.bias, step.matrix.rows)])

        def run(call: Call) -> None:
            source = call.buffers[step.src]
            call.read = source if call.wanted is None else source[call.wanted]
            if call.scores is None:
                call.scores = torch.empty(len(call.read), self.plan.vocab, device=self.device)
            if not len(call.read):
                return
            self.kernels.linear(call.read, weight, [call.scores], norm=norm, bias=bias)
            if step.softcap > 0:
                call.scores.div_(step.softcap).tanh_().mul_(step.softcap)

        return [run]


BIND: dict[type, Callable[[Program, Any], list[Op]]] = {
    steps.Embed: Program.embed,
    steps.Linear: Program.linear,
    steps.Gated: Program.gated,
    steps.Gate: Program.gate,
    steps.Attend: Program.attend,
    steps.Normalise: Program.normalise,
    steps.Add: Program.add,
    steps.Clip: Program.clip,
    steps.Narrow: Program.narrow,
    steps.Head: Program.head,
}


def _kernels(device: torch.device) -> Any:
    """The module whose functions run the steps."""
    if device.type == "cuda":
        from orchard.ops.kernels.triton import launch

        return launch
    from orchard.ops.kernels.triton import twin

    return twin


def _kind(matrix: steps.Matrix) -> tuple[str, int, int, bool]:
    return matrix.kind, matrix.cols, matrix.group, matrix.minimum


def _narrow_rows(call: Call, wanted: Tensor) -> None:
    """Rows that are left are tiles of their own: they need not be neighbours any more."""
    rows = call.rows
    count = len(wanted)
    call.rows = replace(
        rows,
        tokens=rows.tokens[wanted],
        slots=rows.slots[wanted],
        positions=rows.positions[wanted],
        firsts=torch.arange(count, dtype=torch.int32, device=wanted.device),
        counts=torch.ones(count, dtype=torch.int32, device=wanted.device),
        tile=1,
    )
    call.wanted = None


def _buffer_kinds(plan: steps.Plan, device: torch.device) -> list[torch.dtype]:
    """bfloat16 where every writer is an attention or a gate and every reader a product that rounds to it; on a GPU only,
    so that a run of the twins is float32 throughout."""
    writers: list[set[bool]] = [set() for _ in plan.widths]
    for step in plan.steps:
        for place, rounds in _uses(step):
            writers[place].add(rounds)
    half = [device.type == "cuda" and uses == {True} for uses in writers]
    return [torch.bfloat16 if small else torch.float32 for small in half]


def _uses(step: steps.Step) -> list[tuple[int, bool]]:
    """Every buffer that a step touches, and whether bfloat16 would do for it there."""
    if isinstance(step, steps.Linear):
        rounds = step.norm is None and all(output.matrix.kind not in ("f32", "f16") for output in step.outputs)
        return [(step.src, rounds), *((output.to, False) for output in step.outputs)]
    if isinstance(step, steps.Gated):
        return [(step.src, False), (step.to, True)]
    if isinstance(step, steps.Gate):
        return [(step.gate, False), (step.up, False), (step.to, True)]
    if isinstance(step, steps.Attend):
        sides = [(place, False) for place in (step.q, step.k, step.v) if place is not None]
        return [*sides, (step.to, True)]
    if isinstance(step, steps.Normalise | steps.Add):
        return [(step.src, False), (step.to, False)]
    if isinstance(step, steps.Narrow):
        return []  # copies rows as they are
    places = [getattr(step, name) for name in ("to", "buffer", "src") if hasattr(step, name)]
    return [(place, False) for place in places]


def _why(step: steps.Step) -> str:
    if isinstance(step, steps.Torch):
        return f"{step.node} runs in torch ({step.reason})"
    return "no kernel for it has been written"
