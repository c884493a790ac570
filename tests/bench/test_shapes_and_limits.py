"""Random models of a shape, what the machine allows, and the program that workers run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.bench.facts import facts
from orchard.bench.families import WHOLE
from orchard.bench.limits import Limits, read_bandwidth, share
from orchard.bench.shapes import Shape, packed_bytes, packed_matrix, plan_bytes, random_plan, write_random_gguf
from orchard.bench.workers.run import peak_memory, run_case, token_ids
from orchard.core.errors import UsageError
from orchard.ops.kernels.packing import values
from orchard.weights.gguf.reader import GGUFFile
from tests.tiny import tiny_gguf

SMALL = Shape(layers=2, width=128, hidden=256, heads=4, kv_heads=2, head=32, vocab=260, context=256)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_random_matrices_are_finite_and_spread_about_zero(bits: int) -> None:
    data = packed_matrix(96, 256, bits, 64, np.random.default_rng(0))
    found = values(data, f"q{bits}", 96, 256, 64)
    assert data.ctypes.data % 64 == 0 and found.shape == (96, 256)
    assert np.isfinite(found).all() and 0.001 < found.std() < 0.1 and abs(found.mean()) < 0.2 * found.std() + 1e-3


@pytest.mark.parametrize("kind", ["q4", "q2"])
def test_a_random_plan_is_sound_and_as_large_as_foretold(kind: str) -> None:
    from orchard.ops.plan.check import check

    plan = random_plan(SMALL, kind)
    check(plan)
    norms = (2 * SMALL.layers + 1) * SMALL.width * 4 + SMALL.head // 2 * 4
    assert plan.whole and plan_bytes(plan) == packed_bytes(SMALL, kind) + norms


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError):
        random_plan(SMALL, "q3")


def test_a_random_file_is_a_model_that_loads(tmp_path: Path, empty_home: Path) -> None:
    from orchard.session.model import load

    path = tmp_path / "random.gguf"
    write_random_gguf(path, SMALL, tiny_gguf(tmp_path / "words.gguf"))
    with GGUFFile.open(path) as file:
        assert file.tensors["blk.1.ffn_down.weight"].type.name == "Q4_0"
    known = facts(str(path))
    assert known.body + known.head == SMALL.parameters + (2 * SMALL.layers + 1) * SMALL.width
    assert known.kv_bytes == SMALL.kv_bytes and known.vocab == SMALL.vocab
    assert np.isfinite(load(path).logits([1, 2, 3]).numpy()).all()


def test_a_folder_is_refused(tmp_path: Path, empty_home: Path) -> None:
    from orchard.session.model import load

    load(tiny_gguf(tmp_path / "tiny.gguf")).save(tmp_path / "folder")
    with pytest.raises(UsageError, match="GGUF"):
        facts(str(tmp_path / "folder"))


# Limits -------------------------------------------------------------------------------------------------------------------


@given(st.floats(1e-4, 10), st.floats(1e3, 1e10), st.floats(1e3, 1e13))
def test_the_slower_of_the_two_bounds(seconds: float, read: float, operations: float) -> None:
    limits = Limits(dram=2e10, cached=4e10, bf16=1e12)
    found = share(limits, seconds=seconds, bytes_read=read, operations=operations)
    assert found is not None
    reading, counting = read / (4e10 if read <= 192e6 else 2e10), operations / 1e12
    assert found.share == pytest.approx(max(reading, counting) / seconds)
    assert found.by == ("bandwidth" if reading >= counting else "arithmetic")


def test_unknown_limits_bound_nothing() -> None:
    assert share(Limits(), seconds=1, bytes_read=1, operations=1) is None
    with pytest.raises(UsageError):
        share(Limits(dram=1, cached=1, bf16=1), seconds=0, bytes_read=1, operations=1)


def test_bandwidth_is_measured_or_said_to_be_unknown() -> None:
    rate = read_bandwidth(1 << 20, 1, 2)
    assert rate is None or 1e8 < rate < 1e13
    if rate is not None:
        with pytest.raises(UsageError):
            read_bandwidth(100, 1, 1)


# Workers ------------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(1, 200_000), st.integers(0, 100))
def test_token_ids_are_inside_the_vocabulary_and_the_same_for_everybody(count: int, vocab: int, seed: int) -> None:
    ids = token_ids(count, vocab, seed)
    assert len(ids) == count and all(0 <= token < vocab for token in ids) and ids == token_ids(count, vocab, seed)


class Watched:
    """A subject that writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def begin(self, prompts: list[list[int]], length: int) -> Watched:
        self.calls.append(("begin", [len(prompt) for prompt in prompts], length))
        return self

    def read(self) -> list[int]:
        self.calls.append("read")
        return [1, 2]

    def step(self, tokens: list[int]) -> list[int]:
        self.calls.append(("step", tokens))
        return tokens

    def close(self) -> None:
        self.calls.append("close")


def test_a_case_reads_steps_and_closes_once_per_repeat() -> None:
    watched = Watched()
    case = {"name": "x", "prompts": [3, 5], "steps": 2, "repeats": 2, "warm": 1, "length": 256}
    found = run_case(watched, case, 300)
    once = [("begin", [3, 5], 256), "read", ("step", [1, 2]), ("step", [1, 2]), "close"]
    assert watched.calls == once * 3
    assert len(found["read"]) == len(found["step"]) == 2 and found["memory"] > 1e6


def test_the_worker_program_answers_in_one_line_and_catches_errors(tmp_path: Path, empty_home: Path) -> None:
    from orchard.bench.spawn import RUN

    case = {"name": "a", "prompts": [4], "steps": 3, "repeats": 1, "warm": 0, "length": 256}
    job = {"vocab": 260, "options": {"model": str(tiny_gguf(tmp_path / "tiny.gguf")), "via": "runner"}, "cases": [case]}
    for via, text in (("runner", json.dumps(job)), ("generate", json.dumps(job).replace("runner", "generate"))):
        command = [sys.executable, str(RUN), "own_engine"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
        answer = json.loads(done.stdout)
        assert via and len(answer["cases"]["a"]["step"]) == 1 and answer["about"]["system"], answer
    job["options"]["model"] = "no-such-model"
    command = [sys.executable, str(RUN), "own_engine"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=120)
    assert "ModelNotFound" in json.loads(done.stdout)["error"]


def test_memory_is_that_of_this_process() -> None:
    assert 1e7 < peak_memory() < 1e11


def test_every_family_of_the_zoo_is_lowered_or_named() -> None:
    from orchard.bench.families import nodes_in_torch
    from orchard.models.zoo import families

    found = nodes_in_torch()
    assert found.keys() == families().keys()
    assert all(found[name] == [] for name in WHOLE)
