"""The adapters of a model: loaded, named, stacked, swapped while others run, on weights that are shared and never copied."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import orchard
from orchard.core.errors import BadFile, ConfigError, UsageError
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.session.adapters import Adapters, UnknownAdapter, _plan_parts, _torch_parts
from orchard.session.errors import AssetsUnavailableError
from orchard.session.model import Model
from orchard.weights.adapters import OtherBase, Side, signature, write_adapter
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.export import save_gguf
from orchard.weights.load import load_decoder
from orchard.weights.stored import as_stored
from tests.parity.families import reference, save
from tests.tiny import tiny_gguf, tiny_tokenizer_files

PROMPT = [72, 101, 108, 108, 111]


def random_adapter(adapters: Adapters, path: Path, *, seed: int = 0, rank: int = 3, size: float = 0.5) -> Path:
    """An adapter for every linear map of a model's layers."""
    make = np.random.default_rng(seed)
    sides = {
        name.removesuffix(".weight"): Side(
            make.normal(size=(rank, shape[1])).astype(np.float32) * np.float32(size),
            make.normal(size=(shape[0], rank)).astype(np.float32) * np.float32(size),
            2.0,
        )
        for name, shape in adapters.base.shapes.items()
        if len(shape) == 2 and name.startswith("stack.") and "router" not in name
    }
    write_adapter(path, sides, adapters.base)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(params=["native", "torch"])
def model(request: pytest.FixtureRequest, file: Path) -> Model:
    return orchard.load(file, dtype="auto" if request.param == "native" else "float32")


@pytest.fixture
def adapters(model: Model) -> Adapters:
    return Adapters(model)


def scores(model: Model) -> np.ndarray:
    run = model.runner.begin([PROMPT], length=len(PROMPT))
    run.read(0, len(PROMPT))
    return np.array(run.first()[0])


def test_loaded_named_applied_and_removed(adapters: Adapters, model: Model, tmp_path: Path) -> None:
    assert adapters.names == () and adapters.model(()) is model
    assert adapters.load(random_adapter(adapters, tmp_path / "one", seed=1)) == "one"
    assert adapters.load(random_adapter(adapters, tmp_path / "two", seed=2), "second") == "second"
    assert adapters.names == ("one", "second") and adapters["one"].notes == ()
    one, second, both = adapters.model("one"), adapters.model(("second",)), adapters.model(("one", "second"))
    assert adapters.model(("one",)) is one and adapters.model(("second", "one")) is both
    found = [scores(each) for each in (model, one, second, both)]
    assert all(np.abs(a - b).max() > 0.1 for n, a in enumerate(found) for b in found[:n])
    assert one.name == f"{model.name}+one" and one.engine is not model.engine and one.engine is not both.engine
    adapters.remove("one")
    assert adapters.names == ("second",) and adapters.model(("second",)) is second
    with pytest.raises(UnknownAdapter, match="'one'"):
        adapters.model(("one",))
    assert np.array_equal(scores(both), found[3])  # whoever has it may use it
    assert np.array_equal(scores(model), found[0])


def test_native_and_torch_agree(file: Path, tmp_path: Path) -> None:
    native, torched = Adapters(orchard.load(file)), Adapters(orchard.load(file, dtype="float32"))
    assert native.base.signature == torched.base.signature and native.base.shapes == torched.base.shapes
    names = []
    for seed in (1, 2):
        path = random_adapter(native, tmp_path / str(seed), seed=seed)
        names.append(native.load(path))
        assert torched.load(path) == names[-1]
    for asked in ((), names[:1], names):
        ours, theirs = native.model(asked), torched.model(asked)
        want = theirs.logits(PROMPT)[0, -1].numpy()
        assert np.abs(scores(theirs) - want).max() < 1e-4 * np.abs(want).max()
        assert np.abs(ours.logits(PROMPT)[0, -1].numpy() - want).max() < 1e-4 * np.abs(want).max()
        assert np.abs(scores(ours) - want).max() < 0.03 * np.abs(want).max()  # it keeps keys and values in bfloat16


