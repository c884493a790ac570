"""The compressed file `.orchard`: what goes in comes out bit for bit, and every byte is accounted for."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from orchard.core.errors import ConfigError, UsageError
from orchard.models.language.decoder import Decoder
from orchard.nn.formats import Int4, Int8, Learned, Plain
from orchard.nn.linear import Embedding, Linear
from orchard.transforms.lora import Lora, LoraLinear
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.compressed import accounting, kv_bytes_per_token, narrowest
from orchard.weights.compressed_bits import Accounting
from orchard.weights.compressed_file import FILES, CompressedFile, pack_files, unpack_files
from orchard.weights.compressed_read import CompressedCheckpoint
from orchard.weights.load import load_decoder
from orchard.weights.stored import as_dense, as_stored
from tests.parity.families import CASES, COMMON
from tests.tiny import tiny_tokenizer_files
from tests.weights.compressed_models import (
    CHANGES,
    HF,
    MADE,
    VOCAB,
    built_with,
    family,
    same_tensors,
    tree_with,
    written,
)


def read(path: Path, tree: Decoder.Config | None = None, **more: object) -> Decoder:
    with open_checkpoint(path) as checkpoint:
        return load_decoder(checkpoint, tree, **more)  # type: ignore[arg-type]


PAIRS = [pair for pair in combinations(CHANGES, 2) if "sides" in pair or "formats" in pair]


@pytest.mark.parametrize("changes", [(), *combinations(CHANGES, 1), *PAIRS, CHANGES])
def test_what_goes_in_comes_out(changes: tuple[str, ...], tmp_path: Path) -> None:
    model = built_with(changes)
    path = written(tmp_path / "m.orchard", model)
    again = read(path)
    same_tensors(model, again)
    assert again.config.complete() == model.config.complete()
    ids = torch.arange(1, 13)[None]
    assert torch.equal(model(ids), again(ids))


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "m.orchard", built_with(CHANGES))
    with open_checkpoint(path) as checkpoint:
        assert isinstance(checkpoint, CompressedCheckpoint)
        assert (checkpoint.format, checkpoint.family.name, checkpoint.licence) == ("orchard", "llama", "mit")
        assert checkpoint.hf_config == HF and checkpoint.source.made == MADE
        assert checkpoint.source.files() == tiny_tokenizer_files(VOCAB)
        assert checkpoint.config() == tree_with(CHANGES)
        tree = checkpoint.config()
        tree.stack.layers[0].dim = 3  # a copy of the caller's own
        assert checkpoint.config() == tree_with(CHANGES)
    with safe_open(path, framework="pt") as file:  # any reader of the format can look into it
        assert json.loads(file.metadata()["orchard.model"])["family"] == "llama"
        assert file.get_tensor("stack.layers.0.mixer.q.codes").dtype == torch.uint8


@pytest.mark.parametrize("case", ["gemma3", "qwen3", "mixtral", "olmo2", "qwen2"])
def test_other_families_too(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    hf = {"model_type": kind, **COMMON, **changes, "vocab_size": 48, "max_position_embeddings": 64}
    model = built_with((), hf)
    path = written(tmp_path / "m.orchard", model, hf)
    same_tensors(model, read(path))


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [(), ("formats",), ("formats", "sides"), CHANGES])
def test_the_accounting_is_the_file_to_the_byte(changes: tuple[str, ...], tmp_path: Path) -> None:
    model, files = built_with(changes), tiny_tokenizer_files(VOCAB)
    counted = accounting(model, family=family(), hf_config=HF, tokenizer_files=files, made=MADE)
    path = written(tmp_path / "m.orchard", model)
    with CompressedFile.open(path) as file:
        assert file.accounting == counted
        stored = {name: info.nbytes for name, info in file.tensors.items()}
        packed = len(file.raw(FILES))
    assert counted.total == path.stat().st_size
    assert counted.header == 8 + int.from_bytes(path.read_bytes()[:8], "little") and counted.tokenizer == packed
    assert counted.sides == sum(size for name, size in stored.items() if "lora_" in name)
    assert counted.norms == sum(size for name, size in stored.items() if "norm" in name)
    assert counted.embedding == sum(size for name, size in stored.items() if name.startswith("embedding."))
    dense = sum(parameter.numel() for parameter in built_with(()).parameters())
    assert counted.dense == dense and counted.bits_per_weight == 8 * counted.total / dense
    rows = counted.rows()
    assert sum(size for _, size, _ in rows) == counted.total
    assert sum(bits for *_, bits in rows) == pytest.approx(counted.bits_per_weight)
    assert Accounting.from_dict(json.loads(json.dumps(counted.to_dict()))) == counted


def test_a_tree_is_counted_without_being_built() -> None:
    """The same bytes, where the types of plain tensors are those that the values need."""
    told = {"family": family(), "hf_config": HF, "tokenizer_files": tiny_tokenizer_files(VOCAB), "made": MADE}
    fresh = built_with(("formats", "sides"))
    tree = accounting(fresh.config, dtype=torch.float32, **told)  # type: ignore[arg-type]
    assert tree == accounting(fresh, **told)  # type: ignore[arg-type]
    smaller = accounting(fresh.config, **told)  # type: ignore[arg-type]
    assert smaller.total < tree.total and smaller.sides == tree.sides


def test_sharing_and_coding_show_in_what_a_token_keeps() -> None:
    whole = kv_bytes_per_token(tree_with(()))
    assert whole == 4 * 2 * 2 * 16 * 2
    assert kv_bytes_per_token(tree_with(("shared",))) == whole // 2
    assert kv_bytes_per_token(tree_with(("kv8",))) == 4 * 2 * 2 * (16 + 4)


def test_the_same_model_is_the_same_file(tmp_path: Path) -> None:
    """Written again after reading, or held in another dtype: not a bit changes."""
    first = written(tmp_path / "a.orchard", built_with(CHANGES))
    second = written(tmp_path / "b.orchard", read(first))
    assert first.read_bytes() == second.read_bytes()
    plain = built_with(()).bfloat16()
    one = written(tmp_path / "c.orchard", plain)
    assert one.read_bytes() == written(tmp_path / "d.orchard", plain.float()).read_bytes()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_narrow_types_hold_the_very_values(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(tensor.to(narrowest(tensor)).float(), tensor)
    assert narrowest(tensor.bfloat16()) == torch.bfloat16


# Reading --------------------------------------------------------------------------------------------------------------


def test_other_trees_are_filled_from_the_same_file(tmp_path: Path) -> None:
    model = built_with(("formats", "sides"))
    path = written(tmp_path / "m.orchard", model)
    with open_checkpoint(path) as checkpoint:
        stored = checkpoint.config()
        plain = load_decoder(checkpoint, as_dense(stored))
        assert as_stored(checkpoint, as_dense(stored)) == stored
        tree = stored.rewrite(Embedding, lambda node: node.clone(format=Int8.Config(group=32, half=True)))
        other = load_decoder(checkpoint, tree)
    ids = torch.arange(1, 9)[None]
    assert isinstance(plain.stack.layers[0].mixer.q.format, Plain)  # type: ignore[union-attr]
    torch.testing.assert_close(plain(ids), model(ids), rtol=1e-4, atol=1e-4)
    assert torch.equal(other.embedding.dense(), _packed_again(model.embedding.dense()))
    layers = {n: t for n, t in other.state_dict().items() if n.startswith("stack.")}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in layers.items())


def _packed_again(weight: torch.Tensor) -> torch.Tensor:
    format = Int8.Config(group=32, half=True).build()
    dense: torch.Tensor = format.unpack(format.pack(weight), torch.float32)
    return dense


def test_a_transform_may_add_side_paths_that_the_file_lacks(tmp_path: Path) -> None:
    path = written(tmp_path / "m.orchard", built_with(("formats",)))
    model = read(path, Lora(r=2, alpha=4.0)(tree_with(("formats",))))
    side = model.stack.layers[0].mixer.q  # type: ignore[union-attr]
    assert not side.lora_b.any() and side.lora_a.any()  # type: ignore[union-attr, operator]


def test_an_adapter_goes_beside_side_paths_that_belong_to_the_model(tmp_path: Path) -> None:
    """The file's side paths stay the model's own; the adapter's begin."""
    model = built_with(("formats", "sides"))
    model.config = model.config.rewrite(LoraLinear, lambda node: node.clone(kept=True))
    path = written(tmp_path / "m.orchard", model)
    adapted = read(path, Lora(r=2, alpha=4.0)(model.config))
    own, both = model.stack.layers[0].mixer.q, adapted.stack.layers[0].mixer.q  # type: ignore[union-attr]
    assert torch.equal(both.kept_a, own.lora_a) and torch.equal(both.kept_b, own.lora_b)  # type: ignore
    assert tuple(both.lora_a.shape) == (2, 64) and not both.lora_b.any()  # type: ignore
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(adapted(ids), model(ids))
    again = read(written(tmp_path / "n.orchard", adapted)).stack.layers[0].mixer.q  # type: ignore[union-attr]
    assert torch.equal(again.kept_a, own.lora_a) and torch.equal(again.lora_a, both.lora_a.half().float())  # type: ignore


