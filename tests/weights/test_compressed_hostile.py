"""Compressed files that are damaged or lie: refused by name, before anything of the claimed size is made."""

from __future__ import annotations

import copy
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchard.core.errors import BadFile
from orchard.session.build import tokenizer_of
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.compressed_file import FILES, CompressedFile, unpack_files
from orchard.weights.load import load_decoder
from orchard.weights.packed import write_packed
from tests.fuzz.checkpoint_cases import Sample
from tests.fuzz.compressed_cases import compressed_bytes, make_compressed

Q = "stack.layers.0.mixer.q"


def sample(number: int = 1) -> Sample:
    return copy.deepcopy(make_compressed()[number])


def refusal(model: Sample, folder: Path, **more: Any) -> str:
    path = folder / "m.orchard"
    path.write_bytes(compressed_bytes(model, **more))
    tracemalloc.start()
    try:
        with pytest.raises(BadFile) as caught, open_checkpoint(path) as checkpoint:
            load_decoder(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    message = caught.value.message
    assert caught.value.hint and message.isprintable() and len(message) < 600 and "is not usable" not in message
    return message


def node(model: Sample, *path: str | int) -> Any:
    found: Any = model.config["tree"]
    for step in path:
        found = found[step]
    return found


def test_samples_are_sound(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "m.orchard").write_bytes(compressed_bytes(sample(number)))
        with open_checkpoint(tmp_path / "m.orchard") as checkpoint:
            load_decoder(checkpoint)


TREES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "foreign kind": (lambda tree: tree["embedding"].update(kind="os:system"), "no part of a model"),
    "a verb's kind": (lambda tree: tree["norm"].update(kind="orchard.cli.show:Show"), "no part of a model"),
    "unknown kind": (lambda tree: tree["norm"].update(kind="orchard.nn.norm:Nothing"), "no part called"),
    "another root": (lambda tree: tree.update(kind="orchard.nn.stack:Stack"), "has no fields"),
    "a codec for a format": (
        lambda tree: tree["embedding"].update(format={"kind": "orchard.cache.codecs.int8:Int8"}),
        "embedding.format cannot be a Int8",
    ),
    "a format for a codec": (
        lambda tree: tree["stack"]["layers"][0]["mixer"]["store"].update(
            codec={"kind": "orchard.nn.formats.plain:Plain"}
        ),
        "store.codec cannot be a Plain",
    ),
    "text for a number": (lambda tree: tree.update(vocab="96"), "vocab cannot be '96'"),
    "a huge number": (lambda tree: tree.update(dim=1 << 40), "dim cannot be"),
    "no number": (lambda tree: tree["norm"].update(eps=float("nan")), "eps cannot be nan"),
    "a wide table": (lambda tree: (tree.update(vocab=1 << 30), tree["embedding"].update(vocab=1 << 30)), "weights in"),
    "dimensions apart": (lambda tree: tree["stack"].update(dim=32), "contradict"),
    "an owner after it": (
        lambda tree: tree["stack"]["layers"][0]["mixer"]["store"].update(owner=3),
        "layer 0 cannot read",
    ),
    "a wide rotation": (
        lambda tree: tree["stack"]["layers"][0]["mixer"]["rotary"].update(fraction=1e9),
        "cannot turn",
    ),
    "no group": (lambda tree: tree["embedding"]["format"].update(group=0), "group"),
    "an odd group": (lambda tree: tree["embedding"]["format"].update(group=7), "group"),
    "a large rank": (lambda tree: tree["stack"]["layers"][0]["mixer"]["q"].update(r=1 << 30), "lora_a"),
    "no rank": (lambda tree: tree["stack"]["layers"][0]["mixer"]["q"].update(r=0), "rank"),
    "deep": (lambda tree: tree.update(softcap=_deep(100)), "deeper than"),
    "fewer layers": (lambda tree: tree["stack"]["layers"].pop(), "belong to no part"),
    "more layers": (lambda tree: tree["stack"]["layers"].append(_fifth(tree)), "no tensor 'stack.layers.4"),
    "another format": (
        lambda tree: tree["embedding"].update(format={"kind": "orchard.nn.formats.plain:Plain"}),
        "no tensor 'embedding.weight'",
    ),
}


def _deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


def _fifth(tree: Any) -> Any:
    layer = copy.deepcopy(tree["stack"]["layers"][3])
    layer["layer"] = layer["mixer"]["layer"] = 4
    return layer


@pytest.mark.parametrize("case", TREES)
def test_trees_that_lie_are_refused(case: str, tmp_path: Path) -> None:
    change, said = TREES[case]
    model = sample()
    change(model.config["tree"])
    assert said in refusal(model, tmp_path)


