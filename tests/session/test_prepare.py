"""Packing a model: found again, made again when it must be, never in the way when it cannot be kept."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import orchard
from orchard.core.errors import BadFile, ModelNotFound, OrchardError
from orchard.ops.kernels.native import library, why_not
from orchard.session import prepare as preparing
from orchard.session.prepare import forget, made, open_packed, packed_bytes, packed_path, prepare, ready
from orchard.weights.packed import PackedFile
from tests.tiny import tiny_gguf

native = pytest.mark.skipif(library() is None, reason=f"no native kernels: {why_not()}")


@pytest.fixture
def source(empty_home: Path, tmp_path: Path) -> Path:
    return tiny_gguf(tmp_path / "tiny.gguf")


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, timeout=120
    )


# With and without native kernels -----------------------------------------------------------------------------------


def test_names_follow_path_size_and_time(source: Path, tmp_path: Path, empty_home: Path) -> None:
    first = packed_path(source)
    assert first.parent == empty_home / "packed" and first.name.startswith("tiny-") and first.suffix == ".orchard"
    other = shutil.copy2(source, tmp_path / "other.gguf")
    assert packed_path(other) != first
    os.utime(source, ns=(1, 1))
    later = packed_path(source)
    assert later != first and later.name.rsplit("-", 1)[0] == first.name.rsplit("-", 1)[0]
    folder = tmp_path / "a folder, with signs"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert packed_path(folder).name.startswith("a-folder-with-signs-")
    with pytest.raises(BadFile):
        packed_path(tmp_path / "nothing.gguf")


def test_without_native_kernels_nothing_is_packed(
    source: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchard.ops.kernels.native.why_not", lambda: "not built")
    found = ready(source)
    assert found.plan is None and found.path is None and "not built" in found.reason
    assert prepare(source) is None
    assert not (empty_home / "packed").exists()


def test_the_variable_turns_it_off(source: Path) -> None:
    code = f"""
import orchard, sys
model = orchard.load({str(source)!r})
print(type(model.runner).__name__, model.plan, "torch" in sys.modules, model.generate("Hi", max_tokens=3).usage.output)
"""
    done = run(code, ORCHARD_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["TorchRunner", "None", "True", "3"]


def test_dtypes_that_are_named_run_on_torch(source: Path) -> None:
    model = orchard.load(source, dtype="float32")
    assert model.plan is None and type(model.runner).__name__ == "TorchRunner"
    assert "float32 on cpu" in repr(model)


# With native kernels -----------------------------------------------------------------------------------------------


@native
def test_packed_once_and_found_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = ready(source, say=said.append)
    assert first.path == packed_path(source) and first.path.is_file() and first.plan is not None
    monkeypatch.setattr(preparing, "made", lambda *_, **__: pytest.fail("made again"))
    again = ready(source, say=said.append)
    assert said == []
    assert again.plan is not None and again.plan.steps == first.plan.steps
    for name, array in first.plan.tensors.items():
        np.testing.assert_array_equal(again.plan.tensors[name], array)
        assert again.plan.tensors[name].ctypes.data % 64 == 0
    with PackedFile.open(first.path) as file:
        file.verify()
        assert file.header["source"]["path"] == str(source)


@native
def test_load_and_generate_without_torch(source: Path) -> None:
    prepare(source)
    code = f"""
import orchard, sys
model = orchard.load({str(source)!r})
answer = model.generate("Hello", max_tokens=5, temperature=0.7, top_k=5, top_p=0.9, seed=1, logprobs=2)
print(answer.usage.output, repr(model), "torch" in sys.modules)
print(model.logits([1, 2]).shape, "torch" in sys.modules)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("5 Model(") and "native" in first and first.endswith("False")
    assert second.startswith("torch.Size([1, 2,") and second.endswith("True")
    assert done.stderr == ""


@native
def test_a_plain_answer_imports_little(source: Path) -> None:
    """What takes long to import, or much memory, stays out until something needs it."""
    prepare(source)
    heavy = [
        "torch",
        "tokenizers",
        "jinja2",
        "pydantic",
        "rich",
        "typer",
        "filelock",
        "asyncio",
        "orchard.ops.plan.builder",
    ]
    code = f"""
import orchard, sys
model = orchard.load({str(source)!r})
print(model.generate("Hello, how are you?", max_tokens=3).usage.output)
print([name for name in {heavy!r} if name in sys.modules])
model.tokenizer.encode("日本")
print("tokenizers" in sys.modules)
"""
    done = run(code)
    assert done.stdout.splitlines() == ["3", "[]", "True"], done.stderr


@native
def test_the_command_line_answers_without_torch(source: Path) -> None:
    prepare(source)
    code = f"""
import sys
from orchard.cli.main import main
main(["respond", "Hello", "--model", {str(source)!r}, "--max-tokens", "4", "--json"])
print("torch" in sys.modules, "rich" in sys.modules, "pydantic" in sys.modules)
"""
    done = run(code)
    assert done.stdout.splitlines()[-1] == "False False False", done.stderr


@native
def test_answers_are_those_of_torch(source: Path) -> None:
    """Random weights have near ties, so the first tokens of several prompts are compared, not one long answer."""
    fast, plain = orchard.load(source), orchard.load(source, dtype="float32")
    assert fast.plan is not None and fast.context == plain.context == plain.config.context
    same = sum(
        fast.generate([i, i + 1, i + 2], max_tokens=1).ids == plain.generate([i, i + 1, i + 2], max_tokens=1).ids
        for i in range(40)
    )
    assert same >= 36
    np.testing.assert_array_equal(fast.logits([1, 2, 3]).numpy(), plain.logits([1, 2, 3]).numpy())


