"""The gate of an export: a fault planted in each thing that it looks at is caught and named, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.session import export as export_module
from orchard.session import save
from orchard.session.export import export
from orchard.session.parity import LIMITS, Numbers, compare_numbers, prompts_of
from orchard.session.parity_words import ExportDrift, compare_words, words_of
from orchard.weights import export as weights_export
from orchard.weights.gguf.types import ArrayType, GGUFValueType, Typed
from tests.session.export_models import adapter_for, folder_of, opened
from tests.tiny import tiny_gguf

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("llama") / "source")


def metadata_changed(patch: Patch, key: str, change: Callable[[Any], Any]) -> None:
    """Write GGUF files with one key changed."""
    true = save.gguf_metadata

    def changed(*given: Any) -> dict[str, Any]:
        found = true(*given)
        return {**found, key: change(found[key])}

    patch.setattr(save, "gguf_metadata", changed)


def _swapped(values: list[Any], a: int, b: int) -> list[Any]:
    values = list(values)
    values[a], values[b] = values[b], values[a]
    return values


def _weights(patch: Patch) -> None:
    true = weights_export.to_gguf

    def changed(ours: str, *rest: Any) -> torch.Tensor:
        dense = true(ours, *rest)
        return dense.flip(0) if ours == "stack.layers.1.mlp.up.weight" else dense

    patch.setattr(weights_export, "to_gguf", changed)


def _rotary(patch: Patch) -> None:
    """No tensor shows this, and with 4 bits not even the scores."""
    true = weights_export.write_gguf
    patch.setattr(weights_export, "write_gguf", lambda p, m, t: true(p, {**m, "llama.rope.freq_base": 100.0}, t))


def _epsilon(patch: Patch) -> None:
    true = weights_export.write_gguf
    key = "llama.attention.layer_norm_rms_epsilon"
    patch.setattr(weights_export, "write_gguf", lambda p, m, t: true(p, {**m, key: 1e-3}, t))


def _scores(patch: Patch) -> None:
    """Every file is right, and the reader computes something else."""
    true = export_module.scores_of
    asked: list[int] = []

    def changed(*given: Any) -> tuple[np.ndarray, ...]:
        asked.append(1)
        found = true(*given)
        return found if len(asked) % 2 else tuple(np.roll(each, 1, axis=1) for each in found)

    patch.setattr(export_module, "scores_of", changed)


def _template(patch: Patch) -> None:
    metadata_changed(patch, "tokenizer.chat_template", lambda text: text.replace("assistant\n", "assistant:"))


def _splitter(patch: Patch) -> None:
    metadata_changed(patch, "tokenizer.ggml.pre", lambda name: "llama-bpe")


def _entries(patch: Patch) -> None:
    metadata_changed(patch, "tokenizer.ggml.tokens", lambda tokens: _swapped(tokens, 50, 51))


def _merges(patch: Patch) -> None:
    metadata_changed(patch, "tokenizer.ggml.merges", lambda merges: merges[:-60])


def _end(patch: Patch) -> None:
    metadata_changed(patch, "tokenizer.ggml.eos_token_id", lambda i: i + 1)


def _control(patch: Patch) -> None:
    def change(types: list[int]) -> list[int]:
        return [1 if i == 9 else kind for i, kind in enumerate(types)]

    metadata_changed(patch, "tokenizer.ggml.token_type", change)


@pytest.mark.parametrize(
    ("plant", "check", "where"),
    [
        (_weights, "weights", "stack.layers.1.mlp.up.weight"),
        (_rotary, "config", "rotary.theta"),
        (_epsilon, "config", "eps"),
        (_scores, "scores", "position "),
        (_template, "chat template", "from character 1"),
        (_splitter, "", "place"),
        (_entries, "", "place"),
        (_merges, "", "place"),
        (_end, "special ids", "eos_id"),
        (_control, "special ids", "control_tokens, '[INST]'"),
    ],
)
@pytest.mark.parametrize("kind", ["f32", "q4_0"])
def test_a_planted_fault_is_named(
    plant: Callable[[Patch], None], check: str, where: str, kind: str, llama: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    with pytest.raises(ExportDrift) as caught:
        export(llama, tmp_path / "x.gguf", format="gguf", type=kind)
    error = caught.value
    assert error.check == check or (not check and error.check in ("tokens", "rendered conversations"))
    assert where in error.where and error.source != error.target
    assert f"{check}: " in error.message and error.where in error.message and repr(error.source)[:10] in error.message
    assert error.to_dict()["divergence"]["check"] == error.check  # type: ignore[index]
    assert not list(tmp_path.iterdir())


def test_a_fault_of_the_merge_is_found(llama: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    from orchard.transforms.lora import LoraLinear

    true = LoraLinear.merged_weight
    monkeypatch.setattr(LoraLinear, "merged_weight", lambda self: true(self) * 1.001)
    adapter = adapter_for(llama, tmp_path / "one")
    with pytest.raises(ExportDrift) as caught:
        export(llama, tmp_path / "m", format="hf", type="f32", adapters=[adapter], merge=True)
    assert caught.value.check == "scores" and not (tmp_path / "m").exists()


def test_a_fault_of_a_folders_writer_is_found(llama: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(save, "COPIED", ("tokenizer.json",))  # the template and the roles of tokens stay behind
    with pytest.raises(ExportDrift) as caught:
        export(llama, tmp_path / "m", format="hf")
    assert caught.value.check == "special ids"


def test_a_fault_of_an_adapters_writer_is_found(llama: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    from orchard.weights import adapters

    true = adapters._numbers
    monkeypatch.setattr(adapters, "_numbers", lambda *given: {**true(*given), "lora_alpha": 7.0})
    source = adapter_for(llama, tmp_path / "one")
    monkeypatch.undo()
    monkeypatch.setattr(adapters, "_numbers", lambda *given: {**true(*given), "lora_alpha": 8.0})
    with pytest.raises(ExportDrift, match=r"config: .*alpha: '7.0' became '8.0'"):
        export(llama, tmp_path / "two", format="peft", adapters=[source])
    assert not (tmp_path / "two").exists()


def test_a_tolerance_lets_more_pass_and_says_so(llama: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    _scores(monkeypatch)
    facts = export(llama, tmp_path / "x.gguf", format="gguf", type="f32", tolerance=50.0)
    assert facts.parity.raised and facts.parity.limit == 50.0 and facts.parity.scaled_difference > 1e-4
    with pytest.raises(ExportDrift, match="scores"):
        export(llama, tmp_path / "y.gguf", format="gguf", type="q4_0", tolerance=1e-6)


def test_words_are_compared_in_every_part(tmp_path: Path) -> None:
    source = opened(tiny_gguf(tmp_path / "a.gguf")).tokenizer
    compare_words(words_of(source), words_of(source))
    for number, (key, value, check) in enumerate(
        [
            ("tokenizer.chat_template", None, "chat template"),
            ("tokenizer.ggml.merges", [], "rendered conversations"),
            ("tokenizer.ggml.pre", "gpt-2", ""),
            ("tokenizer.ggml.bos_token_id", 259, "special ids"),
            ("tokenizer.ggml.add_bos_token", True, "special ids"),
        ]
    ):
        typed = Typed([], ArrayType(GGUFValueType.STRING)) if value == [] else value
        changes = {key: "" if value is None else typed}
        other = opened(tiny_gguf(tmp_path / f"{number}.gguf", **changes)).tokenizer
        if check:
            with pytest.raises(ExportDrift) as caught:
                compare_words(words_of(source), words_of(other))
            assert caught.value.check == check, key
        else:  # its only merge is of a space and a letter, which both rules keep together
            compare_words(words_of(source), words_of(other))


def numbers(scores: np.ndarray, **samples: np.ndarray) -> Numbers:
    return Numbers((scores.astype(np.float32),), {"a.weight": np.ones(4, np.float32), **samples})


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), kind=st.sampled_from(sorted(LIMITS)), factor=st.sampled_from([0.4, 2.5]))
def test_one_score_beyond_its_limit_is_found_and_none_within(seed: int, kind: str, factor: float) -> None:
    random = np.random.default_rng(seed)
    ours = random.normal(size=(5, 30)) * 3
    theirs = ours.copy()
    at = (int(random.integers(5)), int(random.integers(30)))
    theirs[at] += factor * LIMITS[kind].largest * max(1.0, np.abs(ours).max())
    if factor < 1:
        found = compare_numbers(numbers(ours), numbers(theirs), [[1, 2]], kind)
        assert found.scaled_difference <= LIMITS[kind].largest and found.kl >= -1e-9
        return
    with pytest.raises(ExportDrift) as caught:
        compare_numbers(numbers(ours), numbers(theirs), [[1, 2]], kind)
    assert f"position {at[0]}, token {at[1]};" in caught.value.where


def test_what_is_no_number_or_not_there_is_a_fault() -> None:
    ours = np.random.default_rng(0).normal(size=(3, 9))
    theirs = ours.copy()
    theirs[1, 4] = np.nan
    with pytest.raises(ExportDrift, match="position 1, token 4"):
        compare_numbers(numbers(ours), numbers(theirs), [[1]], "q4_0", tolerance=1e9)
    with pytest.raises(ExportDrift, match=r"b\.weight: 'missing' became 'there'"):
        compare_numbers(numbers(ours), numbers(ours, **{"b.weight": np.ones(2)}), [[1]], "f32")
    with pytest.raises(ExportDrift, match=r"a\.weight, values: 4 became 3"):
        compare_numbers(numbers(ours), Numbers((ours,), {"a.weight": np.ones(3)}), [[1]], "f32")


def test_one_position_of_a_mixture_may_choose_other_experts() -> None:
    router = {"stack.layers.0.mlp.router.weight": np.ones(4, np.float32)}
    ours = np.random.default_rng(0).normal(size=(60, 40))
    theirs = ours.copy()
    theirs[7] += 1.2
    found = compare_numbers(numbers(ours, **router), numbers(theirs, **router), [[1]], "bf16")
    assert found.limit is None and found.scaled_difference > LIMITS["bf16"].largest
    for wrong in (theirs + 0.2, np.roll(ours, 1, axis=0)):
        with pytest.raises(ExportDrift, match="the mean is"):
            compare_numbers(numbers(ours, **router), numbers(wrong, **router), [[1]], "bf16")


def test_prompts_fit_every_model(tmp_path: Path) -> None:
    tokenizer = opened(tiny_gguf(tmp_path / "a.gguf")).tokenizer
    for vocab, context in ((260, 256), (40, 3), (1, 1)):
        for ids in prompts_of(tokenizer, vocab, context):
            assert 0 < len(ids) <= context and all(0 <= i < vocab for i in ids)


def test_the_source_is_gone_before_the_target_is_read(llama: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Two whole models need not fit into memory."""
    import gc

    from orchard.models.language.decoder import Decoder

    alive: list[int] = []
    true = export_module._gate

    def counted(*given: Any) -> Any:
        alive.append(sum(isinstance(each, Decoder) for each in gc.get_objects()))
        return true(*given)

    gc.collect()
    before = sum(isinstance(each, Decoder) for each in gc.get_objects())
    monkeypatch.setattr(export_module, "_gate", counted)
    export(llama, tmp_path / "x.gguf", format="gguf")
    assert alive[0] <= before
