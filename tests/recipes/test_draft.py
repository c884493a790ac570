"""Draft models: made of a model's own layers, taught to say what it says, and written as files that guess for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import orchard
from orchard.core.context import Context
from orchard.core.errors import BadFile, ConfigError, UnsupportedPair, UsageError
from orchard.data.source import Sample
from orchard.generate.request import Request
from orchard.generate.speculative import Speculation
from orchard.nn.tensors import dense_tensor, tensor_names
from orchard.recipes.draft import Lessons, distil_draft, draft_config, draft_from, draft_layers
from orchard.recipes.draft_model import describe_draft
from orchard.recipes.draft_text import (
    Asked,
    SampleFile,
    answered,
    at,
    invented,
    prompts_of,
    write_samples,
)
from orchard.session.model import Model
from tests.session.export_models import adapter_for, folder_of

TALKS = ["the cat sat", "a dog ran", "the bird flew", "one two three"]
QUICK = Lessons(steps=4, rows=2, length=48, rate=3e-3, dtype="float32")


def rows() -> list[dict[str, object]]:
    return [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{text} and {text}"}]}
        for text in TALKS
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return orchard.load(folder)


# The model --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.data())
def test_layers_are_spread_from_the_first_to_the_last(count: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(1, count))
    chosen = draft_layers(count, wanted)
    assert len(chosen) == wanted == len(set(chosen)) and list(chosen) == sorted(chosen) and chosen[0] == 0
    assert wanted == 1 or chosen[-1] == count - 1
    gaps = np.diff(chosen)
    assert wanted < 3 or gaps.max() - gaps.min() <= 1
    assert draft_layers(count, chosen) == chosen and 1 <= len(draft_layers(count)) <= count


@pytest.mark.parametrize("wrong", [0, 5, True, [], [1, 0], [0, 0], [-1], [4]])
def test_layers_that_are_not_there_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        draft_layers(4, wrong)  # type: ignore[arg-type]
    assert caught.value.hint


def test_a_draft_has_the_models_own_weights_and_leaves_the_model_alone(model: Model) -> None:
    count = len(model.config.stack.layers)
    draft = draft_from(model.decoder, [count - 1])
    assert draft.config == draft_config(model.config, [count - 1]) and len(draft.stack.layers) == 1
    ours, theirs = tensor_names(draft), tensor_names(model.decoder)
    for name, (module, attribute) in ours.items():
        origin = name.replace("stack.layers.0.", f"stack.layers.{count - 1}.")
        assert torch.equal(dense_tensor(module, attribute), dense_tensor(*theirs[origin])), name
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(1.0)
    ids = torch.tensor([[5, 6, 7]])
    before = model.decoder(ids, Context.whole(ids))
    whole = draft_from(model.decoder, count)
    assert torch.allclose(whole(ids, Context.whole(ids)), before, atol=1e-4)


def test_a_draft_of_a_model_with_an_adapter_has_it_merged(folder: Path, tmp_path: Path) -> None:
    model = orchard.load(folder)
    model.adapters.load(adapter_for(folder, tmp_path / "side"))
    variant, ids = model.adapters.model("side"), torch.tensor([[5, 6, 7, 8]])
    whole = draft_from(variant.decoder, len(model.config.stack.layers))
    found, wanted = (one(ids, Context.whole(ids)) for one in (whole, variant.decoder))
    assert torch.allclose(found, wanted, atol=1e-3 * float(wanted.abs().max()))
    assert not torch.allclose(found, model.decoder(ids, Context.whole(ids)), atol=0.1)


def test_a_layer_that_reads_anothers_keys_needs_it_in_the_draft(model: Model) -> None:
    tree = model.config.clone()
    tree.stack.layers[2].mixer.store.owner = 1  # type: ignore[attr-defined]
    assert draft_config(tree, [1, 2]).stack.layers[1].mixer.store.owner == 0  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedPair, match=r"layer 2 reads .* layer 1"):
        draft_config(tree, [0, 2])


def test_facts_by_layer_are_those_of_the_layers_that_are_left() -> None:
    facts = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "eos_token_id": [1, 2], "hidden_size": 8}
    assert describe_draft(facts, (0, 2), 3) == {**facts, "num_hidden_layers": 2, "layer_types": ["a", "c"]}


# The text ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 700), min_size=2, max_size=9), min_size=1, max_size=12), st.integers(0, 3))
def test_samples_come_back_each_once_and_go_on_where_they_were(
    tmp_path_factory: pytest.TempPathFactory, ids: list[list[int]], epoch: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "text.safetensors"
    samples = [Sample.of(one, [place % 2 == 1 for place in range(len(one))]) for one in ids]
    write_samples(path, samples, {"made": "x"})
    source = SampleFile.Config(path=str(path), seed=3).build()
    source.begin(epoch)
    first = [next(source) for _ in range(len(samples) // 2)]
    again = SampleFile.Config(path=str(path), seed=3).build()
    again.restore(json.loads(json.dumps(source.state())))
    rest = list(source)
    assert rest == list(again)
    found = sorted((one.ids.tolist(), one.learnt.tolist()) for one in [*first, *rest])
    assert found == sorted((one.ids.tolist(), one.learnt.tolist()) for one in samples)


def test_a_file_that_holds_no_samples_is_refused(tmp_path: Path) -> None:
    from orchard.weights.safetensors import write_safetensors

    write_safetensors(tmp_path / "a", {"ids": torch.zeros(3, dtype=torch.int32)})
    numbers = {"ids": torch.zeros(3, dtype=torch.int32), "learnt": torch.zeros(3, dtype=torch.uint8)}
    write_safetensors(tmp_path / "b", {**numbers, "ends": torch.tensor([2, 2, 3])})
    for name in ("a", "b"):
        with pytest.raises(BadFile):
            SampleFile.Config(path=str(tmp_path / name)).build()
    with pytest.raises(UsageError, match="no text"):
        write_samples(tmp_path / "c", [])


def test_the_model_answers_and_makes_up_prompts(model: Model) -> None:
    ids = tuple(model.prompt_ids("hello"))
    greedy, hot = answered(model, [Asked(ids), *at([Asked(ids)], 5.0)], max_tokens=6)
    said = model.engine.answer([Request(ids, 6)])[0]
    assert greedy.ids[: len(ids) + len(said.ids)].tolist() == [*ids, *said.ids]
    assert greedy.learnt.tolist() == [False] * len(ids) + [True] * (len(greedy.ids) - len(ids))
    assert hot.ids.tolist() != greedy.ids.tolist()
    assert prompts_of([greedy, greedy]) == [Asked(ids)]
    for one in invented(model, 4, max_tokens=8):
        assert one.ids[: one.known] == tuple(model.prompt_ids("anything"))[: one.known] and one.known > 0


# The whole --------------------------------------------------------------------------------------------------------------


def test_a_draft_is_taught_written_and_used(model: Model, folder: Path, tmp_path: Path) -> None:
    losses: list[float] = []
    lessons = Lessons(**{**vars(QUICK), "steps": 25})
    path = distil_draft(
        model,
        rows(),
        tmp_path,
        layers=1,
        device="cpu",
        lessons=lessons,
        max_tokens=12,
        told=[lambda step, point: losses.append(point["kl"])],
    )
    assert path == tmp_path / "draft.gguf" and len(losses) == 25
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:3])
    assert not list((tmp_path / "draft-run").glob("step-*"))
    guessing = orchard.load(folder, draft=path)
    assert guessing.draft is not None and len(guessing.draft.config.stack.layers) == 1
    for text in ("the cat sat", "something else"):
        assert guessing.generate(text, max_tokens=24).ids == model.generate(text, max_tokens=24).ids
    assert guessing.engine.facts()["speculation"]["draft"]["drafts"] > 0
    again = distil_draft(guessing, rows(), tmp_path / "more", device="cpu", lessons=QUICK, own=False)
    assert len(orchard.load(again).config.stack.layers) == 1  # it began from the draft that was there


def test_text_is_written_once_and_again_for_other_wishes(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import orchard.recipes.draft as module

    written: list[int] = []
    kept = module.text_for
    monkeypatch.setattr(module, "text_for", lambda *a, **k: written.append(1) or kept(*a, **k))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    for seed, count in ((0, 1), (0, 1), (1, 2)):
        distil_draft(model, data, tmp_path / "out", layers=1, device="cpu", lessons=QUICK, own=False, seed=seed)
        assert len(written) == count
    with pytest.raises(UsageError, match="together"):
        distil_draft(model, [data, rows()[0]], tmp_path / "x", lessons=QUICK)  # type: ignore[list-item]


def test_a_draft_for_an_adapter_guesses_better_for_it(folder: Path, tmp_path: Path) -> None:
    model = orchard.load(folder)
    side = adapter_for(folder, tmp_path / "side", size=0.1)
    model.adapters.load(side)
    variant = model.adapters.model("side")
    layers = len(model.config.stack.layers)
    path = distil_draft(
        variant,
        rows(),
        tmp_path / "out",
        layers=layers,
        device="cpu",
        lessons=Lessons(**{**vars(QUICK), "rate": 1e-6}),
    )
    (side / "draft.gguf").write_bytes(path.read_bytes())
    other = orchard.load(folder)
    other.adapters.load(side)
    guessed = other.adapters.model("side")
    request = Request(tuple(model.prompt_ids("the cat sat")), 24, seed=1)
    expected = variant.engine.answer([request])[0]
    way = Speculation(kind="draft", length=4)
    answer = guessed.engine.answer([Request(request.ids, 24, seed=1, speculation=way)])[0]
    assert answer.ids == expected.ids and answer.usage.calls < expected.usage.calls
    with pytest.raises(UsageError, match="no draft"):  # it is the variant's alone
        other.engine.answer([Request(request.ids, 4, seed=1, speculation=way)])
