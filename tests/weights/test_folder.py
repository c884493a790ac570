"""Model folders: written for transformers and read back, sharded or not; broken and hostile folders give typed errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.core.errors import BadFile, ModelNotFound, OrchardError, UnsupportedFormat, UsageError
from orchard.weights.folder import HFFolder, write_folder
from orchard.weights.safetensors import Lazy, write_safetensors

CONFIG = {"model_type": "llama", "hidden_size": 4}
TENSORS = {f"layer.{i}.weight": torch.full((4, 4), float(i)) for i in range(5)}  # 64 bytes each


def test_one_file(tmp_path: Path) -> None:
    write_folder(
        tmp_path / "m",
        CONFIG,
        TENSORS,
        extra_files={"tokenizer.json": b"{}", "chat_template.jinja": "{{ é }}".encode()},
    )
    with HFFolder.open(tmp_path / "m") as folder:
        assert folder.config == CONFIG
        assert set(folder.tensors) == set(TENSORS)
        assert all(torch.equal(folder.read(name), tensor) for name, tensor in TENSORS.items())
        assert folder.tokenizer == tmp_path / "m" / "tokenizer.json"
        assert folder.chat_template == "{{ é }}"
        assert (
            folder.generation_config is None and folder.tokenizer_config is None and folder.special_tokens_map is None
        )
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o755


def test_shards(tmp_path: Path) -> None:
    lazy = {name: Lazy((4, 4), torch.float32, lambda t=tensor: t) for name, tensor in TENSORS.items()}  # type: ignore[misc]
    write_folder(tmp_path / "m", CONFIG, lazy, shard_bytes=128)
    names = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 64 and set(index["weight_map"]) == set(TENSORS)
    with HFFolder.open(tmp_path / "m") as folder:
        assert list(folder.tensors) == sorted(TENSORS)
        assert all(torch.equal(folder.read(name), tensor) for name, tensor in TENSORS.items())


def test_functions_are_called_once_for_their_shape_and_once_for_their_values(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> torch.Tensor:
        calls.append(1)
        return torch.ones(2)

    write_folder(tmp_path / "m", CONFIG, {"a": make})
    assert len(calls) == 2


def test_a_tensor_above_the_limit_gets_its_own_shard(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", CONFIG, TENSORS, shard_bytes=1)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 5


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 8_000])
def test_transformers_both_ways(tmp_path: Path, shard_bytes: int) -> None:
    """transformers saves, Orchard reads and writes, transformers loads: the same bits."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    with HFFolder.open(tmp_path / "theirs") as folder:
        assert len(list((tmp_path / "theirs").glob("*.safetensors"))) == (1 if shard_bytes > 10_000 else 2)
        assert folder.generation_config is not None
        tensors = {name: lambda n=name: folder.read(n) for name in folder.tensors}  # type: ignore[misc]
        write_folder(tmp_path / "ours", folder.config, tensors, shard_bytes=shard_bytes)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.dtype == torch.bfloat16
    expected = model.state_dict()
    assert set(again.state_dict()) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_an_empty_folder_is_filled_and_a_full_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", CONFIG, TENSORS)
    before = (tmp_path / "empty" / "config.json").read_bytes()
    with pytest.raises(UsageError, match="not an empty folder") as caught:
        write_folder(tmp_path / "empty", {}, {})
    assert caught.value.hint
    assert (tmp_path / "empty" / "config.json").read_bytes() == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError):
        write_folder(tmp_path / "file", {}, {})
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        ({"a": object()}, {}),
        (CONFIG, {"../out": b"x"}),
        (CONFIG, {"/etc/out": b"x"}),
        (CONFIG, {"config.json": b"{}"}),
        (CONFIG, {"model-00001-of-00002.safetensors": b""}),
    ],
)
def test_a_failed_write_leaves_nothing(tmp_path: Path, config: dict[str, Any], extra: dict[str, bytes]) -> None:
    with pytest.raises(OrchardError):
        write_folder(tmp_path / "m", config, TENSORS, extra_files=extra)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def stop() -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "m", CONFIG, {**TENSORS, "last": Lazy((4,), torch.float32, stop)}, shard_bytes=128)
    assert list(tmp_path.iterdir()) == []


def test_missing_and_broken_configs(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        HFFolder.open(tmp_path / "none")
    with pytest.raises(BadFile, match=r"no config\.json"):
        HFFolder.open(tmp_path)
    for text in (b"", b"[1]", b"{", b"\xff", b"[" * 5000, b'{"a":1,"a":2}'):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(BadFile, match=r"config\.json") as caught:
            HFFolder.open(tmp_path)
        assert caught.value.hint


def test_pickle_is_refused_and_no_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadFile, match=r"no model\.safetensors"):
        HFFolder.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UnsupportedFormat, match=r"pickle") as caught:
        HFFolder.open(tmp_path)
    assert "save_pretrained" in caught.value.hint


def sharded(path: Path, weight_map: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_broken_indexes(tmp_path: Path) -> None:
    for number, weight_map in enumerate(([], {"a": 1}, None)):
        with pytest.raises(BadFile, match="weight_map"):
            HFFolder.open(sharded(tmp_path / f"i{number}", weight_map))
    with pytest.raises(BadFile, match=r"lacks the weights file 'gone\.safetensors'"):
        HFFolder.open(sharded(tmp_path / "gone", {"a": "gone.safetensors"}))
    folder = sharded(tmp_path / "absent", {"a": "one.safetensors", "b": "one.safetensors"})
    write_safetensors(folder / "one.safetensors", {"a": torch.ones(1)})
    with pytest.raises(BadFile, match=r"one\.safetensors has the tensor 'b', and it has not"):
        HFFolder.open(folder)


def test_shard_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "secret.safetensors", {"a": torch.ones(1)})
    for number, name in enumerate(("../secret.safetensors", str(tmp_path / "secret.safetensors"), "", "a\0b")):
        with pytest.raises(BadFile):
            HFFolder.open(sharded(tmp_path / f"s{number}", {"a": name}))
    folder = sharded(tmp_path / "linked", {"a": "link.safetensors"})
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(BadFile, match="leads out"):
        HFFolder.open(folder)


def test_a_snapshot_of_the_hub_cache_opens(tmp_path: Path) -> None:
    """There, every file is a link to ../../blobs/<hash>; a link to anywhere else is still refused."""
    folder = sharded(tmp_path / "models--x" / "snapshots" / "abc", {"a": "one.safetensors"})
    (tmp_path / "models--x" / "blobs").mkdir()
    write_safetensors(tmp_path / "models--x" / "blobs" / "0f", {"a": torch.ones(1)})
    (folder / "one.safetensors").symlink_to("../../blobs/0f")
    with HFFolder.open(folder) as opened:
        assert opened.read("a").tolist() == [1.0]
    write_safetensors(tmp_path / "secret", {"a": torch.ones(1)})
    (folder / "one.safetensors").unlink()
    (folder / "one.safetensors").symlink_to("../../../secret")
    with pytest.raises(BadFile, match="leads out"):
        HFFolder.open(folder)


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", CONFIG, TENSORS)
    with pytest.raises(BadFile, match="no tensor 'nope'"):
        HFFolder.open(tmp_path / "m").read("nope")
