"""Conversations become the ids that the transformers package gives, and no message can forge a control token."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from orchard.core.errors import TemplateError, UsageError
from orchard.text import Tokenizer, chat_ids
from orchard.text.from_gguf import load_gguf
from tests.text.chat_styles import STYLES
from tests.text.tiny_vocabularies import CONTROL, byte_level, gguf_of_byte_level, gguf_of_pieces


@cache
def tokenizer_for(style: str, kind: str = "byte-level") -> Tokenizer:
    metadata = gguf_of_byte_level(byte_level(), "gpt-2") if kind == "byte-level" else gguf_of_pieces()
    loaded = load_gguf(metadata | {"tokenizer.chat_template": STYLES.get(style, style)})
    if kind == "first word only":  # a space goes before the first word of a text, not after control tokens
        tree = json.loads(loaded.backend.to_str())
        tree["normalizer"] = None
        tree["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        loaded = replace(loaded, backend=tokenizers.Tokenizer.from_str(json.dumps(tree)))
    return Tokenizer(loaded)


@cache
def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )


def reference(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    options = {"add_generation_prompt": True, "chat_template": tokenizer.chat_template, "return_dict": False} | options
    return list(wrapped(tokenizer).apply_chat_template(messages, tokenize=True, **options))


def talk(*turns: str) -> list[dict[str, Any]]:
    """Alternating turns; a first one that begins with "S:" is the system's."""
    system = [{"role": "system", "content": turns[0][2:]}] if turns[0].startswith("S:") else []
    rest = turns[1:] if system else turns
    return system + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(rest)]


BENIGN = [
    talk("Hello"),
    talk("S:Be brief.", "What is the capital of France?"),
    talk("  padded \n", "\n\nanswer\n ", "and again\t"),
    talk("S:", "Größe 日本語 😀👩‍👩‍👧‍👦 e\u0301", "ok", "x < 3 and y > [4] | 5"),
    talk("a", "<think>\nhm, let me see\n</think>\n\nyes", "b", "<think>\nmore\n</think>\n\nno", "c <div> </div>"),
    talk("line\n" * 30, "1234567890", "\u200b\u00a0"),
]
KINDS = ("byte-level", "pieces", "first word only")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("messages", BENIGN)
def test_benign_conversations_equal_the_transformers_package(
    style: str, kind: str, messages: list[dict[str, Any]]
) -> None:
    tokenizer = tokenizer_for(style, kind)
    assert chat_ids(tokenizer, messages) == reference(tokenizer, messages)
    bare = {"add_generation_prompt": False}
    assert chat_ids(tokenizer, messages, **bare) == reference(tokenizer, messages, **bare)


def test_tools_equal_the_transformers_package() -> None:
    tools = [
        {"type": "function", "function": {"name": "add", "description": "a < b é", "parameters": {"type": "object"}}}
    ]
    tokenizer = tokenizer_for("llama3")
    assert chat_ids(tokenizer, "Hi", tools=tools) == reference(tokenizer, talk("Hi"), tools=tools)


@pytest.mark.parametrize("style", STYLES)
@given(st.text(), st.text())
def test_any_text_without_control_tokens_equals_the_transformers_package(style: str, first: str, second: str) -> None:
    assume(first.strip() and not any(text in first + second for text in CONTROL))
    tokenizer, messages = tokenizer_for(style), talk("S:x", first, second, "go on")
    assert chat_ids(tokenizer, messages) == reference(tokenizer, messages)


FRAGMENTS = [
    *CONTROL,
    "<|",
    "|>",
    "<",
    ">",
    "|",
    "[",
    "]",
    "[/",
    "INST",
    "im_end",
    "im_",
    "end|>",
    "<|im_",
    "user",
    "system",
    "s",
]
FRAGMENTS += [
    "\n",
    " ",
    "</think>",
    "<think>",
    "<tool_response>",
    "\U00100000",
    "\U00101000",
    "\U000f0000",
    "text",
    "<|im_end|",
]
hostile = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("style", STYLES)
@given(st.lists(hostile, min_size=3, max_size=3))
def test_no_message_can_forge_a_control_token(style: str, kind: str, texts: list[str]) -> None:
    assume(any(text.strip() for text in texts))
    tokenizer = tokenizer_for(style, kind)
    ids = chat_ids(tokenizer, talk("S:" + texts[0], *texts[1:]))
    benign = chat_ids(tokenizer, talk("S:plain", "plain", "plain"))
    control = tokenizer.control_ids
    assert Counter(i for i in ids if i in control) == Counter(i for i in benign if i in control)
    shown = tokenizer.decode(ids, skip_special=False)
    for text in texts[1:] if style != "thinking" else texts[1:2]:
        # SentencePiece cannot tell U+2581 from a space.
        assert text.strip() in shown or (kind == "pieces" and ("think>" in text or "▁" in text))


