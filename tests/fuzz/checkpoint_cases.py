"""Cases for `checkpoint_fuzz.py`: tiny models of every family whose config, tensors or tokenizer were changed.

The bytes are always sound; that damaged ones are refused is what `weights_fuzz.py` proves.
"""

from __future__ import annotations

import copy
import json
import math
import random
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from orchard.models.zoo import families
from orchard.weights.export import save_folder, save_gguf
from orchard.weights.gguf import GGMLType, GGUFFile
from orchard.weights.gguf.arch import FIELDS, ROPE_FACTORS
from orchard.weights.safetensors import SafetensorsFile
from tests.fuzz.weights_fuzz import put
from tests.parity.families import CASES, COMMON, GGUF_CASES
from tests.tiny import byte_alphabet, tiny_tokenizer_files

SMALL = {"vocab_size": 48, "intermediate_size": 64, "max_position_embeddings": 64}
TWO_LAYERS = ("gemma2", "gemma3", "qwen2-window", "qwen3-moe")  # whose layers differ
OURS = {  # a family of our own, which no reference has
    "tracks": (
        "parallel_tracks",
        {
            "num_tracks": 2,
            "track_depth": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "rope_on_full_attention": False,
            "expert_layers": [1],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    )
}
Stored = tuple[str, tuple[int, ...], bytes]  # the format's name of the type, the shape in torch's order, the data


@dataclass
class Sample:
    """A model as plain data, so that any part of it can be changed before it is written."""

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Stored]
    beside: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


# Samples ----------------------------------------------------------------------------------------------------------


@cache
def make_samples() -> list[Sample]:
    """A folder of every case of every family, a GGUF file of those that GGUF can describe, one that also sees."""
    samples = []
    with tempfile.TemporaryDirectory() as name:
        cases = CASES | OURS
        for number, case in enumerate(sorted(cases)):
            kind, changes = cases[case]
            hf = {"model_type": kind, **COMMON, **changes, **SMALL, "num_hidden_layers": 1 + (case in TWO_LAYERS)}
            torch.manual_seed(number)
            model, path = families()[kind].tree(hf).build(), Path(name) / case
            save_folder(model, path, family=families()[kind], hf_config=hf)
            samples.append(_folder_sample(hf, path / "model.safetensors"))
            if case in (*GGUF_CASES, "qwen2-yarn", "llama-linear-rope"):
                type_ = ("f32", "f16", "q8_0")[number % 3]
                save_gguf(model, path / "m.gguf", family=families()[kind], hf_config=hf, type=type_)
                samples.append(_gguf_sample(path / "m.gguf"))
    samples.append(_seeing(next(sample for sample in samples if sample.config.get("model_type") == "gemma3_text")))
    return samples


def _folder_sample(hf: dict[str, Any], path: Path) -> Sample:
    files = tiny_tokenizer_files(vocab=SMALL["vocab_size"])
    with SafetensorsFile.open(path) as file:
        tensors = {n: (info.dtype, info.shape, file.raw(n).tobytes()) for n, info in file.tensors.items()}
    return Sample("folder", hf, tensors, {name: json.loads(data) for name, data in files.items()})


def _gguf_sample(path: Path) -> Sample:
    with GGUFFile.open(path) as file:
        tensors = {n: (info.type.name, info.shape, file.raw(n).tobytes()) for n, info in file.tensors.items()}
        config = dict(file.metadata)
    tokens = byte_alphabet()[: SMALL["vocab_size"]]
    config |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
    config |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": "{{ messages }}", "general.license": "mit"}
    return Sample("gguf", config, tensors)


def _seeing(text: Sample) -> Sample:
    """A text model as it lies in a checkpoint that also sees."""
    tensors = {f"language_model.{name}": stored for name, stored in text.tensors.items()}
    tensors["vision_tower.encoder.layers.0.weight"] = ("F32", (2, 2), bytes(16))
    return Sample("folder", {"model_type": "gemma3", "text_config": text.config}, tensors, text.beside)


# Writing ----------------------------------------------------------------------------------------------------------


