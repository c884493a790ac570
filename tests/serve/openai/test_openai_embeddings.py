"""OpenAI's own package against `/v1/embeddings`, on a tiny model and on the real one where it is there."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.serve.errors import ApiError
from orchard.serve.openai.embeddings import texts_of
from orchard.serve.settings import Limits, ModelSpec, Settings
from orchard.session.embedder import load_embedder
from orchard.testing import ScriptedModel
from tests.serve.serving import Serving, serving
from tests.tiny_bert import TOKENS, tiny_bert

pytestmark = pytest.mark.loopback
TEXTS = ["the cat sleeps", "dog", "the dog barks."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("embeddings") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Serving]:
    settings = Settings((ModelSpec("tiny", str(folder)),), limits=Limits(inputs=5))
    found = serving(settings, talks=ScriptedModel(["Hi"]))
    yield found
    found.close()


def client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=serving.base_url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    return load_embedder(folder).embed(TEXTS).vectors


def test_a_list(tiny: Serving, expected: np.ndarray) -> None:
    found = client(tiny).embeddings.create(model="tiny", input=TEXTS)
    assert found.object == "list" and found.model == "tiny"
    assert [one.index for one in found.data] == [0, 1, 2]
    assert np.array_equal(np.array([one.embedding for one in found.data], np.float32), expected)
    assert found.usage.prompt_tokens == found.usage.total_tokens == 5 + 3 + 6


def test_both_forms_say_the_same(tiny: Serving, expected: np.ndarray) -> None:
    found: dict[str, Any] = {}
    for form in ("float", "base64"):
        body = {"model": "tiny", "input": TEXTS[0], "encoding_format": form}
        found[form] = httpx2.post(f"{tiny.base_url}/embeddings", json=body).json()["data"][0]["embedding"]
    assert np.array_equal(np.array(found["float"], np.float32), expected[0])
    assert np.array_equal(np.frombuffer(base64.b64decode(found["base64"]), "<f4"), expected[0])


def test_tokens(tiny: Serving, folder: Path, expected: np.ndarray) -> None:
    tokenizer = load_embedder(folder).tokenizer
    ids = [tokenizer.encode(text) for text in TEXTS]
    ours = client(tiny)
    one = ours.embeddings.create(model="tiny", input=ids[0])
    many = ours.embeddings.create(model="tiny", input=ids)
    assert np.allclose(one.data[0].embedding, expected[0], atol=1e-6) and len(one.data) == 1
    assert np.allclose([vector.embedding for vector in many.data], expected, atol=1e-6)


def test_dimensions(tiny: Serving) -> None:
    ours = client(tiny)
    assert len(ours.embeddings.create(model="tiny", input="dog", dimensions=32).data[0].embedding) == 32
    with pytest.raises(openai.BadRequestError, match="32 numbers") as caught:
        ours.embeddings.create(model="tiny", input="dog", dimensions=8)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "dimensions")


def test_long_texts_are_refused_with_both_counts(tiny: Serving) -> None:
    long = "dog " * 500
    with pytest.raises(openai.BadRequestError) as caught:
        client(tiny).embeddings.create(model="tiny", input=["dog", long])
    assert caught.value.code == "context_length_exceeded"
    assert "502" in caught.value.message and str(TOKENS) in caught.value.message
    cut = client(tiny).embeddings.create(model="tiny", input=long, extra_body={"truncate": True})
    assert cut.usage.prompt_tokens == TOKENS


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({"input": []}, "invalid_request", "input"),
    "an empty text": ({"input": ["dog", ""]}, "invalid_request", "input.1"),
    "no tokens": ({"input": [[]]}, "invalid_request", "input.0"),
    "mixed": ({"input": ["dog", 3]}, "invalid_request", "input.1"),
    "an object": ({"input": [{"text": "dog"}]}, "invalid_request", "input.0"),
    "many": ({"input": ["dog"] * 6}, "invalid_request", "6 texts"),
    "no such token": ({"input": [10**9]}, "invalid_request", "no token id"),
    "a form": ({"encoding_format": "hex"}, "invalid_request", "encoding_format"),
    "a model that writes": ({"model": "talks"}, "wrong_kind_of_model", "minilm"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_told_what_to_change(tiny: Serving, name: str) -> None:
    body, code, words = WRONG[name]
    with pytest.raises(openai.BadRequestError) as caught:
        client(tiny).embeddings.create(model="tiny", input="dog", extra_body=body)
    assert caught.value.code == code and words in caught.value.message


def test_unknown_models_and_fields(tiny: Serving) -> None:
    with pytest.raises(openai.NotFoundError):
        client(tiny).embeddings.create(model="nope", input="dog")
    answer = httpx2.post(
        f"{tiny.base_url}/embeddings", json={"model": "tiny", "input": "dog", "colour": 1, "user": "ada"}
    )
    assert answer.headers["x-orchard-ignored"] == "colour"


def test_a_model_of_vectors_writes_nothing(tiny: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        client(tiny).responses.create(model="tiny", input="Hello")


@pytest.mark.real
def test_the_real_model(server: Serving) -> None:
    if "minilm" not in {card.id for card in server.service.hub.cards()}:
        pytest.skip("minilm is not in the library: `orchard pull minilm` gets it")
    texts = ["A man is eating food.", "Someone eats a meal.", "The stock market fell sharply."]
    found = client(server).embeddings.create(model="minilm", input=texts)
    vectors = np.array([one.embedding for one in found.data])
    assert vectors.shape == (3, 384) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(
    st.text(max_size=5)
    | st.lists(st.integers() | st.text(max_size=4) | st.lists(st.integers(), max_size=3) | JSON, max_size=7)
)
def test_any_input_is_texts_or_an_api_error(given_input: Any) -> None:
    try:
        found = texts_of(json.loads(json.dumps(given_input)), Limits(inputs=5))
    except ApiError as error:
        assert error.status == 400 and error.message.startswith("input")
        return
    assert 1 <= len(found) <= 5
    assert all(item and (isinstance(item, str) or all(type(token) is int for token in item)) for item in found)
