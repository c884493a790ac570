"""Every Triton kernel against its torch twin: on a GPU, or on a CPU where Triton is there and TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from orchard.ops.kernels.triton import twin
from orchard.ops.kernels.triton.rows import Heads, Pages, Rows, make_pages, tiles_of, turns_of
from orchard.ops.kernels.triton.weights import Weight, dense, joined, quantised
from orchard.ops.plan.steps import Attend, Norm, StoreSpec

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("no GPU, and TRITON_INTERPRET is not 1", allow_module_level=True)

from orchard.ops.kernels.triton import launch  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
KINDS = [("f32", False), ("bf16", False), ("q8", False), ("q4", False), ("q4", True), ("q2", False)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weight(kind: str, rows: int, cols: int, minimum: bool = False, seed: int = 0, group: int = 64) -> Weight:
    if kind in ("f32", "bf16"):
        return dense(random(rows, cols, seed=seed) / cols**0.5, kind)
    groups, bits = -(-cols // group), int(kind[1])
    codes = torch.randint(0, 2**bits, (rows, groups, group), generator=torch.Generator().manual_seed(seed))
    scales = (random(rows, groups, seed=seed + 1) / 2**bits / cols**0.5).half()
    minima = (random(rows, groups, seed=seed + 2) / cols**0.5).half() if minimum else None
    return quantised(codes.to(torch.uint8).to(DEVICE), scales, minima, kind=kind, cols=cols)


def close(found: Tensor, wanted: Tensor, most: float) -> None:
    """By the size of the whole: single numbers near zero may be off by more."""
    assert found.isfinite().all()
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < most, f"relative error {error:.2e}"


def bound(kind: str, rows: int) -> float:
    """float32 all the way where there are few rows, or float32 weights."""
    return 2e-6 if rows <= launch.FEW or kind == "f32" or INTERPRETED else 6e-3


@pytest.mark.parametrize("rows", [1, 3, 7, 33, 100])
@pytest.mark.parametrize(("kind", "minimum"), KINDS)
def test_linear(kind: str, minimum: bool, rows: int) -> None:
    """Three tables side by side, a norm on the way in, widths that fill no tile."""
    x, cols = random(rows, 200) * 3, 200
    parts = [weight(kind, n, cols, minimum, seed=n) for n in (72, 24, 40)]
    norm = (random(cols, seed=5).abs() + 0.5, 1e-5)
    outs, wanted = ([torch.full((rows, w.rows), 7.0, device=DEVICE) for w in parts] for _ in range(2))
    for kernels, to in ((launch, outs), (twin, wanted)):
        kernels.linear(x, joined(parts), to, norm=norm)
    for found, want in zip(outs, wanted):
        close(found, want, bound(kind, rows))


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize(("kind", "minimum"), KINDS)
def test_linear_adds_with_bias(kind: str, minimum: bool, rows: int) -> None:
    x, w = random(rows, 96), weight(kind, 50, 96, minimum, group=32)
    bias, start = random(50, seed=3), random(rows, 50, seed=4)
    outs = start.clone(), start.clone()
    launch.linear(x, w, [outs[0]], bias=bias, add=True)
    twin.linear(x, w, [outs[1]], bias=bias, add=True)
    close(outs[0], outs[1], bound(kind, rows))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("rows", [1, 20, 100])
@pytest.mark.parametrize(("kind", "minimum"), [("bf16", False), ("q4", True), ("q2", False)])
def test_gated(kind: str, minimum: bool, rows: int, activation: str) -> None:
    x, w = random(rows, 192), weight(kind, 2 * 80, 192, minimum)
    norm, bias = (random(192, seed=5), 1e-6), random(160, seed=6)
    outs = torch.empty(rows, 80, device=DEVICE), torch.empty(rows, 80, device=DEVICE)
    for kernels, out in zip((launch, twin), outs):
        kernels.linear(x, w, [out], norm=norm, bias=bias, activation=activation)
    close(outs[0], outs[1], 2 * bound(kind, rows))


@pytest.mark.parametrize(("kind", "minimum"), KINDS)
def test_embed_and_unpacking(kind: str, minimum: bool) -> None:
    w = weight(kind, 40, 100, minimum, group=32)
    tokens = torch.tensor([3, 39, 0, 3], dtype=torch.int32, device=DEVICE)
    outs = torch.empty(4, 100, device=DEVICE), torch.empty(4, 100, device=DEVICE)
    for kernels, out in zip((launch, twin), outs):
        kernels.embed(tokens, w, out, 1.5)
    assert torch.equal(*outs)
    if kind != "f32":
        close(launch.unpacked(w).float(), w.dense(torch.bfloat16).float(), 5e-3 if INTERPRETED else 1e-6)  # it cuts off


def test_norms_and_gates() -> None:
    x, weight_of = random(3, 60), random(20, seed=1)
    for add in (False, True):
        outs = random(3, 60, seed=2), random(3, 60, seed=2)
        for kernels, out in zip((launch, twin), outs):
            kernels.normalise(x, out, (weight_of, 1e-5), 3, add)
        close(*outs, 1e-6)
    outs = torch.empty_like(x), torch.empty_like(x)
    for kernels, out in zip((launch, twin), outs):
        kernels.gate(x, random(3, 60, seed=3), out, "silu")
    close(*outs, 1e-6)


ATTENDS = {
    "plain": (StoreSpec(0, 2, 32), {}),
    "all queries alike": (StoreSpec(0, 6, 32), {}),
    "head of 80": (StoreSpec(0, 2, 80), {}),
    "window": (StoreSpec(0, 2, 32), {"window": 70}),
    "ring": (StoreSpec(0, 2, 32, keep=100), {}),
    "ring and sinks": (StoreSpec(0, 2, 32, keep=30, sinks=4), {}),
    "window over sinks": (StoreSpec(0, 2, 32, keep=90, sinks=4), {"window": 100}),
    "softcap": (StoreSpec(0, 2, 32), {"softcap": 3.0}),
    "f32": (StoreSpec(0, 2, 32, codec="f32"), {}),
    "int8": (StoreSpec(0, 2, 32, codec="int8"), {}),
    "norms": (StoreSpec(0, 2, 32), {"q_norm": Norm("q", 1e-6), "k_norm": Norm("k", 1e-6)}),
}


def attention(name: str) -> tuple[Heads, Pages]:
    spec, options = ATTENDS[name]
    step = Attend(0, 1, 2, 3, 0, 6, spec.heads, spec.dim, scale=0.4, rotary=0, **options)
    turns = turns_of(random(spec.dim // 2 - 4, seed=8).abs(), 1.25, 320)
    norms = (random(spec.dim, seed=9), random(spec.dim, seed=10)) if step.q_norm else (None, None)
    table = torch.zeros(4, 5, dtype=torch.int32, device=DEVICE)
    table[0], table[2] = torch.tensor([3, 7, 1, 9, 11]), torch.tensor([2, 4, 5, 6, 8])
    return Heads(step, turns, *norms), make_pages(spec, 12, table)


def rows_of(slots: Sequence[int], positions: Sequence[int], tile: int, splits: int) -> Rows:
    tiles = tiles_of(np.array(slots), tile)
    both = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (slots, positions)]
    return Rows(both[0], *both, *(torch.from_numpy(part).to(DEVICE) for part in tiles), tile, splits)


@pytest.mark.parametrize("name", list(ATTENDS))
def test_attention_over_pages(name: str) -> None:
    """Two sequences are read as prompts, then each gets one token: pages and results agree with the twin's."""
    heads, mine = attention(name)
    theirs = replace(mine, k=mine.k.clone(), v=mine.v.clone())
    if mine.k_scale is not None and mine.v_scale is not None:
        theirs = replace(theirs, k_scale=mine.k_scale.clone(), v_scale=mine.v_scale.clone())
    step = heads.step
    read = [0] * 201 + [2] * 70, [*range(201), *range(70)]
    calls = [(*read, 16, 1), ([0, 2], [201, 70], 1, 4), ([2, 2, 0], [71, 72, 202], 1, 1)]
    for number, (slots, positions, tile, splits) in enumerate(calls):
        rows = rows_of(slots, positions, tile, splits)
        q, k, v = (
            random(len(slots), n * step.dim, seed=20 + 3 * number + i)
            for i, n in enumerate((step.heads, step.kv_heads, step.kv_heads))
        )
        other = q.clone()
        outs = torch.empty_like(q), torch.empty_like(q)
        launch.keep(q, k, v, rows, heads, mine)
        twin.keep(other, k, v, rows, heads, theirs)
        close(q, other, 1e-5)
        same_pages(mine, theirs)
        launch.attend(q, outs[0], rows, heads, mine)
        twin.attend(q, outs[1], rows, heads, mine)
        close(*outs, 1e-5 if INTERPRETED or mine.spec.codec == "f32" else 1e-2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", [name for name in ATTENDS if name != "int8"])
def test_new_tokens_keep_and_attend_in_one(name: str, splits: int) -> None:
    """One token of each sequence, at the beginning, the end of a page and the beginning of the next, and far on."""
    heads, mine = attention(name)
    step = heads.step
    rows = rows_of([0] * 201 + [2] * 64, [*range(201), *range(64)], 16, 1)
    q, k, v = (random(265, n * step.dim, seed=n) for n in (step.heads, step.kv_heads, step.kv_heads + 1))
    twin.keep(q, k, v[:, : k.shape[1]].contiguous(), rows, heads, mine)
    theirs = replace(mine, k=mine.k.clone(), v=mine.v.clone())
    for number, places in enumerate(([201, 64], [202, 0], [63, 1], [191, 127])):
        rows = replace(rows_of([0, 2], places, 1, splits), apart=True)
        q, k, v = (random(2, n * step.dim, seed=50 + 3 * number + n) for n in (step.heads, step.kv_heads, 20))
        v = v[:, : k.shape[1]].contiguous()
        outs = torch.empty_like(q), torch.empty_like(q)
        launch.keep_and_attend(q.clone(), k, v, outs[0], rows, heads, mine)
        twin.keep_and_attend(q.clone(), k, v, outs[1], rows, heads, theirs)
        same_pages(mine, theirs)
        close(*outs, 1e-2 if mine.spec.codec != "f32" else 1e-5)
        other = torch.empty_like(q)
        launch.keep_and_attend(q.clone(), None, None, other, rows, heads, mine)  # a layer that reads what another kept
        close(other, outs[0], 1e-2 if mine.spec.codec != "f32" else 1e-5)


def same_pages(mine: Pages, theirs: Pages) -> None:
    """Equal but for the last bit of a number that lies between two."""
    if mine.k_scale is not None:
        for one, other in ((mine.k, theirs.k), (mine.v, theirs.v)):
            assert (one.int() - other.int()).abs().max() <= 1
        return
    close(mine.k.float(), theirs.k.float(), 8e-3 if INTERPRETED else 1e-3)
    assert INTERPRETED or torch.equal(mine.v, theirs.v)


def test_a_layer_that_reads_anothers_store() -> None:
    heads, pages = attention("plain")
    rows = rows_of([0, 0], [0, 1], 16, 1)
    q, k, v = (random(2, n * 32, seed=n) for n in (6, 2, 3))
    launch.keep(q, k, v[:, :64].contiguous(), rows, heads, pages)
    before = pages.k.clone()
    other = random(2, 6 * 32, seed=9)
    wanted = other.clone()
    launch.keep(other, None, None, rows, heads, pages)
    twin.keep(wanted, None, None, rows, heads, pages)
    assert torch.equal(pages.k, before)
    close(other, wanted, 1e-5)
