"""PEFT folders: read as PEFT means them, written so that it reads them, refused by name where they hold something else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from orchard.core.errors import BadFile, ModelNotFound, OrchardError, UnsupportedFormat, UsageError
from orchard.models.zoo import families
from orchard.nn.tensors import tensor_shapes
from orchard.weights.adapters import (
    Base,
    OtherBase,
    Side,
    hf_modules,
    read_adapter,
    signature,
    standard_path,
    write_adapter,
)
from tests.parity.families import CASES, COMMON

LAYERS = "base_model.model.model.layers"
SHAPES = {
    f"stack.layers.{i}.{part}.weight": shape
    for i in (0, 1)
    for part, shape in {"mixer.q": (8, 6), "mixer.o": (6, 8), "mlp.gate": (10, 6), "mlp.down": (6, 10)}.items()
} | {"stack.layers.0.mixer.q.bias": (8,), "norm.weight": (6,)}
VECTORS = {"norm.weight": np.linspace(0.5, 2, 6, dtype=np.float32)}
BASE = Base("tiny", signature(SHAPES, VECTORS), SHAPES)
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "org/tiny",
    "r": 2,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "megatron_core": "megatron.core",
}


def tensors(rank: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make).to(dtype)

    return {
        f"{LAYERS}.0.self_attn.q_proj.lora_A.weight": some(rank, 6),
        f"{LAYERS}.0.self_attn.q_proj.lora_B.weight": some(8, rank),
        f"{LAYERS}.1.mlp.down_proj.lora_A.weight": some(rank, 10),
        f"{LAYERS}.1.mlp.down_proj.lora_B.weight": some(6, rank),
    }


def folder(path: Path, given: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors() if given is None else given, path / "adapter_model.safetensors", {"format": "pt"})
    return path


# Reading --------------------------------------------------------------------------------------------------------------


def test_side_paths_by_our_names(tmp_path: Path) -> None:
    adapter = read_adapter(folder(tmp_path / "one"), BASE)
    assert sorted(adapter.sides) == ["stack.layers.0.mixer.q", "stack.layers.1.mlp.down"]
    side = adapter.sides["stack.layers.0.mixer.q"]
    stored = tensors()
    assert np.array_equal(side.a, stored[f"{LAYERS}.0.self_attn.q_proj.lora_A.weight"].numpy())
    assert np.array_equal(side.b, stored[f"{LAYERS}.0.self_attn.q_proj.lora_B.weight"].numpy())
    assert side.scale == 3.0 and not adapter.biases
    assert adapter.config["base_model_name_or_path"] == "org/tiny"
    assert len(adapter.notes) == 1 and "does not say" in adapter.notes[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_type(tmp_path: Path, dtype: torch.dtype) -> None:
    adapter = read_adapter(folder(tmp_path / "one", tensors(dtype=dtype)), BASE)
    want = tensors(dtype=dtype)[f"{LAYERS}.1.mlp.down_proj.lora_B.weight"].float().numpy()
    assert np.array_equal(adapter.sides["stack.layers.1.mlp.down"].b, want)


def test_scales(tmp_path: Path) -> None:
    q, down = "stack.layers.0.mixer.q", "stack.layers.1.mlp.down"

    def scales(**changes: Any) -> tuple[float, float]:
        sides = read_adapter(folder(tmp_path / "one", **changes), BASE).sides
        return sides[q].scale, sides[down].scale

    assert scales(use_rslora=True) == (6 / math.sqrt(2),) * 2
    assert scales(alpha_pattern={"down_proj": 1}) == (3.0, 0.5)
    assert scales(alpha_pattern={"layers.0.self_attn.q_proj": 1, "q_proj": 4}) == (0.5, 3.0)
    assert scales(alpha_pattern={r".*\.1\.mlp\.down_proj": 5}) == (3.0, 2.5)
    assert scales(alpha_pattern={"own_proj": 5}) == (3.0, 3.0)  # the end of a name begins at a dot
    assert scales(r=4, rank_pattern={"q_proj": 2, r"model\.layers\.\d\.mlp\..*": 2}) == (3.0, 3.0)
    assert scales(fan_in_fan_out=True) == (3.0, 3.0)
    for targets in ("all-linear", None, r".*\.(q|down)_proj", ["model.layers.0.self_attn.q_proj", "mlp.down_proj"]):
        assert scales(target_modules=targets) == (3.0, 3.0)


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
@pytest.mark.parametrize("body", ["model.", "language_model.model.", "model.language_model.", ""])
def test_spellings(tmp_path: Path, prefix: str, body: str) -> None:
    names = {name.replace("base_model.model.model.", prefix + body): value for name, value in tensors().items()}
    assert len(read_adapter(folder(tmp_path / "one", names), BASE).sides) == 2


def test_trained_biases(tmp_path: Path) -> None:
    for name in ("q_proj.base_layer.bias", "q_proj.bias"):
        given = tensors() | {f"{LAYERS}.0.self_attn.{name}": torch.arange(8.0)}
        adapter = read_adapter(folder(tmp_path / "one", given, bias="lora_only"), BASE)
        assert np.array_equal(adapter.biases["stack.layers.0.mixer.q"], np.arange(8, dtype=np.float32))
    given = tensors() | {f"{LAYERS}.1.mlp.down_proj.base_layer.bias": torch.arange(6.0)}
    with pytest.raises(BadFile, match=r"layers\.1\.mlp\.down_proj"):  # the base has none there
        read_adapter(folder(tmp_path / "one", given), BASE)


def test_the_usual_names_are_those_of_every_family() -> None:
    """Where they are not, the family's own key map is asked; what they say must never be something else than it says."""
    seen = set()
    for kind, changes in CASES.values():
        hf = {**COMMON, **changes, "model_type": kind}
        family = families()[kind]
        for name, ours in hf_modules(family, tensor_shapes(family.tree(hf).complete())).items():
            usual = standard_path(name)
            assert usual in (None, ours), name
            seen.add((usual is None, ours.rpartition(".")[2]))
    assert {part for missing, part in seen if missing} == {"gate", "embedding"}  # routers, and no linear map at all
    assert {part for missing, part in seen if not missing} == {*"qkvo", "gate", "up", "down", "head"}


