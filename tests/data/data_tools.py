"""Tokenizers and chat templates for the tests of data: the styles of real families, with tools, written for these tests."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from orchard.text import Tokenizer
from orchard.text.from_gguf import load_gguf
from tests.text.chat_styles import STYLES
from tests.text.tiny_vocabularies import byte_level, gguf_of_byte_level, gguf_of_pieces

# Calls and results between tags, a system turn with the tools in it (Hermes, Qwen 2.5, SmolLM2).
QWEN_TOOLS = """{%- set first = messages[0] %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (first.content if first.role == 'system' else 'You are helpful.') + '\n\n# Tools\n' }}
    {%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- elif first.role == 'system' %}{{- '<|im_start|>system\n' + first.content + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role != 'system' %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

# Tools in the system turn, calls as JSON, results in a turn of their own (Llama 3.1).
LLAMA3_TOOLS = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nKnowledge until 2023\n\n' }}
{%- if tools %}{% for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# No turn for the system: its text goes before the first user's (Gemma 2 and 3).
GEMMA_SYSTEM = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\n\n' %}
{%- set messages = messages[1:] %}{% else %}{% set head = '' %}{% endif %}
{%- for message in messages %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}
    {{- (head if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"""

# Calls as a list after a word of the template, results in brackets (Mistral 7B v0.3).
MISTRAL_TOOLS = """{{- bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == asked[-1] %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}{{- '[TOOL_CALLS] ' + message.tool_calls | tojson + eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

TEMPLATES = STYLES | {
    "qwen-tools": QWEN_TOOLS,
    "llama3-tools": LLAMA3_TOOLS,
    "gemma-system": GEMMA_SYSTEM,
    "mistral-tools": MISTRAL_TOOLS,
}
# How each family's own tokenizer cuts text into words: a template and a tokenizer belong together.
SPLITS = {"chatml": "smollm", "llama3": "llama-bpe", "qwen": "qwen2", "thinking": "qwen2", "mistral": "tekken"}
KINDS = ("byte-level", "pieces", "first word only")


@cache
def tokenizer_for(style: str | None = "chatml", kind: str = "byte-level") -> Tokenizer:
    """A small tokenizer with the template of a style, or one written out, or none."""
    split = next((value for name, value in SPLITS.items() if style and style.startswith(name)), "gpt-2")
    metadata: dict[str, Any] = gguf_of_byte_level(byte_level(), split) if kind == "byte-level" else gguf_of_pieces()
    if style is not None:
        metadata = metadata | {"tokenizer.chat_template": TEMPLATES.get(style, style)}
    loaded = load_gguf(metadata)
    if kind == "first word only":  # a space goes before the first word of a text, not after control tokens
        tree = json.loads(loaded.backend.to_str())
        tree["normalizer"] = None
        tree["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        loaded = replace(loaded, backend=tokenizers.Tokenizer.from_str(json.dumps(tree)))
    return Tokenizer(loaded)


def write_lines(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON lines; bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def resumed(cfg: Any, cut: int, take: int | None = None, **runtime: Any) -> tuple[list[Any], list[Any]]:
    """What comes after `cut` items in one go, and what comes in a new object that is given the state, through JSON."""
    whole = cfg.build(**runtime)
    for _ in islice(whole, cut):
        pass
    state = json.loads(json.dumps(whole.state()))
    rest = list(islice(whole, take))
    again = cfg.build(**runtime)
    again.restore(state)
    found = list(islice(again, take))
    assert again.state() == whole.state()  # places and counts too
    for source in (whole, again):
        source.close()
    return rest, found
