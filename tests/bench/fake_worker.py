"""A stand-in for orchard/bench/workers/run.py: answers at once, with times that a test can reckon with."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

STEP = {"own_engine": 0.002, "peer_llama": 0.008, "peer_transformers": 0.05}


def times(module: str, case: dict, options: dict) -> dict:
    """Flash attention makes reading twice as fast and steps twice as slow, so that the best setting differs by figure."""
    step = STEP[module] * (2.0 if options.get("flash_attention") == "on" else 1.0)
    read = STEP[module] * sum(case["prompts"]) / 10 * (0.5 if options.get("flash_attention") == "on" else 1.0)
    steps = [step * len(case["prompts"]) ** 0.5 * (1 + max(case["prompts"]) / 1000)] * case["repeats"]
    read_at = [1e10] * case["repeats"] if case["limit"] else []
    steps = steps if case["steps"] else []
    return {"read": [read] * case["repeats"], "step": steps, "memory": 120_000, "bandwidth": read_at}


def task(name: str, options: dict) -> dict:
    if name == "limits":
        return {"dram": 2e10, "cached": 4e10, "bf16": 1e12, "int8": None}
    if name == "quality":
        way = {"agreement": 0.995, "nats": 2e-4}
        return {"texts": options["texts"], "tokens": 500, "decode": way, "prefill": way, "lost": []}
    if name == "many":
        from orchard.bench.many import UNITS

        rounds = {of: [2.0, 2.0] for of in (*UNITS, "same")} | {"memory": [1.0], "same": [1.0, 1.0]}
        return {"rounds": rounds | {"requests 32": [14.0, 14.0]}, "requests": 10_000}
    if name == "speculation":
        from orchard.bench.speculation import CASES

        plain = {"seconds": [2.0], "tokens": 90, "calls": 90, "ids": [1, 2], "steady": True, "guessed": 0, "kept": 0}
        quick = plain | {"seconds": [1.0], "calls": 30, "guessed": 80, "kept": 60}
        return {
            f"{case.name}: {way}": plain if way == "none" else quick for case in CASES for way in ("none", "lookup")
        }
    if name == "gpu":
        case = {"rates": [90.0, 110.0], "share": 0.6}
        return {"device": "a GPU", "bandwidth": {"copy": 4e12}, "cases": {"gpu 1B bf16 batch 1": case}}
    if name == "families":
        return {name: [] for name in ("gemma3", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "olmoe")}
    return {"made": True}


def main() -> None:
    module, job = sys.argv[1], json.load(sys.stdin)
    print("noise that is no answer")
    if os.environ.get("FAKE_FAILS") == module:
        sys.exit("this one cannot run")
    if os.environ.get("FAKE_ERROR") == module:
        print(json.dumps({"error": "MemoryError: no room"}))
        return
    if os.environ.get("FAKE_HANGS"):
        Path(os.environ["FAKE_HANGS"]).write_text(str(os.getpid()))
        time.sleep(60)
    if "task" in job:
        print(json.dumps({"result": task(job["task"], job["options"])}))
        return
    cases = {case["name"]: times(module, case, job["options"]) for case in job["cases"]}
    print(json.dumps({"cases": cases, "about": {"version": "1", "system": "AMX_INT8 = 1"}}))


if __name__ == "__main__":
    main()