def test_other_names_come_from_the_family(tmp_path: Path) -> None:
    given = {name.replace("self_attn.q_proj", "attention.wq"): value for name, value in tensors().items()}
    path = folder(tmp_path / "one", given, target_modules=["wq", "down_proj"])
    with pytest.raises(UnsupportedFormat, match=r"attention\.wq"):
        read_adapter(path, BASE)
    own = Base("tiny", BASE.signature, SHAPES, lambda: {"model.layers.0.attention.wq": "stack.layers.0.mixer.q"})
    assert "stack.layers.0.mixer.q" in read_adapter(path, own).sides


# The base -------------------------------------------------------------------------------------------------------------


def test_a_signature_is_of_names_shapes_and_vectors() -> None:
    same = signature(dict(reversed(SHAPES.items())), VECTORS)
    assert same == BASE.signature and same.startswith("1:")
    rounded = {name: torch.tensor(value).bfloat16().float().numpy() for name, value in VECTORS.items()}
    assert signature(SHAPES, rounded) == same  # as a model kept in bfloat16 has them
    assert signature(SHAPES, {"norm.weight": VECTORS["norm.weight"] * 1.02}) != same
    assert signature({**SHAPES, "norm.weight": (7,)}, VECTORS) != same
    assert signature({name: shape for name, shape in SHAPES.items() if "bias" not in name}, VECTORS) != same


def test_an_adapter_for_another_base_names_both(tmp_path: Path) -> None:
    path = folder(tmp_path / "one", orchard_base="1:" + "ab" * 32)
    with pytest.raises(OtherBase, match=r"org/tiny \(abababababab\).* tiny \(") as caught:
        read_adapter(path, BASE)
    assert isinstance(caught.value, BadFile) and caught.value.hint and caught.value.code == "adapter-base"
    read_adapter(path)  # without a base nothing is held against it
    assert read_adapter(folder(tmp_path / "two", orchard_base=BASE.signature), BASE).notes == ()
    assert read_adapter(folder(tmp_path / "old", orchard_base="0:xx"), BASE).notes != ()


