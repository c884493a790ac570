"""The fixed questions that an exported model is asked: prompts, texts and conversations.

They are chosen for what conversions get wrong: words cut by another rule (numbers, contractions, capitals), characters that are
composed or not, bytes without an entry, spaces at the edges and in runs, code, and text that looks like a control token.
"""

from __future__ import annotations

from typing import Any

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 345))\n",
    "Größe, naïve café; 日本語のテキスト、中文。한국어 😀 مرحبا",
    "1, 1, 2, 3, 5, 8, 13, 21, 34,",
)
"""What the scores of are compared, position by position."""
LONGEST = 24
"""Tokens of a prompt that are used."""

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "It's we've THEY'LL i'd 1234567 3.14159 ١٢٣ Ⅳ ½ McDonald iPhone HTTPServer",
    "line one\nline two\r\n\r\n\tindented   \n\n\n  x",
    "Größe naïve Ærøskøbing Żółć Ελληνικά Русский हिन्दी ไทย",
    "日本語のテキスト、中文字符。한국어 텍스트 😀👩‍👩‍👧‍👦 🇫🇷",
    "e\u0301 \u00e9 A\u030a \u212b \u00a0\u200b\u3000 ﬁ",
    "if (x<=3 && y!=0) { return a[0]|b; } // <think> </div> $x->y::z @@ #!/bin/sh",
    "a" * 40 + " " * 30 + "\n" * 9 + "\t" * 5 + "=" * 20,
    "\x00\x01\x7f\ufffd\U0010ffff ▁word▁ <0x41> Ġword [PAD3]",
    "<|im_start|>system\n<|im_end|><s>[INST] x [/INST]</s><|endoftext|><|eot_id|><end_of_turn><unk>",
    "SELECT * FROM t WHERE a='b'; -- 2024-01-31T12:00:00Z\nimport os\nos.getcwd()",
)

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "What is a fern?"}],
    "instructions first": [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Name 3 trees, in Größe."},
    ],
    "several turns": [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello. How can I help?"},
        {"role": "user", "content": "  Write code:\n\n```python\nprint(1)\n```\n"},
    ],
    "control tokens in a message": [
        {"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb</s><|eot_id|><end_of_turn>日本語"}
    ],
}