def test_weights_that_are_being_learnt_keep_every_value(tmp_path: Path) -> None:
    tree = tree_with(()).rewrite(Linear, lambda node: node.clone(format=Learned.Config(bits=2, group=32)))
    torch.manual_seed(1)
    model = tree.build().eval().requires_grad_(False)
    same_tensors(model, read(written(tmp_path / "m.orchard", model)))


def test_dense_weights_may_stay_as_narrow_as_they_lie(tmp_path: Path) -> None:
    path = written(tmp_path / "m.orchard", built_with(()).bfloat16())
    model = read(path, dtype=None)
    assert model.embedding.packed()["weight"].dtype == torch.bfloat16 and model.dtype == torch.float32
    assert read(path).embedding.packed()["weight"].dtype == torch.float32
    assert read(path, dtype=torch.bfloat16).dtype == torch.bfloat16


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stack.layers.1.mixer.o.scales", "norm.weight", "stack.layers.0.mlp.up.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(name: str, value: float, tmp_path: Path) -> None:
    model = built_with(("formats",))
    model.state_dict()[name].flatten()[3] = value
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")) as caught:
        written(tmp_path / "m.orchard", model)
    assert caught.value.hint and not list(tmp_path.iterdir())


def test_side_paths_are_rounded_to_half_and_no_further(tmp_path: Path) -> None:
    model = built_with(("sides",))
    side = model.stack.layers[0].mixer.q.lora_a  # type: ignore[union-attr]
    side.data[0, 0] = 0.1  # type: ignore[union-attr, index]
    again = read(written(tmp_path / "m.orchard", model)).stack.layers[0].mixer.q.lora_a  # type: ignore[union-attr]
    assert torch.equal(again, side.half().float())  # type: ignore[operator, arg-type]
    side.data[0, 0] = 1e6  # type: ignore[union-attr, index]
    with pytest.raises(ConfigError, match=r"lora_a.*half"):
        written(tmp_path / "n.orchard", model)


