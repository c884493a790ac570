"""Cases for `compressed_fuzz.py`: tiny compressed files whose tree, description, tensors or tokenizer were changed.

The bytes are always sound, and the accounting is made right again in most cases, so that the damage reaches what comes after it.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from orchard.weights.compressed_file import FILES, KEY
from orchard.weights.safetensors import SafetensorsFile
from tests.fuzz.checkpoint_cases import Sample, change_tensor, hostile
from tests.weights.compressed_models import built_with, written

KINDS = (
    "orchard.nn.linear:Linear",
    "orchard.nn.linear:Embedding",
    "orchard.nn.formats.int2:Int2",
    "orchard.nn.formats.plain:Plain",
    "orchard.nn.norm:RMSNorm",
    "orchard.nn.layer_norm:LayerNorm",
    "orchard.nn.moe.moe:MoE",
    "orchard.nn.attention.scaling:Yarn",
    "orchard.transforms.lora_linear:LoraLinear",
    "orchard.cache.codecs.int8:Int8",
    "orchard.cache.policies.window:Window",
    "orchard.nn.nowhere:Nothing",
    "orchard.cli.main:Typer",
    "os:system",
    "tests.fuzz.compressed_cases:Sample",
    "orchard.nn.linear:nn.Linear",
    "",
)
CASES = ((), ("formats", "sides"), ("formats", "shared", "kv8"), ("sides", "dora", "narrow"))


@cache
def make_compressed() -> list[Sample]:
    """Sound files: plain, packed with side paths, with shared stores, narrower with DoRA's lengths."""
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        for number, changes in enumerate(CASES):
            path = written(Path(folder) / f"{number}.orchard", built_with(changes))
            with SafetensorsFile.open(path) as file:
                tensors = {n: (info.dtype, info.shape, file.raw(n).tobytes()) for n, info in file.tensors.items()}
                samples.append(Sample("orchard", json.loads(file.metadata[KEY]), tensors))
    return samples


def compressed_bytes(sample: Sample, *, counted: bool = True) -> bytes:
    """A file of these tensors. `counted`: its accounting adds up, whatever is in it."""
    entries, place = {}, 0
    for name, (kind, shape, data) in sample.tensors.items():
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [place, place + len(data)]}
        place += len(data)
    body, length, text = b"".join(data for *_, data in sample.tensors.values()), 0, b""
    for _ in range(6):
        if counted and isinstance(sample.config.get("bits"), dict):
            sample.config["bits"] = _counts(sample, length, len(body))
        text = json.dumps({"__metadata__": {KEY: json.dumps(sample.config)}, **entries}).encode()
        text += b" " * (-len(text) % 8)
        if 8 + len(text) == length:
            break
        length = 8 + len(text)
    return len(text).to_bytes(8, "little") + text + body


def _counts(sample: Sample, header: int, body: int) -> dict[str, Any]:
    words = len(sample.tensors[FILES][2]) if FILES in sample.tensors else 0
    counts = dict.fromkeys(("scales", "embedding", "sides", "norms"), 0)
    return {
        "weights": {"Any": body - words},
        **counts,
        "tokenizer": words,
        "header": header,
        "total": header + body,
        "dense_weights": 1000,
        "kv_bytes_per_token": 64,
    }


# Damage -----------------------------------------------------------------------------------------------------------------


def make_compressed_case(seed: int, number: int) -> tuple[Sample, bytes]:
    rng = random.Random(seed << 40 | number)
    base = rng.choice(make_compressed())
    sample = Sample(base.kind, copy.deepcopy(base.config), dict(base.tensors), {}, [])
    steps = [change_tree] * 7 + [change_description] * 2 + [change_tensor] * 3 + [change_words]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        sample.log.append(rng.choice(steps)(sample, rng)[:300])
    return sample, compressed_bytes(sample, counted=rng.random() < 0.9)


def change_tree(sample: Sample, rng: random.Random) -> str:
    tree = sample.config.get("tree")
    return _change_somewhere(tree, rng) if isinstance(tree, dict) else "no tree"


def change_description(sample: Sample, rng: random.Random) -> str:
    if rng.random() < 0.4:
        hf = sample.config.get("hf_config")
        return _change_somewhere(hf, rng) if isinstance(hf, dict) and hf else "no config"
    key = rng.choice([*sample.config, "format", "family"])
    sample.config[key] = hostile(rng, sample.config.get(key), tables=True)
    return f"{key} = {sample.config[key]!r}"


def change_words(sample: Sample, rng: random.Random) -> str:
    """The tokenizer's files, as they lie compressed."""
    if not sample.tensors.get(FILES, ("", (), b""))[2]:
        return "no tokenizer"
    kind, _, data = sample.tensors[FILES]
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 3, 20))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    damaged = damaged[: rng.choice((len(damaged), len(damaged), len(damaged) // 2, 0))]
    sample.tensors[FILES] = (kind, (len(damaged),), bytes(damaged))
    return f"the tokenizer's files, {len(damaged)} bytes"


def _change_somewhere(value: Any, rng: random.Random) -> str:
    """Walk down at random, and change what is found there: a value, a kind, a name, the number of items."""
    path = "tree"
    while True:
        if isinstance(value, list):
            if not value or rng.random() < 0.15:
                how = rng.choice(("shorter", "longer", "deeper"))
                value[:] = value[:-1] if how == "shorter" else value * 2 if how == "longer" else [_nested(rng)]
                return f"{path} {how}"
            key: Any = rng.randrange(len(value))
        elif isinstance(value, dict) and value:
            if rng.random() < 0.05:
                value[rng.choice(("owner", "group", "x", "kind"))] = hostile(rng, None, tables=True)
                return f"{path} with another field"
            key = rng.choice(list(value))
        else:
            return f"{path} is empty"
        path += f".{key}"
        inner = value[key]
        if isinstance(inner, list | dict) and inner and rng.random() < 0.9:
            value = inner
            continue
        if isinstance(value, dict) and rng.random() < 0.1:
            return f"without {path}: {value.pop(key)!r}"
        value[key] = rng.choice(KINDS) if key == "kind" else hostile(rng, inner, tables=True)
        return f"{path} = {value[key]!r}"


def _nested(rng: random.Random) -> Any:
    found: Any = 1
    for _ in range(rng.choice((3, 30, 200))):
        found = [found]
    return found