@pytest.mark.parametrize("style", STYLES)
def test_typing_control_tokens_gives_text(style: str) -> None:
    tokenizer = tokenizer_for(style)
    everything = " ".join(CONTROL)
    ids = chat_ids(tokenizer, talk("S:" + everything, everything, everything, everything))
    benign = chat_ids(tokenizer, talk("S:a", "b", "c", "d"))
    assert sum(i in tokenizer.control_ids for i in ids) == sum(i in tokenizer.control_ids for i in benign)
    assert tokenizer.decode(ids, skip_special=False).count(everything) == 4


def test_tool_calls_and_definitions_cannot_forge_either() -> None:
    template = "{{ tools | tojson }}{% for m in messages %}<|user|>{{ m | tojson }}{{ m.name }}{% endfor %}"
    tokenizer = tokenizer_for(template)
    call = {"function": {"name": "<|end|>", "arguments": {"<|im_end|>": ["<s>", "[INST]"]}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call], "name": "</s>"}]
    ids = chat_ids(tokenizer, messages, tools=[{"<|eot_id|>": "<|user|>"}])
    assert [i for i in ids if i in tokenizer.control_ids] == [tokenizer.control_tokens["<|user|>"]]


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ '<|' + messages[0].content + '|>' }}", "im_end"),
        ("{{ '<|' ~ messages[0].content | trim ~ '|>' }}", " im_end "),
        ("<|user|>{{ '<|im_' + messages[0].content[:3] + '|>' }}", "end of it"),
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "|im_end|"),
    ],
)
def test_templates_that_wrap_message_text_into_control_tokens_are_refused(template: str, content: str) -> None:
    tokenizer = tokenizer_for(template)
    with pytest.raises(TemplateError, match="out of message text") as caught:
        chat_ids(tokenizer, content)
    assert caught.value.hint
    assert chat_ids(tokenizer, "harmless")  # the template works as long as nothing is forged


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content | replace('x', '') }}", "{{ messages | map(attribute='content') | join }}"]
)
def test_text_that_a_template_joins_into_a_control_token_stays_text(template: str) -> None:
    tokenizer = tokenizer_for(template)
    ids = chat_ids(tokenizer, talk("<|imx_e", "nd|>"))
    assert tokenizer.control_ids.isdisjoint(ids)


def test_one_begin_token() -> None:
    tokenizer = tokenizer_for("llama3", "pieces")
    assert tokenizer.add_bos
    assert chat_ids(tokenizer, "<s>Hi").count(tokenizer.bos_id) == 1
    plain = Tokenizer.from_gguf(gguf_of_pieces())
    assert chat_ids(plain, "<s>Hi").count(plain.bos_id or 0) == 1


def test_without_a_template_a_plain_format_is_used() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_of_byte_level(byte_level(), "gpt-2"))
    ids = chat_ids(tokenizer, talk("S:Be brief.", "Hi <|im_end|>"))
    assert tokenizer.decode(ids) == "System: Be brief.\n\nUser: Hi <|im_end|>\n\nAssistant:"
    assert tokenizer.control_ids.isdisjoint(ids)


def test_white_space_beside_greedy_control_tokens() -> None:
    """Some control tokens swallow the white space beside them (Phi-3's do)."""
    tree = json.loads(byte_level())
    for token in tree["added_tokens"]:
        token["rstrip"] = token["content"] == "<|end|>"
        token["lstrip"] = token["content"] == "<|user|>"
    loaded = load_gguf(gguf_of_byte_level(byte_level(), "gpt-2"))
    template = "{% for m in messages %}{{ ' \n<|user|>\n ' + m.content + '<|end|>\n' }}{% endfor %}"
    tokenizer = Tokenizer(
        replace(loaded, backend=tokenizers.Tokenizer.from_str(json.dumps(tree)), chat_template=template)
    )
    for messages in BENIGN:
        assert chat_ids(tokenizer, messages) == reference(tokenizer, messages)


def test_wrong_messages_are_usage_errors() -> None:
    every_block = "".join(map(chr, range(0xF0000, 0x10FFFE, 4096)))
    for wrong in ("", [], [{"role": "robot", "content": "x"}], every_block):
        with pytest.raises(UsageError):
            chat_ids(tokenizer_for("chatml"), wrong)


def test_a_template_s_own_refusal_is_shown() -> None:
    with pytest.raises(TemplateError, match="no system please"):
        chat_ids(tokenizer_for("{{ raise_exception('no system please') }}"), "Hi")
