"""Frames: a template is only replaced by what it always writes, and only where it cannot look into a message."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.text import frames
from orchard.text.chat import chat_ids
from orchard.text.frames import Frame, copies_content, frame_of
from orchard.text.packed import pack, unpack
from orchard.text.tokenizer import Tokenizer
from orchard.weights.gguf.reader import GGUFFile
from tests.tiny import TEMPLATE, tiny_gguf

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BUILT = "{{ bos_token }}{% for m in messages %}{{ '<|im_' ~ 'start|>' }}{{ m.content }}{% endfor %}"


def tokenizer_with(template: str, tmp_path: Path) -> Tokenizer:
    with GGUFFile.open(tiny_gguf(tmp_path / "t.gguf", **{"tokenizer.chat_template": template})) as file:
        return Tokenizer.from_gguf(file.metadata)


@pytest.fixture(scope="module", params=[CHATML, TEMPLATE, BUILT])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """The same tokenizer without and with a frame."""
    plain = tokenizer_with(request.param, tmp_path_factory.mktemp("frame"))
    framed = unpack(*pack(plain))
    if request.param is not BUILT:  # there the template spells control tokens in pieces, and is always asked
        assert framed.frame is not None and plain.frame is None
    return plain, framed


texts = st.one_of(
    st.text(min_size=1),
    st.lists(
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "\n", " ", "a", "\ue000", "\U000f0001", "{{ 1 }}"]
        ),
        min_size=1,
    ).map("".join),
)


@given(text=texts.filter(lambda text: text.strip() != ""))
def test_a_frame_gives_what_the_template_gives(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    plain, framed = pair
    assert chat_ids(framed, text) == chat_ids(plain, text)
    assert chat_ids(framed, [{"role": "user", "content": text}]) == chat_ids(plain, text)


def test_other_conversations_go_through_the_template(pair: tuple[Tokenizer, Tokenizer]) -> None:
    plain, framed = pair
    for messages in (
        [{"role": "system", "content": "s"}],
        [{"role": "user", "content": "u", "name": "n"}],
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
    ):
        assert chat_ids(framed, messages) == chat_ids(plain, messages)
    message = [{"role": "user", "content": "u"}]
    for options in ({"add_generation_prompt": False}, {"tools": [{"name": "t"}]}):
        assert chat_ids(framed, message, **options) == chat_ids(plain, message, **options)  # type: ignore[arg-type]


def test_the_frame_spares_the_template_engine(
    pair: tuple[Tokenizer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, framed = pair
    assert framed.frame is not None
    monkeypatch.setattr("orchard.text.chat.conversation_pieces", lambda *_: pytest.fail("asked the template"))
    chat_ids(framed, "Hello")
    with pytest.raises(pytest.fail.Exception):
        chat_ids(framed, "a<|im_end|>b")
    with pytest.raises(pytest.fail.Exception):
        chat_ids(framed, "x" * (frames.LONGEST + 1))


LOOKING = [
    "{{ messages }}",
    "{{ messages[0] }}",
    "{{ messages[0]['content'] | trim }}",
    "{{ messages[0]['content'].strip() }}",
    "{{ messages[0]['content'][0] }}",
    "{{ messages[0]['content'] * 2 }}",
    "{{ messages[0]['content'] % 3 }}",
    "{% if messages[0]['content'] %}x{% endif %}",
    "{% if 'x' in messages[0]['content'] %}x{% endif %}",
    "{{ messages[0]['content'] == 'x' }}",
    "{{ messages[0]['content'] if true else '' }}",
    "{% for m in messages %}{% set c = m.content %}{{ c }}{% endfor %}",
    "{% for m in messages %}{{ loop.nextitem }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.content }}{% endfor %}",
    "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m[m.role] }}{% endfor %}",
    "{% for m in messages %}{{ m['con' + 'tent'] }}{% endfor %}",
    "{% for m in messages %}{{ m }}{% endfor %}",
    "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
    "{% for k, v in messages %}{{ k }}{% endfor %}",
    "{% for m in messages[0].content %}{{ m }}{% endfor %}",
    "{% for loop in messages %}{{ loop.content }}{% endfor %}",
    "{% for messages in messages %}{{ messages.content }}{% endfor %}",
    "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(messages[0].content) }}",
    "{{ strftime_now('%d') }}{{ messages[0].content }}",
    "{{ [messages[0].content] }}",
    "{{ {'a': messages[0].content} }}",
    "{{ messages[0].items() }}",
    "{{ messages | tojson }}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "{{ somebody }}{{ messages[0].content }}",
]


@pytest.mark.parametrize("template", LOOKING)
def test_a_template_that_may_look_is_refused(template: str, tmp_path: Path) -> None:
    assert not copies_content(template)
    assert frame_of(tokenizer_with(template, tmp_path)) is None


@pytest.mark.parametrize("template", [CHATML, TEMPLATE, BUILT, "x {{ messages[0].content }} {{ eos_token }}"])
def test_a_template_that_copies_is_accepted(template: str) -> None:
    assert copies_content(template)


def test_templates_that_fail_have_no_frame(tmp_path: Path) -> None:
    for template in ("{% for", "{{ messages[3].content }}", "no messages at all", "{{ messages[0].content }}" * 2):
        assert frame_of(tokenizer_with(template, tmp_path)) is None


@pytest.mark.parametrize(
    "parts", [None, [], [[], "a", "b"], [["x", None], "a", "b", []], [[True], "", "", []], [[], 1, "", []]]
)
def test_damaged_frames_are_refused(parts: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        Frame.from_list(parts)