def gguf_value(value: Any) -> bytes:
    """A value with its type in front, apart from Orchard's writer: any value that a file can hold."""
    kind = _gguf_kind(value)
    return struct.pack("<I", kind) + _gguf_payload(value, kind)


def _gguf_kind(value: Any) -> int:
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        return 11 if value < 0 else 4 if value < 1 << 32 else 10
    return {float: 12, str: 8, list: 9}[type(value)]


def _gguf_payload(value: Any, kind: int) -> bytes:
    if kind == 8:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data
    if kind == 9:
        inner = max(map(_gguf_kind, value), default=8)
        return struct.pack("<IQ", inner, len(value)) + b"".join(_gguf_payload(item, inner) for item in value)
    return struct.pack({4: "<I", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}[kind], value)


def _text(value: str) -> bytes:
    return _gguf_payload(value, 8)


def gguf_bytes(sample: Sample) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(sample.tensors), len(sample.config))]
    parts += [_text(key) + gguf_value(value) for key, value in sample.config.items()]
    body, place = [], 0
    for name, (kind, shape, data) in sample.tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(_text(name) + dims + struct.pack("<IQ", GGMLType[kind], place))
        body.append(data + bytes(-len(data) % 32))
        place += len(body[-1])
    header = b"".join(parts)
    return header + bytes(-len(header) % 32) + b"".join(body)


def write_folder(sample: Sample, path: Path) -> None:
    header, place = {}, 0
    for name, (kind, shape, data) in sample.tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [place, place + len(data)]}
        place += len(data)
    text = json.dumps(header).encode()
    put(
        path / "model.safetensors",
        struct.pack("<Q", len(text)) + text + b"".join(s[2] for s in sample.tensors.values()),
    )
    put(path / "config.json", json.dumps(sample.config).encode())
    for name, value in sample.beside.items():
        put(path / name, json.dumps(value).encode())


def write(sample: Sample, folder: Path) -> Path:
    if sample.kind == "gguf":
        put(folder / "case.gguf", gguf_bytes(sample))
        return folder / "case.gguf"
    (folder / "case").mkdir(exist_ok=True)
    write_folder(sample, folder / "case")
    return folder / "case"


# Damage -----------------------------------------------------------------------------------------------------------