def test_a_tree_of_many_nodes_is_refused(tmp_path: Path) -> None:
    model = sample()
    model.config["tree"]["softcap"] = [0] * 250_000
    assert "larger than" in refusal(model, tmp_path)


@pytest.mark.parametrize("part", ["codes", "scales", "lora_a"])
def test_tensors_must_be_those_of_the_tree(part: str, tmp_path: Path) -> None:
    name = f"{Q}.{part}"
    model = sample()
    kind, shape, data = model.tensors[name]
    for changed, said in (
        ((kind, shape[::-1], data), "has shape"),
        ((kind, (*shape[:-1], shape[-1] // 2), data[: len(data) // 2]), "has shape"),
        (("I32", (*shape[:-1], shape[-1]), data * (4 if kind == "U8" else 2)), "is kept as 'I32'"),
    ):
        other = sample()
        other.tensors[name] = changed
        assert said in refusal(other, tmp_path)
    del model.tensors[name]
    assert f"no tensor '{name}'" in refusal(model, tmp_path)
    model = sample()
    model.tensors["stack.layers.0.mixer.q.more"] = ("U8", (1,), b"x")
    assert "belong to no part" in refusal(model, tmp_path)


@pytest.mark.parametrize("part", ["scales", "lora_a"])
def test_scales_and_side_paths_that_are_no_numbers_are_named(part: str, tmp_path: Path) -> None:
    name, model = f"{Q}.{part}", sample()
    kind, shape, data = model.tensors[name]
    assert kind == "F16"
    model.tensors[name] = (kind, shape, b"\x00\x7e" + data[2:])
    said = refusal(model, tmp_path)
    assert "1 of " in said and f"values of '{name}' are no finite numbers" in said


def test_descriptions_that_lie_are_refused(tmp_path: Path) -> None:
    for key, value, said in (
        ("format", 2, "has format 2, not 1"),
        ("format", True, "has format"),
        ("family", "nobody", "no family"),
        ("tree", [], "no tree"),
        ("made", "x", "no made"),
        ("hf_config", None, "no hf_config"),
        ("bits", {}, "accounting"),
    ):
        model = sample()
        model.config[key] = value
        assert said in refusal(model, tmp_path, counted=key != "bits")
    assert "says that it has" in refusal(_with_counts(1), tmp_path, counted=False)
    assert "does not add up" in refusal(_with_counts(1, also="total"), tmp_path, counted=False)


def _with_counts(more: int, also: str = "") -> Sample:
    model = sample()
    compressed_bytes(model)
    for key in ("header", "total"):
        model.config["bits"][key] += more if key != also else 0
    return model


def test_truncated_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.orchard"
    whole = compressed_bytes(sample())
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile):
            open_checkpoint(path)
    write_packed(path, {"plan": {}}, {})
    with pytest.raises(BadFile, match="packed file of the native engine"):
        CompressedFile.open(path)


# The tokenizer's files ------------------------------------------------------------------------------------------------


def _words(text: bytes) -> bytes:
    return lzma.compress(text, format=lzma.FORMAT_XZ)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a":5}\n1234', "not as long"),
        (b'{"a":3}\n1234', "not as long"),
        (b'{"a":-1}\n', "makes no sense"),
        (b'{"../a":1}\n1', "makes no sense"),
        (b'{"a":true}\n1', "makes no sense"),
        (b"[]\n", "not an object"),
        (b"no line", "makes no sense"),
        (b'{"a":4000000000}\n', "makes no sense"),
    ],
)
def test_lists_of_files_that_lie_are_refused(text: bytes, said: str) -> None:
    with pytest.raises(BadFile, match=said):
        unpack_files(_words(text), Path("x"))


def test_a_bomb_is_not_unpacked() -> None:
    size = 40 << 20
    packed = _words(b'{"a":%d}\n' % size + bytes(size))
    assert len(packed) < 20_000
    tracemalloc.start()
    try:
        with pytest.raises(BadFile, match=r"makes no sense|would have"):
            unpack_files(packed, Path("x"))
        assert tracemalloc.get_traced_memory()[1] < 12 << 20  # lzma itself takes 8
    finally:
        tracemalloc.stop()


def test_damaged_words_are_named_and_the_weights_still_load(tmp_path: Path) -> None:
    model = sample()
    kind, shape, data = model.tensors[FILES]
    model.tensors[FILES] = (kind, shape, data[:40] + bytes(len(data) - 40))
    (tmp_path / "m.orchard").write_bytes(compressed_bytes(model))
    with open_checkpoint(tmp_path / "m.orchard") as checkpoint:
        load_decoder(checkpoint)
        with pytest.raises(BadFile, match="damaged"):
            tokenizer_of(checkpoint)
