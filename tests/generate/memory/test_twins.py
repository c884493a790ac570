"""A sequence under a budget in torch and on the native engine: the same tokens stay, and the same comes next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from orchard.generate.memory.native_kept import NativeKept
from orchard.generate.memory.torch_kept import TorchKept
from tests.generate.memory.test_native_kept import runner, some, tiny

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"scoring": "recent"}),
    ({"softcap": 5.0}, {"scoring": "keydiff", "heads": "flat"}),
    ({"shared": True}, {"scoring": "snap"}),
    ({}, {"scoring": "snap", "heads": "flat", "newest": 3}),
    ({"shared": True}, {"scoring": "probe", "heads": "flat"}),
    ({"window": 17}, {"scoring": "probe"}),
]


@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
def test_torch_and_native_agree(shape: dict[str, Any], options: dict[str, Any]) -> None:
    model = tiny(**shape)
    numbers: dict[str, Any] = {"budget": 22, "block": 14, "sinks": 2, **options}
    native, torch = NativeKept(runner(model), **numbers), TorchKept(model, **numbers)
    shares = [27, 17, 22][: len(native.budgets)]
    for turn in range(6):
        for tokens in (some(14, seed=turn), some(1, seed=turn + 20), some(5, seed=turn + 40)):
            if options["scoring"] == "probe" and len(tokens) > native.room:
                for kept in (native, torch):
                    kept.probe(some(6, seed=turn))
                    kept.probe(some(8, seed=turn + 1))
                    kept.evict(shares if turn > 2 else None)
            elif options["scoring"] != "probe" and turn == 4 and len(tokens) == 5:
                for kept in (native, torch):
                    kept.evict(shares)
            found, expected = (kept.read(tokens, wanted=len(tokens)) for kept in (native, torch))
            assert np.abs(found - expected).max() < 1e-3
        assert (native.used, native.peak, native.budgets) == (torch.used, torch.peak, torch.budgets)
        for layer in range(len(native.budgets)):
            left, right = native.keys(layer), torch.keys(layer)
            assert left.shape == right.shape
            # Positions may count from another place, but what each token is like does not change: lengths of pairs of channels.
            sizes = [np.hypot(keys[..., :8], keys[..., 8:]) for keys in (left, right)]
            assert np.abs(sizes[0] - sizes[1]).max() < 1e-3