def test_shapes_of_another_base(tmp_path: Path) -> None:
    wide = {name: shape if "norm" in name else tuple(2 * n for n in shape) for name, shape in SHAPES.items()}
    with pytest.raises(BadFile, match=r"\[2, 6\], \[8, 2\].*beside \[16, 12\]"):
        read_adapter(folder(tmp_path / "one"), Base("wide", "1:x", wide))
    fewer = {name: shape for name, shape in SHAPES.items() if ".1." not in name}
    with pytest.raises(UnsupportedFormat, match=r"layers\.1\.mlp\.down_proj.*short"):
        read_adapter(folder(tmp_path / "one"), Base("short", "1:x", fewer))


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("layer_replication", [[0, 1]]),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("something_new", {"on": 1}),
    ],
)
def test_features_are_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedFormat, match=field) as caught:
        read_adapter(folder(tmp_path / "one", **{field: value}), BASE)
    assert caught.value.hint
    read_adapter(folder(tmp_path / "one", **{field: None}), BASE)


def test_other_kinds_and_beginnings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="PREFIX_TUNING"):
        read_adapter(folder(tmp_path / "one", peft_type="PREFIX_TUNING"), BASE)
    for start in ("pissa", "pissa_niter_4", "olora", "loftq", "corda"):
        with pytest.raises(UnsupportedFormat, match=start):
            read_adapter(folder(tmp_path / "one", init_lora_weights=start), BASE)
    for start in (True, False, "gaussian", "eva", "orthogonal"):
        read_adapter(folder(tmp_path / "one", init_lora_weights=start), BASE)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.lora_embedding_A",
        "model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "model.norm.weight",
        "model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight",
        "model.layers.0.mlp.experts.lora_B.weight",
    ],
)
def test_tensors_that_are_no_side_path_are_refused_by_name(tmp_path: Path, name: str) -> None:
    part = name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
    with pytest.raises(OrchardError, match=part.replace(".", r"\.")) as caught:
        read_adapter(folder(tmp_path / "one", tensors() | {f"base_model.model.{name}": torch.ones(2, 6)}), BASE)
    assert isinstance(caught.value, UnsupportedFormat)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"r": 3}, "rank 2"),
        ({"rank_pattern": {"q_proj": 4}}, "rank 2"),
        ({"target_modules": ["k_proj"]}, "target_modules"),
        ({"target_modules": 5}, "target_modules"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": 1e400}, "lora_alpha|JSON"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
    ],
)
def test_a_config_that_its_weights_belie(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(BadFile, match=what):
        read_adapter(folder(tmp_path / "one", **changes), BASE)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "pattern", [r"(.*)*x", r"(a+)+$", r".*.*.*.*.*q_proj", "(", r"(\w+\.)+q", "[" * 600, r"(.)\1*"]
)
def test_patterns_that_could_take_for_ever_are_not_tried(tmp_path: Path, pattern: str) -> None:
    for changes in ({"target_modules": pattern}, {"alpha_pattern": {pattern: 2}}):
        with pytest.raises(UnsupportedFormat, match="names modules by"):
            read_adapter(folder(tmp_path / "one", **changes), BASE)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        read_adapter(tmp_path / "nowhere", BASE)
    path = folder(tmp_path / "one")
    weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    whole = weights.read_bytes()
    for broken in (b"", whole[:40], whole[:-1], b"\xff" * 8 + whole[8:], whole + b"x"):
        weights.write_bytes(broken)
        with pytest.raises(BadFile):
            read_adapter(path, BASE)
    weights.unlink()
    with pytest.raises(BadFile, match=r"adapter_model\.safetensors"):
        read_adapter(path, BASE)
    (path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedFormat, match="pickle"):
        read_adapter(path, BASE)
    for broken in (b"", b"[]", b"{", b"\xff", b'{"r": 1, "r": 2}'):
        config.write_bytes(broken)
        with pytest.raises(BadFile):
            read_adapter(path, BASE)
    with config.open("wb") as file:
        file.truncate(1 << 30)  # a hole, and never read
    with pytest.raises(BadFile, match="bytes"):
        read_adapter(path, BASE)
    config.unlink()
    with pytest.raises(BadFile, match=r"adapter_config\.json"):
        read_adapter(path, BASE)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    """Headers may claim what they like: what does not fit the base is refused before a tensor is touched."""
    path = folder(tmp_path / "one")
    header = {
        f"{LAYERS}.0.self_attn.q_proj.lora_A.weight": {
            "dtype": "F32",
            "shape": [2**25, 6],
            "data_offsets": [0, 6 << 27],
        },
        f"{LAYERS}.0.self_attn.q_proj.lora_B.weight": {
            "dtype": "F32",
            "shape": [8, 2**25],
            "data_offsets": [6 << 27, 14 << 27],
        },
    }
    text = json.dumps(header).encode()
    with (path / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (14 << 27))
    with pytest.raises(BadFile, match="shapes"):
        read_adapter(path, BASE)


