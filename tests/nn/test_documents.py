"""Several documents in one row: each is read as if it were alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.context import Context
from tests.generate.conftest import make_decoder


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3))
def test_packed_documents_do_not_see_each_other(lengths: list[int], padding: int) -> None:
    model = make_decoder(60).eval()
    ids = [
        torch.randint(0, 60, (length,), generator=torch.Generator().manual_seed(n)) for n, length in enumerate(lengths)
    ]
    pad = torch.full((padding,), -1)
    row = torch.cat([*ids, torch.zeros(padding, dtype=torch.long)])[None]
    positions = torch.cat([*(torch.arange(length) for length in lengths), pad])[None]
    documents = torch.cat([*(torch.full((length,), n) for n, length in enumerate(lengths)), pad])[None]
    with torch.no_grad():
        packed = model(row, Context(positions=positions, documents=documents))[0]
        start = 0
        for one in ids:
            torch.testing.assert_close(packed[start : start + len(one)], model(one[None])[0], atol=2e-4, rtol=1e-4)
            start += len(one)
    assert torch.isfinite(packed).all()
