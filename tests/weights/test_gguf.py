"""GGUF files: what is written is read back, by Orchard and by others, and damaged files give typed errors."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import BadFile, ModelNotFound, UnsupportedFormat, UsageError
from orchard.weights.gguf import ArrayType, GGMLType, GGUFFile, GGUFValueType, TensorOut, Typed, quantize, write_gguf

V = GGUFValueType
rng = np.random.default_rng(0)
SCORES = np.linspace(-1, 1, 5000, dtype=np.float32)


def out(name: str, values: np.ndarray, kind: GGMLType) -> TensorOut:
    return TensorOut(name, values.shape, kind, lambda: quantize(values, kind))


def copy(source: Path, target: Path) -> None:
    with GGUFFile.open(source) as file:
        infos = list(file.tensors.values())
        tensors = [TensorOut(i.name, i.shape, i.type, lambda i=i: file.raw(i.name)) for i in infos]  # type: ignore[misc]
        write_gguf(target, file.typed_metadata(), tensors)


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.float": 1e-5,
    "a.negative": -3,
    "a.big": 2**40,
    "a.u8": Typed(7, V.UINT8),
    "a.f64": Typed(0.1, V.FLOAT64),
    "a.empty": Typed([], ArrayType(V.STRING)),
    "a.tokens": ["<s>", "", "grüße", "\n"],
    "a.types": Typed([1, 2, 3], V.INT16),
    "a.flags": [True, False],
    "a.nested": [[1, 2], ["x"], [[0.5]]],
}


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.gguf"
    tensors = [
        out("w.f32", rng.normal(size=(3, 5)).astype(np.float32), GGMLType.F32),
        out("w.f16", rng.normal(size=(2, 3, 4)).astype(np.float32), GGMLType.F16),
        out("w.bf16", rng.normal(size=7).astype(np.float32), GGMLType.BF16),
        out("w.q8", rng.normal(size=(4, 64)).astype(np.float32), GGMLType.Q8_0),
        TensorOut("w.iq", (2, 256), GGMLType.IQ2_XS, lambda: bytes(range(148))),
        TensorOut("w.ids", (3,), GGMLType.I32, lambda: np.array([5, -6, 7], np.int32)),
    ]
    write_gguf(path, {**METADATA, "a.scores": SCORES}, tensors)
    return path


def test_metadata_comes_back_with_its_types(sample: Path) -> None:
    with GGUFFile.open(sample) as file:
        scores = file.metadata.pop("a.scores")
        assert isinstance(scores, np.ndarray) and np.array_equal(scores, SCORES)
        plain = {key: value.value if isinstance(value, Typed) else value for key, value in METADATA.items()}
        assert file.metadata == {**plain, "a.float": float(np.float32(1e-5))}
        kinds = [file.metadata_types[f"a.{name}"] for name in ("bool", "float", "negative", "big", "u8", "f64")]
        assert kinds == [V.BOOL, V.FLOAT32, V.INT32, V.UINT64, V.UINT8, V.FLOAT64]
        arrays = [file.metadata_types[f"a.{name}"] for name in ("empty", "types", "flags", "scores")]
        assert arrays == [ArrayType(V.STRING), ArrayType(V.INT16), ArrayType(V.BOOL), ArrayType(V.FLOAT32)]
        inner = (ArrayType(V.UINT32), ArrayType(V.STRING), ArrayType(V.ARRAY, (ArrayType(V.FLOAT32),)))
        assert file.metadata_types["a.nested"] == ArrayType(V.ARRAY, inner)


def test_tensors_read_in_the_dtype_asked_for(sample: Path) -> None:
    with GGUFFile.open(sample) as file:
        assert file.tensors["w.f16"].shape == (2, 3, 4)
        for name in ("w.f32", "w.f16", "w.bf16", "w.q8"):
            assert file.read(name).dtype == torch.float32
        assert file.read("w.f16", dtype=torch.float64).dtype == torch.float64
        for name, dtype in {"w.f32": "float32", "w.f16": "float16", "w.bf16": "bfloat16", "w.ids": "int32"}.items():
            own = file.read(name, dtype=None)
            assert own.dtype == getattr(torch, dtype)
            assert bytes(own.view(torch.uint8).reshape(-1).tolist()) == file.raw(name).tobytes()
            assert torch.equal(own.float(), file.read(name))
        assert file.read("w.ids", dtype=None).tolist() == [5, -6, 7]
        own = file.read("w.f32")
        own += 1  # memory of its own: the file is untouched
        assert not torch.equal(own, file.read("w.f32"))


def test_a_type_orchard_cannot_read_is_listed_and_copied_but_not_read(sample: Path) -> None:
    with GGUFFile.open(sample) as file:
        info = file.tensors["w.iq"]
        assert (info.type.name, info.nbytes) == ("IQ2_XS", 148)
        assert file.raw("w.iq").tobytes() == bytes(range(148))
        with pytest.raises(UnsupportedFormat, match=r"'w\.iq' has type IQ2_XS") as caught:
            file.read("w.iq")
        assert caught.value.hint


def test_copy_is_the_same_file(sample: Path, tmp_path: Path) -> None:
    copy(sample, tmp_path / "copy.gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == sample.read_bytes()


def test_a_file_from_the_reference_writer_is_copied_byte_for_byte(tmp_path: Path) -> None:
    source = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_custom_alignment(64)
    writer.add_uint16("x.u16", 65535)
    writer.add_int8("x.i8", -1)
    writer.add_array("x.tokens", ["a", "b c", "ß"])
    writer.add_array("x.floats", [0.5, 1.5])
    weights = rng.normal(size=(5, 64)).astype(np.float32)
    for kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q5_0, gguf.GGMLQuantizationType.BF16):
        writer.add_tensor(kind.name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.add_tensor("plain", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(source) as file:
        assert file.alignment == 64
        assert torch.equal(file.read("plain"), torch.from_numpy(weights))
        q4_1 = gguf.GGMLQuantizationType.Q4_1
        theirs = gguf.quants.dequantize(gguf.quants.quantize(weights, q4_1), q4_1)
        assert torch.equal(file.read("Q4_1"), torch.from_numpy(theirs))
    copy(source, tmp_path / "ours.gguf")
    assert (tmp_path / "ours.gguf").read_bytes() == source.read_bytes()


def test_the_reference_reader_reads_ours(sample: Path) -> None:
    reader = gguf.GGUFReader(sample)
    assert reader.get_field("a.tokens").contents() == ["<s>", "", "grüße", "\n"]
    assert reader.get_field("a.big").contents() == 2**40
    with GGUFFile.open(sample) as file:
        for tensor in reader.tensors:
            assert tuple(int(dim) for dim in reversed(tensor.shape)) == file.tensors[tensor.name].shape
            assert tensor.data.tobytes() == file.raw(tensor.name).tobytes()


def test_transformers_loads_ours(tmp_path: Path) -> None:
    """Through the functions that from_pretrained(gguf_file=...) uses, which itself also wants `accelerate`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    size, heads, hidden, vocab = 32, 4, 64, 48
    shapes = {
        **dict.fromkeys(("token_embd", "output"), (vocab, size)),
        **dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (size,)),
        "blk.0.ffn_down": (size, hidden),
        **{f"blk.0.attn_{part}": (size, size) for part in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{part}": (hidden, size) for part in ("gate", "up")},
    }
    values = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    numbers = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": size,
        "feed_forward_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "vocab_size": vocab,
    }
    metadata = {"general.architecture": "llama", **{f"llama.{name}": value for name, value in numbers.items()}}
    kinds = {name: GGMLType.Q8_0 if name.startswith(("output.", "blk.0.ffn_d")) else GGMLType.F32 for name in values}
    write_gguf(tmp_path / "tiny.gguf", metadata, [out(name, value, kinds[name]) for name, value in values.items()])
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert (config.hidden_size, config.vocab_size, config.num_attention_heads) == (size, vocab, heads)
    model = AutoModelForCausalLM.from_config(config)
    state = load_gguf_checkpoint(str(tmp_path / "tiny.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(state, strict=True)
    with GGUFFile.open(tmp_path / "tiny.gguf") as file:
        for theirs, ours in (("model.embed_tokens", "token_embd"), ("lm_head", "output")):
            assert torch.equal(state[f"{theirs}.weight"], file.read(f"{ours}.weight")), theirs


scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.text(max_size=8),
    st.floats(width=32, allow_nan=False),
    st.lists(st.text(max_size=4), min_size=1, max_size=5),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(metadata=st.dictionaries(st.text(min_size=1, max_size=9), scalars, max_size=6))
def test_any_metadata_round_trips(tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("meta") / "m.gguf"
    write_gguf(path, metadata, [])
    with GGUFFile.open(path) as file:
        assert file.metadata == metadata
        assert list(file.metadata) == list(metadata)
    copy(path, path.with_name("again.gguf"))
    assert path.with_name("again.gguf").read_bytes() == path.read_bytes()


def test_large_token_lists_open_fast(tmp_path: Path) -> None:
    tokens = [f"Ġtoken{i}" for i in range(260_000)]
    path = tmp_path / "large.gguf"
    write_gguf(path, {"tokenizer.ggml.tokens": tokens}, [])
    start = time.perf_counter()
    file = GGUFFile.open(path)
    assert time.perf_counter() - start < 1
    assert file.metadata["tokenizer.ggml.tokens"] == tokens


def test_opening_does_not_read_the_data(tmp_path: Path) -> None:
    """A tensor of 64 GiB that is a hole in the file: reading it would take minutes and fill the memory."""
    path = tmp_path / "hole.gguf"
    path.write_bytes(header(tensors=(entry("t", [2**30, 16]), entry("u", [1], 0, 2**36))))
    with path.open("r+b") as file:
        file.truncate(2**36 + 4096)
    start = time.perf_counter()
    with GGUFFile.open(path) as opened:
        assert opened.tensors["t"].nbytes == opened.raw("t").nbytes == 2**36
        assert opened.read("u").tolist() == [0.0]
    assert time.perf_counter() - start < 1


def header(*keys: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, key_count: int | None = None) -> bytes:
    count = len(keys) if key_count is None else key_count
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), count) + b"".join(keys) + b"".join(tensors)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def entry(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


NESTED = struct.pack("<IQ", 9, 1) * 6
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "other": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "only magic": (b"GGUF", "ends inside the version"),
    "keys": (header(key_count=2**63), "claims 9,223,372,036,854,775,808 metadata keys"),
    "key length": (header(struct.pack("<Q", 2**62) + bytes(99)), "1 to 65,535 are allowed"),
    "empty key": (header(text("") + bytes(99)), "1 to 65,535"),
    "value type": (header(key("k", 77, bytes(99))), "unknown value type 77"),
    "string": (header(key("k", 8, struct.pack("<Q", 10**6))), "ends inside the metadata value 'k'"),
    "utf8": (header(key("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "not UTF-8"),
    "array": (header(key("k", 9, struct.pack("<IQ", 4, 2**61))), "ends inside the metadata value 'k'"),
    "string array": (header(key("k", 9, struct.pack("<IQ", 8, 2**60) + bytes(64))), "ends inside"),
    "string array entry": (
        header(key("k", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 99))),
        "inside entry 1 of",
    ),
    "string array utf8": (header(key("k", 9, struct.pack("<IQQ", 8, 1, 1) + b"\xff")), "entry 0 of .* not UTF-8"),
    "nested": (header(key("k", 9, NESTED + bytes(99))), "nests arrays too deeply"),
    "bool": (header(key("k", 7, b"\x02")), "boolean of value 2"),
    "twice": (header(key("k", 0, b"\1"), key("k", 0, b"\1")), "'k' appears twice"),
    "alignment": (header(key("general.alignment", 4, struct.pack("<I", 48))), "power of two"),
    "alignment zero": (header(key("general.alignment", 4, bytes(4))), "power of two"),
    "alignment type": (header(key("general.alignment", 8, text("32"))), "unsigned 32-bit"),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0) + bytes(64), "claims 1,099,511,627,776 tensors"),
    "no dims": (header(tensors=(entry("t", []), bytes(64))), "0 dimensions"),
    "five dims": (header(tensors=(entry("t", [1] * 5),)), "5 dimensions"),
    "zero dim": (header(tensors=(entry("t", [0]) + bytes(64),)), "impossible shape"),
    "overflow": (header(tensors=(entry("t", [2**32, 2**32, 2**32]),)), "impossible shape"),
    "type": (header(tensors=(entry("t", [32], 5) + bytes(64),)), "unknown type 5"),
    "blocks": (header(tensors=(entry("t", [33], 8) + bytes(64),)), "no whole number of Q8_0 blocks"),
    "unaligned": (header(tensors=(entry("t", [1], 0, 3) + bytes(64),)), "not aligned"),
    "outside": (header(tensors=(entry("t", [64]) + bytes(64),)), "ends before the data of tensor 't'"),
    "far away": (header(tensors=(entry("t", [1], 0, 2**63),)), "ends before the data"),
    "same name": (header(tensors=(entry("t", [1]), entry("t", [1], 0, 32) + bytes(99))), "'t' appears twice"),
    "overlap": (header(tensors=(entry("t", [9]), entry("u", [1], 0, 32) + bytes(99))), "'u' overlaps"),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named(case: str, tmp_path: Path) -> None:
    data, message = CASES[case]
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(BadFile, match=message) as caught:
        GGUFFile.open(tmp_path / "bad.gguf")
    assert caught.value.code == "bad-file"
    assert "bad.gguf" in caught.value.message and "at byte" in caught.value.message and caught.value.hint


@pytest.mark.parametrize(("version", "message"), [(1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")])
def test_versions_but_2_and_3_are_unsupported(version: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes(header(version=version))
    with pytest.raises(UnsupportedFormat, match=message):
        GGUFFile.open(tmp_path / "v.gguf")
    (tmp_path / "v.gguf").write_bytes(header(version=2))
    assert GGUFFile.open(tmp_path / "v.gguf").version == 2


def test_every_truncation_is_a_bad_file(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    with GGUFFile.open(sample) as file:
        end = max(info.offset + info.nbytes for info in file.tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 900, 3), *range(900, end, 997), end - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(BadFile):
            GGUFFile.open(cut)
    cut.write_bytes(data[:end])  # the padding after the last tensor may be missing
    assert len(GGUFFile.open(cut).tensors) == 6


def test_wrong_paths_and_closed_files(sample: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        GGUFFile.open(tmp_path / "none.gguf")
    with pytest.raises(BadFile, match="is a folder"):
        GGUFFile.open(tmp_path)
    (tmp_path / "lfs.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(BadFile) as caught:
        GGUFFile.open(tmp_path / "lfs.gguf")
    assert "git lfs pull" in caught.value.hint
    file = GGUFFile.open(sample)
    with pytest.raises(BadFile, match="no tensor 'nope'"):
        file.read("nope")
    kept = file.raw("w.q8")
    file.close()
    assert kept.sum() > 0  # a view outlives close()
    with pytest.raises(UsageError, match="closed"):
        file.read("w.q8")


BAD_WRITES: dict[str, Callable[[Path], None]] = {
    "short data": lambda p: write_gguf(p, {}, [TensorOut("t", (4,), GGMLType.F32, lambda: bytes(15))]),
    "float data for a packed type": lambda p: write_gguf(
        p, {}, [TensorOut("t", (32,), GGMLType.Q8_0, lambda: np.zeros(32, np.float32))]
    ),
    "scalar": lambda p: write_gguf(p, {}, [TensorOut("t", (), GGMLType.F32, lambda: bytes(4))]),
    "part of a block": lambda p: write_gguf(p, {}, [TensorOut("t", (33,), GGMLType.Q8_0, lambda: bytes(34))]),
    "same name": lambda p: write_gguf(p, {}, [TensorOut("t", (1,), GGMLType.F32, lambda: bytes(4))] * 2),
    "no type": lambda p: write_gguf(p, {"k": object()}, []),
    "mixed list": lambda p: write_gguf(p, {"k": [1, "a"]}, []),
    "empty list": lambda p: write_gguf(p, {"k": []}, []),
    "too large": lambda p: write_gguf(p, {"k": Typed(300, V.UINT8)}, []),
    "lossy array": lambda p: write_gguf(p, {"k": Typed(np.array([0.5]), V.INT32)}, []),
    "two dimensions": lambda p: write_gguf(p, {"k": Typed(np.zeros((2, 2)), V.FLOAT64)}, []),
    "not text": lambda p: write_gguf(p, {"k": Typed(5, V.STRING)}, []),
    "not a bool": lambda p: write_gguf(p, {"k": Typed([2], V.BOOL)}, []),
    "deep": lambda p: write_gguf(p, {"k": [[[[[1]]]]]}, []),
    "empty key": lambda p: write_gguf(p, {"": 1}, []),
    "surrogate": lambda p: write_gguf(p, {"k": "\ud800"}, []),
    "alignment": lambda p: write_gguf(p, {}, [], alignment=24),
    "two alignments": lambda p: write_gguf(p, {"general.alignment": 64}, [], alignment=32),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_wrong_writes_leave_nothing_behind(case: str, tmp_path: Path) -> None:
    (tmp_path / "kept.gguf").write_bytes(b"before")
    with pytest.raises(UsageError) as caught:
        BAD_WRITES[case](tmp_path / "kept.gguf")
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["kept.gguf"]
    assert (tmp_path / "kept.gguf").read_bytes() == b"before"


def test_alignment_is_kept_and_announced(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", {}, [TensorOut("t", (1,), GGMLType.F32, lambda: bytes(4))], alignment=256)
    with GGUFFile.open(tmp_path / "a.gguf") as file:
        assert file.alignment == 256 and file.tensors["t"].offset % 256 == 0
        assert file.metadata_types["general.alignment"] is V.UINT32


def test_importing_the_readers_does_not_import_torch() -> None:
    program = "import sys, orchard.weights.gguf, orchard.weights.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2]).returncode == 0


def test_tensors_are_made_one_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []

    def make(name: str) -> Callable[[], bytes]:
        return lambda: order.append(name) or bytes(4)

    write_gguf(tmp_path / "l.gguf", {}, [TensorOut(n, (1,), GGMLType.F32, make(n)) for n in "abc"])
    assert order == ["a", "b", "c"]