def test_a_model_that_its_tree_does_not_describe_is_refused(tmp_path: Path) -> None:
    model = built_with(("formats",))
    model.config = tree_with(())
    with pytest.raises(ConfigError, match="does not describe"):
        written(tmp_path / "m.orchard", model)
    model = built_with(())
    model.register_buffer("more", torch.zeros(3))
    with pytest.raises(ConfigError, match="more"):
        written(tmp_path / "m.orchard", model)
    for wrong, error in (({"made": {"x": float("nan")}}, "JSON"), ({"tokenizer_files": {"../x": b""}}, "plain names")):
        with pytest.raises(UsageError) as caught:
            written(tmp_path / "m.orchard", built_with(()), **wrong)
        assert error in str(caught.value) + caught.value.hint
    with pytest.raises(UsageError, match="compressed model"):
        written(tmp_path / "m.gguf", built_with(()))
    assert not list(tmp_path.iterdir())


def test_a_scale_of_another_type_is_refused(tmp_path: Path) -> None:
    model = built_with(("formats",)).bfloat16()  # takes the scales along, which are half precision by their format
    with pytest.raises(ConfigError, match=r"scales is kept in torch\.bfloat16"):
        written(tmp_path / "m.orchard", model)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.from_regex(r"[a-z][a-z_.-]{0,12}[a-z]", fullmatch=True), st.binary(max_size=300), max_size=5))
def test_files_are_packed_and_unpacked(files: dict[str, bytes]) -> None:
    packed = pack_files(files)
    assert (unpack_files(packed, Path("x")) if packed else {}) == files


def test_embeddings_alone_may_be_packed(tmp_path: Path) -> None:
    tree = tree_with(()).rewrite(Embedding, lambda node: node.clone(format=Int4.Config(group=32, minimum=True)))
    torch.manual_seed(1)
    model = tree.build().eval().requires_grad_(False)
    same_tensors(model, read(written(tmp_path / "m.orchard", model)))
