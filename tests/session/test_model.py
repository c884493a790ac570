"""`orchard.load` and the model it gives: scores, answers, errors, saving."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import orchard
from orchard.cache.codecs import Int8
from orchard.cache.store import Store
from orchard.core.errors import ContextOverflow, MissingTokenizer, ModelNotFound, UnknownArchitecture, UsageError
from orchard.nn import formats
from orchard.nn.linear import Linear
from orchard.session.model import Model
from orchard.weights.gguf.reader import GGUFFile
from orchard.weights.gguf.writer import write_gguf
from tests.parity.families import reference, save
from tests.tiny import tiny_gguf, tiny_tokenizer_files


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return orchard.load(path)


def test_logits_are_float32_and_whole(model: Model) -> None:
    one = model.logits([1, 2, 3])
    many = model.logits([[1, 2, 3], [4, 5, 6]])
    assert one.dtype == torch.float32
    assert one.shape == (1, 3, model.config.vocab)
    assert many.shape == (2, 3, model.config.vocab)
    torch.testing.assert_close(one[0], many[0])
    assert not one.is_inference()


@pytest.mark.parametrize("ids", [[], [[1, 2], [3]], [-1], [10**6], "words", [[[1]]]])
def test_wrong_ids(model: Model, ids: object) -> None:
    with pytest.raises(UsageError):
        model.logits(ids)  # type: ignore[arg-type]


def test_too_many_ids(model: Model) -> None:
    with pytest.raises(ContextOverflow) as caught:
        model.logits([1] * (model.config.context + 3))
    assert caught.value.tokens - caught.value.limit == 3


def test_greedy_answers_follow_the_logits(model: Model) -> None:
    answer = model.generate([5, 6, 7], max_tokens=6)
    ids = [5, 6, 7]
    for token in answer.ids:
        assert int(model.logits(ids)[0, -1].argmax()) == token
        ids.append(token)
    assert answer.usage.input == 3
    assert answer.usage.output == len(answer.ids) == 6
    assert answer.finish == "length"


def test_streams_add_up_to_the_answer(model: Model) -> None:
    options = {"max_tokens": 12, "temperature": 0.9, "seed": 4}
    whole = model.generate("Hello", **options)  # type: ignore[call-overload]
    stream = model.generate("Hello", stream=True, **options)  # type: ignore[call-overload]
    assert "".join(piece.text for piece in stream) == whole.text
    assert stream.answer.ids == whole.ids
    assert whole.seed == 4


def test_a_cancelled_stream_keeps_what_it_gave(model: Model) -> None:
    cancel = threading.Event()
    stream = model.generate("Hello", stream=True, cancel=cancel, max_tokens=100)
    first = next(stream)
    cancel.set()
    rest = list(stream)
    assert rest[-1].finish == "cancelled"
    assert stream.answer.finish == "cancelled"
    assert first.id == stream.answer.ids[0]
    assert len(stream.answer.ids) <= 2


def test_many_prompts_get_what_each_gets_alone(model: Model) -> None:
    prompts = ["Hi", "A rather longer question than the first", [{"role": "user", "content": "Third"}]]
    together = model.generate_many(prompts, max_tokens=10, temperature=0.8, seed=11)
    for prompt, answer in zip(prompts, together, strict=True):
        assert model.generate(prompt, max_tokens=10, temperature=0.8, seed=11).ids == answer.ids


def test_messages_go_through_the_template(model: Model) -> None:
    ids = model.prompt_ids([{"role": "user", "content": "a<|im_end|>b"}])
    ends = model.tokenizer.control_tokens["<|im_end|>"]
    assert ids.count(ends) == 1
    assert "a<|im_end|>b" in model.tokenizer.decode(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"stop": 5},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"stop": ""},
        {"tempreature": 1.0},
        {"top_k": 0},
    ],
)
def test_wrong_options(model: Model, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        model.generate("Hello", **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("prompt", ["", b"hi", [True], [], [{"role": "robot", "content": "x"}], [{"content": "x"}], 3])
def test_wrong_prompts(model: Model, prompt: object) -> None:
    with pytest.raises(UsageError):
        model.generate(prompt)  # type: ignore[call-overload]


def test_a_prompt_that_does_not_fit_is_refused_whole(model: Model) -> None:
    with pytest.raises(ContextOverflow) as caught:
        model.generate("x" * 1000)
    assert caught.value.tokens > caught.value.limit == model.config.context


def test_rewrites_apply_before_building(path: Path, model: Model) -> None:
    def compress(tree: orchard.Config) -> orchard.Config:
        tree = tree.rewrite(Linear, lambda node: node.clone(format=formats.Int8.Config()))
        return tree.rewrite(Store, lambda node: node.clone(codec=Int8.Config()))

    small = orchard.load(path, rewrite=compress)  # type: ignore[arg-type]
    layer = small.decoder.stack.layers[0]
    assert layer.mixer.q.packed()["codes"].dtype == torch.int8
    assert layer.mixer.q.nbytes < model.decoder.stack.layers[0].mixer.q.nbytes / 3
    expected, got = model.logits(list(range(40))), small.logits(list(range(40)))
    assert 0 < (got - expected).abs().mean() < 0.05 * expected.abs().mean()
    assert small.generate("Hello", max_tokens=5).usage.output == 5


def test_saving_gguf_and_loading_again(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "again.gguf", type="f32")
    again = orchard.load(tmp_path / "again.gguf")
    ids = list(range(20))
    assert torch.equal(again.logits(ids), model.logits(ids))
    assert again.tokenizer.chat_template == model.tokenizer.chat_template
    assert again.generate("Hello", max_tokens=8).ids == model.generate("Hello", max_tokens=8).ids


def test_saving_a_folder_that_transformers_reads(model: Model, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model.save(tmp_path / "folder", type="float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    with torch.inference_mode():
        expected = theirs(input_ids=torch.arange(20)[None]).logits
    assert (model.logits(list(range(20))) - expected).abs().max() <= 1e-4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    text = "The time is 12:45, naïve café 🌲"
    assert tokenizer.encode(text, add_special_tokens=False) == model.tokenizer.encode(text)
    again = orchard.load(tmp_path / "folder")
    assert again.generate("Hello", max_tokens=8).ids == model.generate("Hello", max_tokens=8).ids
    again.save(tmp_path / "other.gguf", type="f32")  # the tokenizer is converted
    back = orchard.load(tmp_path / "other.gguf")
    assert back.tokenizer.encode(text) == model.tokenizer.encode(text)
    assert back.generate("Hello", max_tokens=8).ids == model.generate("Hello", max_tokens=8).ids


def test_folders_load_with_their_tokenizer(tmp_path: Path) -> None:
    save(reference("llama"), tmp_path / "m")
    with pytest.raises(MissingTokenizer, match=r"tokenizer\.json"):
        orchard.load(tmp_path / "m")
    for name, data in tiny_tokenizer_files(vocab=96).items():
        (tmp_path / "m" / name).write_bytes(data)
    assert orchard.load(tmp_path / "m").generate("ab", max_tokens=3).usage.output <= 3


def test_names_and_paths_that_lead_nowhere(empty_home: Path, tmp_path: Path) -> None:
    for name in ("no-such-model", str(tmp_path / "nothing.gguf"), ""):
        with pytest.raises((ModelNotFound, UsageError)):
            orchard.load(name)


def test_an_unknown_architecture_is_named(path: Path, tmp_path: Path) -> None:
    with GGUFFile.open(path) as file:
        write_gguf(tmp_path / "odd.gguf", {**file.typed_metadata(), "general.architecture": "rwkv7"}, [])
    with pytest.raises(UnknownArchitecture, match="rwkv7"):
        orchard.load(tmp_path / "odd.gguf")


def test_one_prompt_is_not_many(model: Model) -> None:
    with pytest.raises(UsageError, match="list"):
        model.generate_many("abc")
    assert model.generate("Hello", max_tokens=2, stop=None).usage.output == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["banana", "cuda:99", "meta:x"])
def test_wrong_device(path: Path, device: str) -> None:
    with pytest.raises(UsageError, match="device"):
        orchard.load(path, device=device)


def test_wrong_dtype(path: Path) -> None:
    with pytest.raises(UsageError, match="float8"):
        orchard.load(path, dtype="float8")
