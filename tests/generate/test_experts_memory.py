"""Peak memory of a process whose experts live in a file, as the system counts it: the budget and no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from orchard.cache.experts import Records, Source, write_records
from orchard.generate.experts_file import ARRAYS, expert_steps, without_experts
from orchard.generate.lowering import lower
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.formats import Int8
from orchard.nn.linear import GroupedLinear
from orchard.nn.moe import MoE, TopK
from orchard.nn.stack import Block, Stack
from orchard.ops.kernels.native import library, why_not
from orchard.ops.plan.file import to_json

LAYERS, EXPERTS, WIDE = 2, 16, 1024
MB = 1 << 20
WORKER = """
import json, sys
import numpy as np
from orchard.cache.experts import Records, Resident
from orchard.generate.experts import ExpertsProgram
from orchard.generate.native import NativeRunner
from orchard.generate.protocol import Work
from orchard.ops.plan.file import from_json
facts = json.load(open(sys.argv[1]))
tensors = dict(np.load(sys.argv[2]))
resident = Resident(Records.open(sys.argv[3]), int(sys.argv[4]), working_set=2)
program = ExpertsProgram(from_json(facts["plan"], tensors, facts["elsewhere"]), resident, threads=1)
slots = NativeRunner(program.plan, program=program).slots(1)
slots.open(0, 200)
slots.run([Work(0, list(range(60)), 1, prompt=True)])
for token in range(60):
    slots.run([Work(0, (token,), 1)])
assert resident.counters.reads > resident.slots
print(resident.nbytes, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A mixture with 24 MB of experts a layer, which are one expert over and over; everything else is small."""
    mlp = MoE.Config(hidden_dim=WIDE, experts=EXPERTS, router=TopK.Config(k=2))
    blocks = [Block.Config(mixer=Attention.Config(heads=4, kv_heads=2, head_dim=16), mlp=mlp) for _ in range(LAYERS)]
    tree = Decoder.Config(vocab=96, dim=512, context=256, stack=Stack.Config(layers=blocks), head=None).complete()
    tree = tree.rewrite(GroupedLinear, lambda node: node.clone(format=Int8.Config(group=64, half=True)))
    torch.manual_seed(0)
    plan = lower(tree.build().eval().requires_grad_(False))
    folder = tmp_path_factory.mktemp("memory")
    base, step = without_experts(plan), expert_steps(plan)[0]
    sizes = {name: plan.tensors[getattr(step, name).tensor].nbytes // EXPERTS for name in ARRAYS}
    one = {name: plan.tensors[getattr(step, name).tensor][: sizes[name]].copy() for name in ARRAYS}
    write_records(folder / "experts", [Source(f"layer {i}", EXPERTS, lambda _: one) for i in range(LAYERS)])
    (folder / "plan").write_text(json.dumps({"plan": to_json(base), "elsewhere": base.elsewhere}))
    np.savez(folder / "tensors.npz", **base.tensors)  # type: ignore[arg-type]
    return [str(folder / name) for name in ("plan", "tensors.npz", "experts")]


def peak(files: list[str], budget: int) -> tuple[int, int]:
    """Bytes of slots, and the process's largest resident set."""
    command = [sys.executable, "-c", WORKER, *files, str(budget)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        slots = int(process.stdout.readline())
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.stdin.close()
    return slots, next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


@pytest.mark.skipif(library() is None, reason=why_not())
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not count peaks")
def test_memory_beyond_the_rest_is_the_budget(files: list[str]) -> None:
    record = Records.open(files[2]).record_bytes
    few, least = peak(files, 2 * record)
    rest = least - few
    budget = 24 * record
    slots, most = peak(files, budget)
    assert 0.9 * budget < slots <= budget
    assert 0.9 * budget <= most - rest <= 1.05 * budget, f"{(most - rest) / MB:.1f} MB of {budget / MB:.1f}"
