"""The Triton kernel of attention straight from codes against its torch twin: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from orchard.ops import rope, vq, vq_attend
from tests.cache.vq_files import random_books

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("no GPU, and TRITON_INTERPRET is not 1", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
H, D, R, S = 2, 32, 3, 75


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def turn(keys: Tensor, positions: Tensor) -> Tensor:
    return rope.rotate(keys, *rope.tables(positions, rope.frequencies(100.0, keys.shape[-1]).to(keys.device)))


@pytest.mark.parametrize(("groups", "softcap", "sinks"), [(1, None, False), (3, None, True), (4, 2.0, True)])
def test_attention_from_codes(groups: int, softcap: float | None, sinks: bool) -> None:
    """Slots that fill no block, some of them not seen; and first tokens that are kept as they are."""
    books = random_books(H, R, 16, D).to(DEVICE)
    k, v = vq.encode_keys(books, drawn(2, H, S, D, seed=1)), vq.encode_values(books, drawn(2, H, S, D, seed=2))
    q, positions = drawn(2, H * groups, 1, D, seed=4), torch.arange(S, device=DEVICE).expand(2, 1, S)
    mask = drawn(2, 1, 1, S, seed=5) < 1.0
    mask[..., :4] = True
    kept = None
    if sinks:
        slot = torch.tensor([[[0, 1], [0, S]], [[1, 2], [S, 3]]], device=DEVICE)
        first = torch.zeros(2, H, S + 1, dtype=torch.bool, device=DEVICE).scatter(2, slot, True)[..., :S]
        kept = vq_attend.Kept(drawn(2, H, 2, D, seed=6), drawn(2, H, 2, D, seed=7), slot, first)
    coded = vq_attend.Coded(books, k[0].flatten(3), k[1], *v)
    turns = vq_attend.turns_of(turn, positions, D, q)
    assert turns is not None
    got = coded.on_gpu(q, mask, 0.3, softcap, positions, turn, turns, kept)
    x = q.unflatten(1, (H, -1))
    scores = coded.scores(x.repeat(1, 1, 1, 2, 1), positions, turn)[..., :1, :]  # through blocks, not through tables
    if kept is not None:
        scores = vq_attend._with_kept(scores, x, kept, positions, turn)
    scores = scores * 0.3 if softcap is None else torch.tanh(scores * 0.3 / softcap) * softcap
    want = coded.weighted(scores.masked_fill(~mask[:, :, None], float("-inf")).softmax(-1), kept).flatten(1, 2)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
