"""A few seconds of the server's fuzzing, with hypothesis behind it; `serve_fuzz.py` and `serve_atheris.py` are the long ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import serve_fuzz
from tests.fuzz.serve_app import Answer, App, Fault, checked
from tests.fuzz.serve_atheris import FromBytes
from tests.fuzz.serve_bodies import CHAT, GOOD, changed, make_case
from tests.soak import hostile

FEW = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    made = App(tmp_path_factory.mktemp("tiny"))
    yield made
    made.close()


@FEW
@given(st.integers(0, 2**32))
def test_bodies_are_answered_or_refused_with_words(app: App, number: int) -> None:
    path, body = make_case(random.Random(number))
    checked(app.post(path, body))


@FEW
@given(st.sampled_from(GOOD), st.data())
def test_any_field_may_be_anything(app: App, good: tuple[str, dict[str, object]], data: st.DataObject) -> None:
    path, body = good
    name = data.draw(st.sampled_from(sorted(body)) | st.text(max_size=8))
    checked(app.post(path, json.dumps({**body, name: data.draw(JSON)}).encode()))


@FEW
@given(st.sampled_from([path for path, _ in GOOD]), st.binary(max_size=60))
def test_any_bytes_may_come(app: App, path: str, data: bytes) -> None:
    assert checked(app.post(path, data)).startswith("4")


@settings(FEW, max_examples=40)
@given(st.sampled_from(sorted(hostile.SCHEMAS)), st.integers(0, 2**32), st.integers(0, 3))
def test_schemas_are_followed_or_refused(app: App, name: str, seed: int, changes: int) -> None:
    draw = random.Random(seed)
    schema = hostile.SCHEMAS[name](draw)
    for _ in range(changes):
        schema = changed(schema, draw)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    said = [{"role": "user", "content": "x"}]
    body = {"model": hostile.MODEL, "messages": said, "max_tokens": 3, "response_format": form}
    checked(app.post(CHAT, json.dumps(body).encode()))


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_good_bodies_are_no_fault(app: App, number: int) -> None:
    """The seeds of the changes are sound but for what this model cannot do (pictures, vectors)."""
    path, body = GOOD[number]
    said = checked(app.post(path, json.dumps(body).encode()))
    assert said in ("answered", "streamed") or path == "/v1/embeddings" or "image_url" in json.dumps(body), said


def test_cases_depend_on_seed_and_number_only() -> None:
    assert serve_fuzz.case_of(3, 17) == serve_fuzz.case_of(3, 17) != serve_fuzz.case_of(4, 17)
    assert make_case(FromBytes(b"abcdefgh" * 9)) == make_case(FromBytes(b"abcdefgh" * 9))
    assert len({make_case(FromBytes(bytes([number]) * 40)) for number in range(256)}) > 50


@pytest.mark.parametrize(
    "answer",
    [
        Answer(500, {}, b'{"error": {"code": "internal", "message": "the server made a mistake"}}'),
        Answer(422, {}, b'{"detail": "no"}'),
        Answer(400, {}, b'{"error": {"code": null, "message": "the server made a mistake"}}'),
        Answer(200, {"content-type": "text/event-stream"}, b'data: {"error": {"code": "internal"}}\n\n'),
    ],
)
def test_the_fuzzer_notices(answer: Answer, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(App, "post", lambda *_, **__: answer)
    with pytest.raises(Fault):
        serve_fuzz.outcome(app, serve_fuzz.case_of(0, 0))
    with pytest.raises(SystemExit, match="case 0:0"):
        serve_fuzz.run(app, 1, 0)