def test_a_variant_costs_only_its_side_paths(file: Path, tmp_path: Path) -> None:
    native, torched = orchard.load(file), orchard.load(file, dtype="float32")
    path = random_adapter(Adapters(native), tmp_path / "one", rank=3)
    adapters = Adapters(native)
    variant = adapters.model((adapters.load(path),))
    assert native.plan is not None and variant.plan is not None
    assert all(variant.plan.tensors[name] is tensor for name, tensor in native.plan.tensors.items())
    assert isinstance(variant.runner, NativeRunner)
    where = [array.ctypes.data for array in variant.runner.program._kept]
    assert {array.ctypes.data for array in native.runner.program._kept} <= set(where)  # type: ignore[attr-defined]
    other = Adapters(torched)
    twin = other.model((other.load(path),)).decoder
    mine = dict(twin.named_parameters())
    assert all(mine[name] is value for name, value in torched.decoder.named_parameters())
    assert sum(value.numel() for name, value in mine.items() if "lora" in name) < 0.25 * sum(
        value.numel() for name, value in mine.items() if "lora" not in name
    )


def test_names_and_folders_that_are_wrong(adapters: Adapters, tmp_path: Path) -> None:
    path = random_adapter(adapters, tmp_path / "one")
    adapters.load(path)
    assert adapters.load(path) == "one"  # the same folder again is no fault
    with pytest.raises(UsageError, match="already"):
        adapters.load(random_adapter(adapters, tmp_path / "two"), "one")
    for name in ("", "a+b", "x" * 200, "a\nb"):
        with pytest.raises(UsageError, match="cannot be called"):
            adapters.load(path, name)
    with pytest.raises(UsageError, match="twice"):
        adapters.model(("one", "one"))
    with pytest.raises(AssetsUnavailableError, match="nowhere") as caught:
        adapters.load(tmp_path / "nowhere")
    assert caught.value.hint
    with pytest.raises(UnknownAdapter, match="'gone'"):
        adapters.remove("gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadFile, match=r"adapter_config\.json"):
        adapters.load(tmp_path / "empty")
    assert adapters.names == ("one",)


def test_a_folder_that_changed_is_read_again(adapters: Adapters, tmp_path: Path) -> None:
    import shutil

    path = random_adapter(adapters, tmp_path / "one", seed=1)
    before = scores(adapters.model((adapters.load(path),)))
    shutil.rmtree(path)
    random_adapter(adapters, path, seed=2, rank=4)
    assert adapters.load(path) == "one"
    assert np.abs(scores(adapters.model(("one",))) - before).max() > 0.1


def test_an_adapter_for_another_model_is_refused(adapters: Adapters, tmp_path: Path) -> None:
    path = random_adapter(adapters, tmp_path / "one")
    config = json.loads((path / "adapter_config.json").read_text())
    config |= {"orchard_base": "1:" + "0" * 64, "base_model_name_or_path": "org/other"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(OtherBase, match=r"org/other.*tiny\.gguf"):
        adapters.load(path)
    del config["orchard_base"]
    (path / "adapter_config.json").write_text(json.dumps(config))
    assert "does not say" in adapters[adapters.load(path)].notes[0]
    config["use_dora"] = True
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(BadFile, match="magnitudes"):  # which a DoRA adapter has
        adapters.load(path)


def test_few_variants_are_kept(model: Model, tmp_path: Path) -> None:
    adapters = Adapters(model, kept=2)
    names = [adapters.load(random_adapter(adapters, tmp_path / str(n), seed=n)) for n in range(3)]
    first = adapters.model(names[:1])
    adapters.model(names[1:2])
    assert adapters.model(names[:1]) is first  # used last, so the other goes
    adapters.model(names[2:])
    assert adapters.model(names[:1]) is first and len(adapters._variants) == 2


def test_swapped_while_others_run(adapters: Adapters, tmp_path: Path) -> None:
    names = [adapters.load(random_adapter(adapters, tmp_path / str(n), seed=n)) for n in range(3)]
    want = {name: adapters.model((name,)).generate(PROMPT, max_tokens=12).ids for name in names}
    assert len({tuple(ids) for ids in want.values()}) == 3
    wrong: list[Any] = []

    def ask(name: str) -> None:
        try:
            for _ in range(6):
                answer = adapters.model((name,)).generate(PROMPT, max_tokens=12)
                if answer.ids != want[name]:
                    wrong.append((name, answer.ids))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(name,)) for name in names for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(8):
        name = adapters.load(tmp_path / str(n % 3), f"again {n}")
        adapters.model((name,))
        adapters.remove(name)
    for thread in threads:
        thread.join()
    assert not wrong


def test_prompts_of_a_variant_are_kept_apart(adapters: Adapters, model: Model, tmp_path: Path) -> None:
    variant = adapters.model((adapters.load(random_adapter(adapters, tmp_path / "one")),))
    long = PROMPT * 30
    cold = variant.generate(long, max_tokens=8)
    model.generate(long, max_tokens=1)
    assert variant.generate(long, max_tokens=8).ids == cold.ids
    assert model.generate(long, max_tokens=8).ids != cold.ids


def test_a_model_goes_when_it_is_let_go(file: Path, tmp_path: Path) -> None:
    model = orchard.load(file)
    adapters = Adapters(model)
    model.kept_adapters = adapters  # type: ignore[attr-defined]  # as a model holds its own
    variant = adapters.model((adapters.load(random_adapter(adapters, tmp_path / "one")),))
    before = scores(variant)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert np.array_equal(scores(variant), before)
    assert adapters.model(()).generate(PROMPT, max_tokens=2).ids


def test_experts_of_a_native_model_are_refused_and_the_rest_runs(tmp_path: Path) -> None:
    source = save(reference("qwen3-moe-all"), tmp_path / "moe")
    for name, data in tiny_tokenizer_files(96).items():
        (source / name).write_bytes(data)
    model = orchard.load(source)
    adapters = Adapters(model)
    path = random_adapter(adapters, tmp_path / "one")
    assert len(adapters[adapters.load(path)].sides) == 12  # attention only
    prompt = [5, 6, 7]
    want = adapters.model("one").logits(prompt)[0, -1].numpy()
    run = adapters.model("one").runner.begin([prompt], length=3)
    run.read(0, 3)
    assert np.abs(run.first()[0] - want).max() < 0.03 * np.abs(want).max()
    side = Side(np.ones((1, 32), np.float32), np.ones((4, 1), np.float32), 1.0)
    write_adapter(tmp_path / "router", {"stack.layers.0.mlp.router.gate": side}, adapters.base)
    adapters.load(tmp_path / "router")
    with pytest.raises(ConfigError, match=r"mlp\.router\.gate"):
        adapters.model("router")
    assert adapters.names == ("one", "router")


@pytest.mark.parametrize("case", ["gemma3", "llama", "qwen2", "qwen3-moe-all"])
def test_one_signature_for_every_copy_of_a_model(case: str, tmp_path: Path) -> None:
    """In its folder, in GGUF files of several types, in bfloat16, as a plan: the adapter fits them all."""

    def copies(path: Path) -> Iterator[str]:
        with open_checkpoint(path) as checkpoint:
            for dtype in (torch.float32, torch.bfloat16):
                yield signature(*_torch_parts(load_decoder(checkpoint, dtype=dtype)))
            yield signature(*_plan_parts(lower(load_decoder(checkpoint, as_stored(checkpoint, checkpoint.config())))))

    def published(path: Path, change: float = 1.0) -> Path:
        model = reference(case)
        model.model.norm.weight.data.mul_(change)
        return save(model.bfloat16(), path)

    source = published(tmp_path / "folder")
    found = set(copies(source))
    with open_checkpoint(source) as checkpoint:
        for kind in ("f32", "f16", "q8_0"):
            file = tmp_path / f"{kind}.gguf"
            save_gguf(
                load_decoder(checkpoint), file, family=checkpoint.family, hf_config=checkpoint.hf_config, type=kind
            )
            found.update(copies(file))
    assert len(found) == 1
    assert found.isdisjoint(copies(published(tmp_path / "trained", 1.05)))