NUMBERS = (
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    16,
    31,
    33,
    64,
    4000,
    4096,
    10**7,
    1 << 24,
    1 << 31,
    1 << 32,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
REALS = (0.0, -0.0, 1.0, 30.0, 0.5, 1e-40, 1e-12, 1e300, math.nan, math.inf, -math.inf, -1.0)
TEXTS = (
    "",
    "x",
    "32",
    "linear",
    "yarn",
    "llama3",
    "default",
    "full_attention",
    "silu",
    "llama",
    "\x1b[31m",
    "y" * 5000,
)
LISTS: tuple[list[Any], ...] = (
    [],
    [1],
    [2, 2],
    [4, 4, 4],
    [True, False],
    [0.5] * 4,
    ["a", "b"],
    [[1, 2], [3]],
    [7] * 1500,
)
TABLES: tuple[Any, ...] = (
    None,
    {},
    {"a": 1},
    {"rope_type": "yarn"},
    {"factor": 0},
    {"full_attention": 3},
    [{"name": []}],
)
FOLDER_TYPES = ("I8", "I64", "F16", "F64", "BF16", "F32", "BOOL", "U8", "F8_E4M3", "F8_E5M2", "F4", "Z9")
GGUF_TYPES = ("I8", "I32", "I64", "F16", "F64", "BF16", "F32", "IQ4_NL", "Q4_0", "IQ2_XS")
ROPE_KEYS = (
    "freq_base",
    "freq_base_swa",
    "dimension_count",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
)
HF_KEYS = (
    *("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor", "layer_types"),
    *("sliding_window_pattern", "hidden_act", "hidden_activation", "attention_bias", "mlp_bias", "tie_word_embeddings"),
    *(
        "mlp_only_layers",
        "decoder_sparse_step",
        "use_sliding_window",
        "max_window_layers",
        "clip_qkv",
        "norm_topk_prob",
    ),
    *("query_pre_attn_scalar", "num_local_experts", "quantization_config", "dtype", "text_config", "model_type"),
)
ROPE_FIELDS = (
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("original_max_position_embeddings", "attention_factor", "partial_rotary_factor", "factors"),
)


def hostile(rng: random.Random, old: Any, *, tables: bool) -> Any:
    """A value to put in the place of another: near it, of another type, or at the edge of what numbers are."""
    choice = rng.randrange(7)
    if choice == 0 and type(old) in (int, float):
        near = rng.choice((-old, old + 1, old - 1, old * 2, float(old), str(old), [old, old], bool(old)))
        return near if type(near) is not int else max(-(1 << 63), min(near, (1 << 64) - 1))
    if choice == 1 and isinstance(old, list):
        return rng.choice((old[:-1], old * 2, old[::-1], [0] * len(old), old[:1] and old[0]))
    if choice <= 2:
        number = rng.choice(NUMBERS)
        return number if number >= 1 << 63 else number * rng.choice((1, 1, 1, -1))
    if choice == 3:
        return rng.choice(REALS)
    if choice == 4:
        return rng.choice(TEXTS)
    if choice == 5 or not tables:
        return rng.choice((True, False, *LISTS))
    return copy.deepcopy(rng.choice(TABLES))


def change_gguf_key(sample: Sample, rng: random.Random) -> str:
    arch = sample.config.get("general.architecture")
    known = [*FIELDS.values(), *(f"rope.{key}" for key in ROPE_KEYS), "attention.sliding_window_pattern"]
    key = rng.choice(list(sample.config)) if rng.random() < 0.5 else f"{arch}.{rng.choice(known)}"
    if rng.random() < 0.1:
        return f"without {key}: {sample.config.pop(key, None)!r}"
    sample.config[key] = hostile(rng, sample.config.get(key), tables=False)
    return f"{key} = {sample.config[key]!r}"


def change_hf_field(sample: Sample, rng: random.Random) -> str:
    where: dict[str, Any] = sample.config
    if isinstance(where.get("text_config"), dict) and rng.random() < 0.9:
        where = where["text_config"]
    key = rng.choice(list(where) or ["x"]) if rng.random() < 0.5 else rng.choice(HF_KEYS)
    if rng.random() < 0.3:
        rope = where.setdefault("rope_parameters", {})
        rope = rope.get("full_attention", rope) if isinstance(rope, dict) else rope
        if isinstance(rope, dict):
            where, key = rope, rng.choice(ROPE_FIELDS)
    if rng.random() < 0.1:
        return f"without {key}: {where.pop(key, None)!r}"
    where[key] = hostile(rng, where.get(key), tables=True)
    return f"{key} = {where[key]!r}"


def change_beside(sample: Sample, rng: random.Random) -> str:
    """The tokenizer has its own tests; here it only must not bring the others down."""
    if sample.kind == "gguf":
        names = [name for name in sample.config if name.startswith("tokenizer.")]
        key = rng.choice([*names, "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.bos_token_id"])
        sample.config[key] = hostile(rng, sample.config.get(key), tables=False)
        return f"{key} = {sample.config[key]!r}"
    where = sample.beside[rng.choice(list(sample.beside))]
    where = where["model"] if isinstance(where.get("model"), dict) and rng.random() < 0.5 else where
    key = rng.choice([*where, "chat_template", "eos_token", "added_tokens_decoder"])
    where[key] = hostile(rng, where.get(key), tables=True)
    return f"tokenizer's {key} = {where[key]!r}"


def change_tensor(sample: Sample, rng: random.Random) -> str:
    if not sample.tensors:
        return "no tensors"
    name = rng.choice(list(sample.tensors))
    kind, shape, data = sample.tensors[name]
    step = rng.randrange(8)
    if step == 0:
        del sample.tensors[name]
    elif step <= 2:
        other = _another_name(sample, name, rng)
        sample.tensors[other] = sample.tensors.pop(name) if step == 1 else sample.tensors[name]
        return f"{'renamed' if step == 1 else 'copied'} {name} to {other}"
    elif step == 3:
        other = rng.choice(list(sample.tensors))
        sample.tensors[name], sample.tensors[other] = sample.tensors[other], sample.tensors[name]
        return f"swapped {name} and {other}"
    elif step <= 5:
        flat = math.prod(shape)
        shape = rng.choice((shape[::-1], (flat,), (1, *shape), (*shape, 1), (shape[0] + 1, *shape[1:]), (2, flat // 2)))
        sample.tensors[name] = resized(sample, kind, shape, data)
    elif step == 6:
        names = GGUF_TYPES if sample.kind == "gguf" else FOLDER_TYPES
        sample.tensors[name] = resized(sample, rng.choice(names), shape, data)
    else:
        word = rng.choice((b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f", b"\x00\x00\x00\x00"))  # NaN, infinity, zero
        sample.tensors[name] = (kind, shape, (word * (len(data) // 4 + 1))[: len(data)])
    return f"{name}: step {step}, now {sample.tensors.get(name, ('gone',))[:2]}"


def _another_name(sample: Sample, name: str, rng: random.Random) -> str:
    heads = ("output.weight",) if sample.kind == "gguf" else ("lm_head.weight", "language_model.lm_head.weight")
    spare = (
        ROPE_FACTORS,
        "model.rotary_emb.inv_freq",
        "vision_tower.x",
        "blk.0.vision_tower.x",
        "x.output.weight",
        "x\ud7ff",
    )
    near = (
        name.replace(".1.", ".2."),
        name.replace(".0.", ".900000000000."),
        f"model.{name}",
        name.replace("weight", "bias"),
    )
    return rng.choice((*heads, *heads, *spare, *near, rng.choice(list(sample.tensors))))


def resized(sample: Sample, kind: str, shape: tuple[int, ...], data: bytes) -> Stored:
    """Data of another type or shape, in the right amount, so that the byte-level reader has nothing to refuse."""
    if sample.kind == "gguf":
        while shape[-1] % GGMLType[kind].block_size:
            shape = (*shape[:-1], shape[-1] + 1)
        size = GGMLType[kind].nbytes(shape)
    else:
        size = math.prod(shape) * {"8": 1, "16": 2, "32": 4, "64": 8}.get(kind.lstrip("BIFU"), 1)
        size = size // 2 if kind == "F4" else size
    return kind, shape, (data * (size // max(len(data), 1) + 1))[:size]


def change_factors(sample: Sample, rng: random.Random) -> str:
    """A tensor (or list) of rotary factors: too long, too short, with zeros and worse."""
    values = [rng.choice((1.0, 1.0, 2.0, 8.0, *REALS))] * rng.choice((0, 1, 3, 4, 4, 8, 8, 16))
    if sample.kind == "gguf":
        kind, size = rng.choice((("F32", "f"), ("F32", "f"), ("F64", "d")))
        data = b"".join(struct.pack(f"<{size}", value if size == "d" or abs(value) < 1e38 else 0.0) for value in values)
        sample.tensors[ROPE_FACTORS] = (kind, (len(values) or 1,), data or bytes(8)[: 4 if size == "f" else 8])
    else:
        sample.config["rope_parameters"] = {"rope_type": "factors", "factors": values}
    return f"factors {values!r}"


def make_case(samples: list[Sample], seed: int, number: int) -> Sample:
    rng = random.Random(seed << 40 | number)
    base = rng.choice(samples)
    sample = Sample(base.kind, copy.deepcopy(base.config), dict(base.tensors), copy.deepcopy(base.beside), [])
    change_config = change_gguf_key if sample.kind == "gguf" else change_hf_field
    steps: list[Callable[[Sample, random.Random], str]] = [change_config] * 6 + [change_tensor] * 4
    steps += [change_beside, change_factors]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        sample.log.append(rng.choice(steps)(sample, rng)[:300])
    return sample
