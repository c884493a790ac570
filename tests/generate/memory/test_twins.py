"""A sequence under a budget in torch and on the native engine: the same tokens stay, and the same comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchard.generate.memory.episodes import Utterance
from orchard.generate.memory.episodic import EpisodicMemory
from orchard.generate.memory.lexical import Lexical
from orchard.generate.memory.native_kept import NativeKept
from orchard.generate.memory.shelf import Shelf
from orchard.generate.memory.torch_kept import TorchKept
from tests.generate.memory.test_episodic import talk
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


def test_episodes_of_both_agree(tmp_path: Path) -> None:
    """Episodic memory does not know who runs the model: the same caches, from files too, and the same answers."""
    model, numbers = tiny(), {"budget": 16, "block": 8, "sinks": 1, "scoring": "probe", "heads": "flat"}
    made: list[Any] = [NativeKept(runner(model), **numbers), TorchKept(model, **numbers)]  # type: ignore[arg-type]
    memories = [
        EpisodicMemory(kept, Lexical(), episodes=3, medoids=2, segment=2, shelf=Shelf(tmp_path / str(number)))
        for number, kept in enumerate(made)
    ]
    found = []
    for memory in memories:
        memory.add(talk())
        answers = [memory.tell(Utterance("tea again", (0, 5, 6)), wanted=3)]
        for question in ("the sea", "tea", "sky"):
            memory.select(question)
            answers.append(memory.read([7, 9], wanted=2))
        found.append(np.concatenate(answers))
        assert memory.peak <= 16 + 8
    assert np.abs(found[0] - found[1]).max() < 1e-3