def test_halves_and_numbers_that_are_none(tmp_path: Path) -> None:
    given = tensors()
    del given[f"{LAYERS}.1.mlp.down_proj.lora_B.weight"]
    with pytest.raises(BadFile, match="half"):
        read_adapter(folder(tmp_path / "one", given), BASE)
    for bad in (math.nan, math.inf):
        given = tensors()
        given[f"{LAYERS}.1.mlp.down_proj.lora_B.weight"][3, 1] = bad
        with pytest.raises(BadFile, match="number that is none"):
            read_adapter(folder(tmp_path / "one", given), BASE)
    whole = {name: value.to(torch.int32) for name, value in tensors().items()}
    with pytest.raises(UnsupportedFormat, match="I32"):
        read_adapter(folder(tmp_path / "one", whole), BASE)
    with pytest.raises(BadFile, match="no side paths"):
        read_adapter(folder(tmp_path / "one", {}), BASE)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_a_typed_error(tmp_path: Path, data: st.DataObject) -> None:
    path = folder(tmp_path / "one")
    file = path / data.draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, min(len(raw), 900) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw))
    try:
        read_adapter(path, BASE)
    except OrchardError as error:
        assert error.hint


# Writing --------------------------------------------------------------------------------------------------------------


def test_written_and_read_again(tmp_path: Path) -> None:
    make = np.random.default_rng(0)
    sides = {
        name.removesuffix(".weight"): Side(
            make.normal(size=(rank, shape[1])).astype(np.float32),
            make.normal(size=(shape[0], rank)).astype(np.float32),
            scale,
        )
        for (name, shape), rank, scale in zip(
            [(name, shape) for name, shape in SHAPES.items() if len(shape) == 2], [2, 2, 3, 2], [0.5, 0.5, 0.5, 2.0]
        )
    }
    for rslora in (False, True):
        path = tmp_path / f"made-{rslora}"
        write_adapter(path, sides, BASE, base_name="org/tiny", rslora=rslora, more={"lora_dropout": 0.1})
        again = read_adapter(path, BASE)
        assert again.sides.keys() == sides.keys() and again.notes == ()
        for name, side in sides.items():
            found = again.sides[name]
            assert np.array_equal(found.a, side.a) and np.array_equal(found.b, side.b)
            assert found.scale == pytest.approx(side.scale, rel=1e-12)
        config = json.loads((path / "adapter_config.json").read_text())
        assert config["orchard_base"] == BASE.signature and config["base_model_name_or_path"] == "org/tiny"
        assert config["lora_dropout"] == 0.1 and config["r"] == 2 and list(config["rank_pattern"].values()) == [3]
        assert f"{LAYERS}.0.self_attn.q_proj.lora_A.weight" in load_file(path / "adapter_model.safetensors")
    assert again.digest == read_adapter(path, BASE).digest != read_adapter(folder(tmp_path / "other"), BASE).digest


def test_writing_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = {"stack.layers.0.mixer.q": Side(np.ones((2, 6), np.float32), np.ones((8, 2), np.float32), 1.0)}
    write_adapter(tmp_path / "one", sides, BASE, dtype="bfloat16")
    with pytest.raises(UsageError, match="there already"):
        write_adapter(tmp_path / "one", sides, BASE)
    with pytest.raises(UsageError, match="int3"):
        write_adapter(tmp_path / "two", sides, BASE, dtype="int3")
    with pytest.raises(UsageError, match="without"):
        write_adapter(tmp_path / "two", {}, BASE)
    with pytest.raises(UsageError, match=r"mlp\.router"):
        write_adapter(tmp_path / "two", {"stack.layers.0.mlp.router": sides["stack.layers.0.mixer.q"]}, BASE)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orchard.weights.adapters.write_text", full)
    with pytest.raises(OrchardError, match="no room"):
        write_adapter(tmp_path / "two", sides, BASE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]
