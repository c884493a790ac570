"""Small vocabularies trained in a moment, as `tokenizer.json` texts and as GGUF metadata, and sample texts."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, and we've 67 foxes; they'll run!",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 22))\t# a comment\n",
    "Größe, naïve café, Ærøskøbing; 日本語のテキスト、中文字符。한국어 텍스트 😀👩‍👩‍👧‍👦 e\u0301",
    "system user assistant tool You are helpful. What is the capital of France? Paris.   spaces   \n\n",
] * 4

_CONTROL_WORDS = """
<unk> <s> </s> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>
[INST] [/INST] <bos> <eos> <start_of_turn> <end_of_turn> <|system|> <|user|> <|assistant|> <|end|>
"""
CONTROL = _CONTROL_WORDS.split()

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "line one\nline two\r\n\r\n\tindented   \n",
    "It's we've THEY'LL 1234567 3.14 ١٢٣ Ⅳ ½",
    "日本語 中文 한국어 😀👩‍👩‍👧‍👦 e\u0301 Å \u200b\u00a0x",
    "if (x<=3) { return a[0]|b; } // <think> </div>",
    "a" * 50 + " " * 40 + "\n" * 9,
    "\x00\x01\x7f\ufffd\U0010ffff",
]


@cache
def byte_level(split: str = "gpt-2") -> str:
    """A byte-level BPE tokenizer.json with all the control tokens, and `<think>` as a token that is no control token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer.to_str()


def gguf_of_byte_level(source: str, pre: str) -> dict[str, Any]:
    tree = json.loads(source)
    added = {token["id"]: token for token in tree["added_tokens"]}
    tokens = {i: text for text, i in tree["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    types = [1 if i not in added else 3 if added[i]["special"] else 4 for i in sorted(tokens)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens[i] for i in sorted(tokens)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tree["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": CONTROL.index("<s>"),
        "tokenizer.ggml.eos_token_id": CONTROL.index("<|im_end|>"),
    }


@cache
def pieces_vocabulary() -> tuple[tuple[str, int, float], ...]:
    """A SentencePiece-like vocabulary: (text, GGUF type, score)."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=500, limit_alphabet=90, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    entries: list[tuple[str, int, float]] = [("<unk>", 2, 0.0)]
    entries += [(text, 3, 0.0) for text in CONTROL if text != "<unk>"]
    entries += [(f"<0x{byte:02X}>", 6, 0.0) for byte in range(256)]
    entries += [("<think>", 4, 0.0), ("</think>", 4, 0.0)]
    merged = [text for text, _ in sorted(vocab.items(), key=lambda item: item[1])]
    entries += [(text, 1, float(-rank)) for rank, text in enumerate(merged)]
    return tuple(entries)


def gguf_of_pieces(add_space_prefix: bool = True) -> dict[str, Any]:
    entries = pieces_vocabulary()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in entries],
        "tokenizer.ggml.token_type": [type_ for _, type_, _ in entries],
        "tokenizer.ggml.scores": [score for _, _, score in entries],
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
        "tokenizer.ggml.bos_token_id": CONTROL.index("<s>"),
        "tokenizer.ggml.eos_token_id": CONTROL.index("</s>"),
        "tokenizer.ggml.unknown_token_id": 0,
    }


def pieces_by_definition(text: str, add_space_prefix: bool) -> list[int]:
    """SentencePiece's own rule, spelled out: join the neighbours whose joint piece has the best score, leftmost first;
    what is no piece at the end becomes bytes."""
    entries = pieces_vocabulary()
    ids = {entry[0]: i for i, entry in enumerate(entries)}
    score = {piece: value for piece, type_, value in entries if type_ == 1}
    text = ("▁" if add_space_prefix and text else "") + text.replace(" ", "▁")
    parts = list(text)
    while True:
        options = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not options:
            break
        at = min(options)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out: list[int] = []
    for part in parts:
        out += [ids[part]] if part in score else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return out