@native
def test_a_rewrite_is_lowered_in_memory(source: Path) -> None:
    from orchard.cache.codecs import Int8
    from orchard.cache.store import Store

    model = orchard.load(source, rewrite=lambda tree: tree.rewrite(Store, lambda s: s.clone(codec=Int8.Config())))
    assert model.plan is not None and {store.codec for store in model.plan.stores} == {"int8"}
    assert not packed_path(source).exists()
    assert model.generate("Hello", max_tokens=4).usage.output == 4
    assert isinstance(model.config.stack.layers[0].mixer.store.codec, Int8.Config)


@native
def test_a_changed_source_is_packed_again_and_the_old_file_goes(source: Path) -> None:
    said: list[str] = []
    old = prepare(source, say=said.append)
    tiny_gguf(source, **{"general.name": "another"})
    os.utime(source, ns=(10**18, 10**18))
    new = prepare(source, say=said.append)
    assert old is not None and new is not None and new != old
    assert new.is_file() and not old.exists()
    assert len(said) == 1 and "changed" in said[0]


@native
def test_a_source_that_is_gone_is_an_error(source: Path) -> None:
    prepare(source)
    source.unlink()
    with pytest.raises(ModelNotFound):
        orchard.load(source)
    with pytest.raises(OrchardError):
        ready(source)


@native
def test_files_of_models_that_are_gone_are_removed(source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copy2(source, tmp_path / "other.gguf"))
    left = prepare(other)
    assert left is not None and left.is_file()
    other.unlink()
    kept = prepare(source)
    assert kept is not None and kept.is_file() and not left.exists()


@native
@pytest.mark.parametrize("version", ["FORMAT", "LAYOUT"])
def test_another_version_is_packed_again(version: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchard.weights import packed

    said: list[str] = []
    old = prepare(source, say=said.append)
    for module in (packed, preparing):
        monkeypatch.setattr(module, version, 99)
    new = prepare(source, say=said.append)
    assert old is not None and new is not None and new != old and not old.exists() and len(said) == 1
    # Also where somebody gave it the name of this version.
    monkeypatch.undo()
    monkeypatch.setenv("ORCHARD_HOME", str(new.parent.parent))
    new.replace(packed_path(source))
    assert ready(source, say=said.append).plan is not None
    assert len(said) == 2 and "99" in said[1]


@native
def test_damage_is_mended_or_harmless_never_a_crash(source: Path) -> None:
    path = prepare(source)
    assert path is not None
    whole, changes = path.read_bytes(), random.Random(1)
    header = 8 + int.from_bytes(whole[:8], "little")
    said: list[str] = []
    for round_ in range(200):
        bad = bytearray(whole)
        if round_ % 4 == 0:
            bad = bad[: changes.randrange(len(whole))]
        else:
            for _ in range(changes.choice([1, 2, 20])):
                bad[changes.randrange(header)] = changes.randrange(256)
        path.write_bytes(bad)
        try:
            assert open_packed(path).plan is not None
        except BadFile:
            continue
    for cut in (0, 5, header // 2, header, len(whole) - 1):
        path.write_bytes(whole[:cut])
        found = ready(source, say=said.append)
        assert found.path == path and path.read_bytes() == whole
    assert len(said) == 5 and all("packing it again" in line for line in said)


@native
def test_a_full_disk_costs_only_the_file(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        found = ready(source, say=said.append)
    assert found.plan is not None and found.path is None and "no room" in found.reason
    assert len(said) == 1 and packed_bytes() == 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert orchard.load(source).generate("Hi", max_tokens=2).usage.output == 2


@native
def test_a_home_that_cannot_be_written_costs_only_the_file(
    source: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_home / "packed").write_text("a file where the folder should be")  # rights do not stop root
    said: list[str] = []
    found = ready(source, say=said.append)
    assert found.plan is not None and found.path is None and found.reason
    assert prepare(source, say=said.append) is None
    assert all("cannot be kept" in line for line in said)
    assert orchard.load(source).generate("Hi", max_tokens=2).usage.output == 2


@native
def test_two_processes_make_it_once(source: Path) -> None:
    code = f"""
import orchard.session.prepare as preparing
from pathlib import Path
real = preparing.made
def counted(*arguments, **named):
    print("made", flush=True)
    return real(*arguments, **named)
preparing.made = counted
print(preparing.prepare(Path({str(source)!r})))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].split() for process in processes]
    assert sum(output.count("made") for output in outputs) == 1
    assert {output[-1] for output in outputs} == {str(packed_path(source))}


@native
def test_forgetting(source: Path) -> None:
    assert forget(source) == 0
    path = prepare(source)
    assert path is not None
    size = path.stat().st_size
    assert packed_bytes() == size == forget(source)
    assert not path.exists() and packed_bytes() == 0


@native
def test_made_says_what_cannot_be_lowered(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OrchardError("a strange part")

    monkeypatch.setattr("orchard.generate.lowering.lower", refuse)
    found = made(source)
    assert found.plan is None and "a strange part" in found.reason
    model = orchard.load(source)
    assert model.plan is None and model.generate("Hi", max_tokens=2).usage.output == 2
