"""Weights kept as a GGUF file stores them: the same codes and scales, so the same values to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import BadFile
from orchard.models.language.decoder import Decoder
from orchard.models.zoo import families
from orchard.nn.formats import Int4, Int8, Plain
from orchard.nn.linear import Embedding, GroupedLinear, Linear, Weight
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.export import save_folder, save_gguf
from orchard.weights.gguf import GGMLType, GGUFFile, TensorOut, dequantize, write_gguf
from orchard.weights.gguf.grouped import split
from orchard.weights.gguf.kquants import UNPACK_K
from orchard.weights.load import load_decoder
from orchard.weights.stored import as_stored
from tests.parity.families import CASES, COMMON

EXACT = [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0]
ROUNDED = [GGMLType[name] for name in ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q3_K", "Q2_K")]
FLOATING = [GGMLType.F32, GGMLType.F16, GGMLType.BF16]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 48}
Types = Callable[[str], GGMLType]


def stored_bytes(kind: GGMLType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bytes of a type. Where a block has half-precision numbers, they are of the size that weights have; codes are
    whatever comes, so that no quantiser would have made just these."""
    make = np.random.default_rng(seed)
    raw = make.integers(0, 256, kind.nbytes(shape), np.uint8)
    if kind in FLOATING:
        values = torch.from_numpy(make.normal(size=shape).astype(np.float32))
        types = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}
        return values.to(types[kind]).view(torch.uint8).numpy()
    blocks = raw.reshape(-1, kind.type_size)
    for place in half_places(kind):
        halves = (make.normal(size=len(blocks)) * 0.01).astype("<f2")
        blocks[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    return raw


def half_places(kind: GGMLType) -> list[int]:
    """Where a block keeps half-precision numbers."""
    if kind in UNPACK_K:
        fields = UNPACK_K[kind][0].fields
        assert fields is not None
        return [fields[name][1] for name in ("scale", "least") if name in fields]
    return [0, 2] if kind.name.endswith("_1") else [0]


def written(path: Path, case: str, types: Types, **changes: Any) -> Path:
    """A tiny model of a family whose matrices are stored as `types` says, by the file's names."""
    kind, differs = CASES[case]
    hf = {"model_type": kind, **COMMON, **differs, **WIDE, **changes}
    if "moe_intermediate_size" in hf:
        hf["moe_intermediate_size"] = 256
    torch.manual_seed(0)
    save_gguf(families()[kind].tree(hf).build(), path / "plain.gguf", family=families()[kind], hf_config=hf, type="f32")
    with GGUFFile.open(path / "plain.gguf") as file:
        tensors = []
        for seed, (name, info) in enumerate(file.tensors.items()):
            small = len(info.shape) < 2 or "_inp" in name
            stored = info.type if small else types(name)
            data = file.raw(name) if small else stored_bytes(stored, info.shape, seed)
            tensors.append(TensorOut(name, info.shape, stored, lambda data=data: data))  # type: ignore[misc]
        write_gguf(path / "stored.gguf", file.typed_metadata(), tensors)
    return path / "stored.gguf"


def loaded(path: Path, **options: Any) -> tuple[Decoder, Decoder]:
    """The model as it is stored, and the same in plain float32."""
    with open_checkpoint(path) as checkpoint:
        tree = as_stored(checkpoint, checkpoint.config())
        return load_decoder(checkpoint, tree, **options), load_decoder(checkpoint)


def weights(model: Decoder) -> dict[str, Weight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Weight)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.mark.parametrize("case", ["llama", "qwen3", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_what_a_format_holds_is_kept_to_the_last_bit(kind: GGMLType, case: str, tmp_path: Path) -> None:
    """Llama files keep rotary pairs next to each other: there the rows of q and k change places on the way."""
    path = written(tmp_path, case, lambda name: kind)
    model, plain = loaded(path)
    pairs = {name: (module, weights(plain)[name]) for name, module in weights(model).items()}
    packed = [name for name, (module, _) in pairs.items() if not isinstance(module.format, Plain)]
    assert len(packed) == len(pairs) - ("moe" in case or case == "mixtral")  # routers are stored in full
    for name, (module, twin) in pairs.items():
        assert bits(module.dense()).equal(bits(twin.dense())), name
        assert twin.dense().isfinite().all() and twin.dense().std() > 0
    ids = torch.arange(7)[None]
    wanted = plain(ids)
    # The weights are the same bits, but sums of their products may be taken in another order: an error of the largest.
    torch.testing.assert_close(model(ids), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-5)
    matrices = sum(info.nbytes for info in GGUFFile.open(path).tensors.values() if info.type is kind)
    assert sum(pairs[name][0].nbytes for name in packed) == matrices  # and no byte more than in the file


def one_in_half(kind: GGMLType, name: str) -> GGMLType:
    return GGMLType.F16 if "attn_q" in name else kind


def test_every_type_gets_its_format(tmp_path: Path) -> None:
    wanted: dict[GGMLType, Any] = {
        GGMLType.Q4_0: Int4.Config(group=32),
        GGMLType.Q4_1: Int4.Config(group=32, minimum=True),
        GGMLType.Q4_K: Int4.Config(group=32, minimum=True),
        GGMLType.Q8_0: Int8.Config(group=32, half=True),
        **{kind: Int8.Config(group=32, half=True) for kind in ROUNDED},
        **{kind: Plain.Config() for kind in FLOATING},
    }
    for kind, cfg in wanted.items():
        path = written(tmp_path, "mixtral", partial(one_in_half, kind))
        with open_checkpoint(path) as checkpoint:
            source = checkpoint.config()
            tree = as_stored(checkpoint, source)
            formats = {name: node.format for name, node in tree.find(Linear) + tree.find(Embedding)}
            formats |= {name: node.format for name, node in tree.find(GroupedLinear)}
            assert source == checkpoint.config()  # the tree that was given is not touched
        assert (
            formats.pop("stack.layers[0].mixer.q") == Plain.Config() == formats.pop("stack.layers[0].mlp.router.gate")
        )
        assert len(formats) == 8 and all(found == cfg for found in formats.values()), kind


@pytest.mark.parametrize("kind", ROUNDED, ids=lambda kind: kind.name)
def test_other_packed_types_become_eight_bits_within_half_a_step(kind: GGMLType, tmp_path: Path) -> None:
    model, plain = loaded(written(tmp_path, "llama", lambda name: kind))
    for name, module in weights(model).items():
        want = weights(plain)[name].dense().unflatten(-1, (-1, 32))
        error = (module.dense().unflatten(-1, (-1, 32)) - want).abs()
        largest = want.abs().amax(-1, keepdim=True)
        assert (error <= largest * (0.5 / 127 * (1 + 2**-9) + 2**-11) + 128 * 2**-24).all()


def test_q4_k_keeps_its_codes_and_rounds_its_scales(tmp_path: Path) -> None:
    model, plain = loaded(written(tmp_path, "llama", lambda name: GGMLType.Q4_K))
    for name, module in weights(model).items():
        want, got = (one.dense().unflatten(-1, (-1, 32)) for one in (weights(plain)[name], module))
        steps, least = (
            part.float().abs()[..., None] for part in (module.packed()["scales"], module.packed()["minima"])
        )
        assert ((got - want).abs() <= (15 * steps + least) * 2**-11 + 16 * 2**-25).all()
        assert not got.equal(want)


def test_types_mix_and_the_dtype_of_the_model_does_not_reach_packed_weights(tmp_path: Path) -> None:
    kinds = [*EXACT, GGMLType.Q6_K, GGMLType.F16]
    path = written(tmp_path, "llama", lambda name: kinds[sum(name.encode()) % len(kinds)])
    single, _ = loaded(path)
    rounded, _ = loaded(path, dtype=torch.bfloat16)
    assert len({type(module.format) for module in weights(single).values()}) == 3
    for name, module in weights(single).items():
        other = weights(rounded)[name]
        if isinstance(module.format, Plain):
            assert other.weight.dtype == torch.bfloat16
        else:
            assert all(part.equal(other.packed()[key]) for key, part in module.packed().items())
    assert rounded(torch.arange(5)[None]).dtype == torch.bfloat16


def test_a_format_of_other_groups_is_packed_from_the_values(tmp_path: Path) -> None:
    with open_checkpoint(written(tmp_path, "llama", lambda name: GGMLType.Q4_0)) as checkpoint:
        cfg: Any = Int4.Config(group=64)
        tree = checkpoint.config().rewrite(Linear, lambda node: node.clone(format=cfg))
        model, plain = load_decoder(checkpoint, tree), load_decoder(checkpoint)
    for name, module in weights(model).items():
        want = weights(plain)[name].dense()
        form = module.format
        assert module.dense().equal(form.unpack(form.pack(want), torch.float32)), name


def test_a_folder_stays_plain(tmp_path: Path) -> None:
    hf = {"model_type": "llama", **COMMON}
    tree = families()["llama"].tree(hf)
    save_folder(tree.build(), tmp_path / "m", family=families()["llama"], hf_config=hf)
    with open_checkpoint(tmp_path / "m") as checkpoint:
        source = checkpoint.config()
        assert as_stored(checkpoint, source) == source
        int8 = source.rewrite(Linear, lambda node: node.clone(format=Int8.Config()))
        assert as_stored(checkpoint, int8) == source
        assert checkpoint.read_grouped("embedding.weight", source.complete()) is None
        load_decoder(checkpoint, int8)


def test_rows_of_q_and_k_move_together_with_their_scales(tmp_path: Path) -> None:
    """Row by row, against the file's own order: row 2i + j of a head lies at j · half + i in memory."""
    path = written(tmp_path, "llama", lambda name: GGMLType.Q4_1)
    with open_checkpoint(path) as checkpoint:
        tree = checkpoint.config().complete()
        info = checkpoint.tensors["blk.0.attn_k.weight"]
        stored = split(checkpoint.source.raw("blk.0.attn_k.weight"), GGMLType.Q4_1, info.shape)  # type: ignore[union-attr]
        found = checkpoint.read_grouped("stack.layers.0.mixer.k.weight", tree)
    assert stored is not None and found is not None and stored.minima is not None and found.minima is not None
    size = info.shape[0] // 2  # two key heads
    for row in range(info.shape[0]):
        head, within = divmod(row, size)
        place = head * size + within % 2 * (size // 2) + within // 2
        assert found.codes[place].numpy().tobytes() == stored.codes[row].tobytes()
        assert found.scales[place].numpy().tobytes() == stored.scales[row].tobytes()
        assert found.minima[place].numpy().tobytes() == stored.minima[row].tobytes()


# Splitting blocks -----------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(EXACT), rows=st.integers(1, 3), blocks=st.integers(1, 3))
def test_split_parts_give_the_dequantised_values_bit_for_bit(seed: int, kind: GGMLType, rows: int, blocks: int) -> None:
    shape = (rows, 32 * blocks)
    raw = stored_bytes(kind, shape, seed)
    parts = split(raw, kind, shape)
    assert parts is not None and parts.codes.dtype == np.uint8 and parts.scales.dtype == np.float16
    assert (
        parts.codes.shape == shape and parts.scales.shape == (rows, blocks) and int(parts.codes.max()) < 2**parts.bits
    )
    zero = np.float32(0 if parts.minima is not None else {8: 128, 4: 8}[parts.bits])
    values = (parts.codes.astype(np.float32) - zero).reshape(rows, blocks, 32) * parts.scales.astype(np.float32)[
        ..., None
    ]
    if parts.minima is not None:
        values += parts.minima.astype(np.float32)[..., None]
    assert values.tobytes() == dequantize(raw, kind, shape).tobytes()
    stored = raw.reshape(-1, kind.type_size)
    assert parts.scales.tobytes() == stored[:, :2].tobytes()  # also the bits of numbers that are equal
    if parts.minima is not None:
        assert parts.minima.tobytes() == stored[:, 2:4].tobytes()


def test_nibbles_of_a_block_are_sixteen_apart() -> None:
    block = np.concatenate((np.array([1.0], "<f2").view(np.uint8), np.arange(16, dtype=np.uint8) | 0xF0))
    parts = split(block, GGMLType.Q4_0, (1, 32))
    assert parts is not None and parts.codes[0].tolist() == [*range(16), *[15] * 16]


def test_other_types_are_not_split_and_wrong_sizes_are_refused() -> None:
    for kind in (*ROUNDED, *FLOATING):
        assert split(stored_bytes(kind, (1, 256), 0), kind, (1, 256)) is None
    for shape in ((1, 64), (2, 48), (1, 0)):
        with pytest.raises(BadFile, match="cannot be a Q8_0 tensor"):
            split(np.zeros(34, np.uint8), GGMLType.Q8_0, shape)


# The default model ----------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_the_default_model_is_kept_to_the_last_bit(smollm2: Path) -> None:
    with open_checkpoint(smollm2) as checkpoint:
        source = checkpoint.config().complete()
        model = load_decoder(checkpoint, as_stored(checkpoint, source))
        held = weights(model)
        for part in ("mixer.q", "mixer.k", "mixer.v", "mixer.o", "mlp.gate", "mlp.down"):
            for layer in (0, 17, 29):
                name = f"stack.layers.{layer}.{part}"
                assert isinstance(held[name].format, Int4)
                assert bits(held[name].dense()).equal(bits(checkpoint.read(f"{name}.weight", source))), name
        assert isinstance(held["embedding"].format, Int8)
        rows = torch.tensor([0, 1, 7_777, 49_151])
        table = checkpoint.read("embedding.weight", source)
        assert bits(model.embedding(rows, torch.float32)).equal(bits(table[rows]))
        stored = sum(info.nbytes for info in checkpoint.tensors.values() if len(info.shape) == 2)
        assert sum(module.nbytes for module in held.values()) == stored
