"""Requests refuse what makes no sense, when they are made, and cost no torch."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from orchard.core.errors import UsageError
from orchard.generate import Request, Sampling


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": bad} for bad in (-0.1, math.nan, math.inf, -math.inf, "1", None, True)),
        *({"top_k": bad} for bad in (0, -1, 1.5, True)),
        *({"top_p": bad} for bad in (0, 0.0, 1.01, -0.5, math.nan)),
        *({"min_p": bad} for bad in (-0.01, 1.01, math.nan, math.inf)),
        *({"repetition_penalty": bad} for bad in (0, -1.0, math.inf, math.nan)),
    ],
)
def test_impossible_sampling(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))) as caught:
        Sampling(**fields)
    assert caught.value.hint


NO_IDS: list[Any] = [(), [], (1, -1), (1.5,), ("a",), "abc", 7, None]


@pytest.mark.parametrize(
    "fields",
    [
        *({"ids": bad} for bad in NO_IDS),
        *({"max_tokens": bad} for bad in (0, -1, 2**24 + 1, sys.maxsize, 1.5, True, None)),
        *({"stop": bad} for bad in ("", ("",), ("a", ""), (1,))),
        *({"seed": bad} for bad in (1.5, "7", True)),
        *({"logprobs": bad} for bad in (-1, 1.5, True)),
    ],
)
def test_impossible_requests(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Request(**{"ids": (1,), **fields})
    assert caught.value.hint and caught.value.exit_code == 2


def test_edges_that_are_allowed() -> None:
    Sampling(temperature=0, top_k=1, top_p=1, min_p=0, repetition_penalty=1e-9)
    Sampling(min_p=1)
    request = Request(ids=[1, np.int64(2), torch.tensor(3)], stop="end", max_tokens=2**24, seed=-3, logprobs=0)  # type: ignore[arg-type]
    assert request.ids == (1, 2, 3) and all(type(i) is int for i in request.ids)
    assert request.stop == ("end",)
    assert request.seeded() is request
    fresh = Request(ids=(1,)).seeded()
    assert fresh.seed is not None and fresh == Request(ids=(1,), seed=fresh.seed)


def test_requests_cost_no_torch() -> None:
    code = "import sys; from orchard.generate import Request, Sampling; Request(ids=(1,)); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_engine_costs_no_torch() -> None:
    names = ("protocol", "engine", "row", "rules", "sampling", "stops", "stream", "request", "errors")
    modules = ", ".join(f"orchard.generate.{name}" for name in names)
    code = f"import sys, orchard.generate, {modules}; orchard.generate.Engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
